"""One allocation as the provisioner follows it: what its batch wrote becomes events, what Slurm says completes them."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.command import last_lines
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.slurm.causes import DOUBTFUL
from pytest_mlhpc.provision.slurm.client import Job, State
from pytest_mlhpc.provision.slurm.follow import Follower, News, Up
from pytest_mlhpc.results.lines import Message

#: End of a job's own output that goes into error texts, in bytes; the output may be huge.
TAIL_BYTES = 4096


#: Clocks that differ by less are of no interest, in seconds: a busy file system may take that long to write a file.
CLOCK_S = 15.0

#: Time between two looks at the files of a batch, and of one that has run for OLD_S; in seconds. A look opens one file.
LOOK_S, LOOK_OLD_S, OLD_S = 1.0, 2.5, 600.0

#: How long the files of a batch that is over may lag behind on a network file system, in seconds.
FILES_LAG_S = 30.0

#: How long neither queue nor accounting may know a job before it counts as lost, in seconds (accounting lags).
UNKNOWN_LIMIT_S = 60.0


def clock_note(up: Up) -> str:
    """Return what is to be said of the first node's clock, empty if it is right."""
    if abs(up.ahead_s) < CLOCK_S:
        return ""
    how = "ahead of" if up.ahead_s > 0 else "behind"
    return (
        f"the clock of {up.nodes[0] if up.nodes else 'its node'} is {abs(up.ahead_s):.0f} s {how} the file system's: "
        "times of its runs are as far off; check its time service"
    )


@dataclass
class Allocation:
    """Times are of the provisioner's monotonic clock, in seconds."""

    handle: Handle
    plan: Plan
    name: str  #: the job's unique name
    since: float  #: submitted or adopted
    folder: Path  #: where its batch writes
    follower: Follower
    conversation: Conversation
    job: Job | None = None  #: as last seen in the queue
    up: bool = False
    exit: int | None = None  #: the batch's exit code once it is over
    beat_ns: int = 0
    beat_seen: float = 0.0  #: when the heartbeat last moved
    told: tuple[JobState, str] | None = None
    doubtful: list[Message] = field(default_factory=list)  #: failed runs that Slurm is to be asked about
    unknown_since: float | None = None  #: since when the queue does not know the job
    submit_tries: int = 0
    lost: int = 0  #: submissions without an answer, of which no job was seen: they may have got through
    lost_at: float | None = None  #: when the last of them was made
    next_look: float = 0.0
    up_at: float = 0.0
    over_at: float = 0.0  #: when ``exit`` was first seen
    twin: bool = False  #: there may be another job of the same name, of a submission that was repeated
    strange: int = 0  #: answers in a row by which a job that has begun waits for nodes
    cancelling: bool = False  #: its job is to be cancelled
    cancelled_at: float | None = None  #: when Slurm took that
    given_up: MlhpcError | None = None  #: why; it ends so once its job is gone
    damaged_since: float | None = None  #: since when the results file looks damaged
    damage: str = ""  #: what is wrong with it for good
    accounted: bool = False  #: whether the end of each run waits for its energy in the accounting
    asked: int = 0  #: how often the accounting was asked in vain

    @property
    def submitted(self) -> bool:
        """Whether Slurm has accepted it."""
        return bool(self.handle.native_id)

    @property
    def pending(self) -> bool:
        """Whether it waits for nodes, as far as known."""
        return self.submitted and not self.up

    @property
    def needs_words(self) -> bool:
        """Whether files say that something is wrong, and only Slurm knows what."""
        return bool(self.doubtful) or (self.exit is not None and not self.conversation.complete)

    @property
    def urgent(self) -> bool:
        """Whether Slurm is to be asked at once."""
        return self.needs_words or self.strange > 0 or self.given_up is not None

    def lose(self, now: float) -> None:
        """Note that a submission got no answer."""
        self.lost, self.lost_at = self.lost + 1, now

    def find(self, job_id: str) -> None:
        """Note the job of a submission that had got no answer."""
        self.handle = replace(self.handle, native_id=job_id)
        self.lost = max(0, self.lost - 1)
        self.lost_at = self.lost_at if self.lost else None

    def unknown(self, now: float) -> bool:
        """Whether Slurm has not known the job for so long that it counts as gone: one answer may lack it."""
        return self.unknown_since is not None and now - self.unknown_since > UNKNOWN_LIMIT_S

    def lags(self, job: Job | None, now: float) -> bool:
        """Whether lines may still come although the batch has done all its runs: network file systems show files late."""
        if self.conversation.complete:
            return False
        if self.exit is not None:
            return self.exit == 0 and now - self.over_at < FILES_LAG_S
        if job is None or job.state is not State.COMPLETED or not job.end_ns:
            return False
        return time.time() - job.end_ns / 1e9 < FILES_LAG_S

    def look(self, now: float, *, over_there: bool = True) -> list[Event]:
        """Read what the batch has written since the last look; sets when to look again."""
        events: list[Event] = []
        old = self.up and now - self.up_at > OLD_S
        self.next_look = now + (LOOK_OLD_S if old else LOOK_S)
        while True:
            news = self.follower.look(over_there=over_there)
            if news.up is not None:
                self.up, self.up_at = True, now
                job_id, known = news.up.job_id, self.handle.native_id
                if job_id and job_id != known:
                    self.find(job_id)
                self.twin = self.lost > 0 or self.handle.native_id != known != ""
                events.append(self._began(news.up))
            if news.data:
                events += self._sorted_out(self.conversation.take(news.data))
            self._note_damage(news, now)
            if self.follower.beat_ns != self.beat_ns or not self.beat_seen:
                self.beat_ns, self.beat_seen = self.follower.beat_ns, now
            if news.exit is not None:
                self.over_at = now if self.exit is None else self.over_at
                self.exit = news.exit
            if not news.more:
                return events

    def _began(self, up: Up) -> Event:
        note = clock_note(up)
        if note:
            logging.getLogger("pytest_mlhpc").warning("job %s: %s", self.handle.native_id, note)
        self.told = (JobState.RUNNING, note)
        return StateChanged(
            self.handle, JobState.RUNNING, note, up.nodes, self.handle.native_id, since_ns=up.started_ns
        )

    def _note_damage(self, news: News, now: float) -> None:
        """Believe what is wrong with the results file once it has been so for a while."""
        if not news.damage:
            self.damaged_since = None
            return
        self.damaged_since = now if self.damaged_since is None else self.damaged_since
        if now - self.damaged_since >= news.believe_s:
            self.damage = news.damage

    def state(self, state: JobState, reason: str, nodes: tuple[str, ...] = ()) -> list[Event]:
        """Return the event that tells a new state or reason, if it is new."""
        if self.up or self.told == (state, reason):
            return []  # what the batch said of itself counts more
        self.told = (state, reason)
        return [StateChanged(self.handle, state, reason, nodes)]

    def release(self) -> list[Message]:
        """Take the messages that waited for Slurm's words: of each run the failure, then what came after it."""
        held, self.doubtful = self.doubtful, []
        return held

    def last_words(self) -> str:
        """Return the last lines of the job's own output."""
        with contextlib.suppress(OSError), (self.handle.directory / "slurm.out").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return last_lines(file.read(TAIL_BYTES))
        return ""

    def _sorted_out(self, messages: list[Message]) -> list[Event]:
        """Hold back a failed run, and all after it of that run, until Slurm has said what it knows."""
        events: list[Event] = []
        for message in messages:
            held = any(one.run_id == message.run_id for one in self.doubtful)
            held = held or (self.accounted and message.kind == "end")
            if held or (message.kind == "failed" and message.body.get("outcome") in DOUBTFUL):
                self.doubtful.append(message)
            else:
                events.append(LineArrived(self.handle, message))
        return events
