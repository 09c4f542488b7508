"""One Slurm allocation: the files that its batch writes become events, without a query of Slurm.

Read here what the provisioner knows of an allocation at any time, and when Slurm has to be queried about it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.files import read_json, refuse_others
from pytest_mlhpc.node.processes import last_lines
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.scheduler.causes import DOUBTFUL
from pytest_mlhpc.provision.scheduler.client import SchedulerJob, SchedulerState

#: Most bytes that one read takes from one file; the next read takes the rest.
READ_BYTES = 4 * 1024 * 1024

#: A results file counts as damaged after so long, in seconds: when it is shorter than before, and when it cannot be read.
#: Network file systems show old sizes for moments, and do not answer for a minute or two while their server restarts.
CUT_TOLERANCE_S, AWAY_TOLERANCE_S = 10.0, 120.0
#: Most bytes of a job's own output that an error text quotes: its end.
TAIL_BYTES = 4096


#: A smaller difference of clocks is not reported, in seconds: a busy file system may take that long to write a file.
CLOCK_TOLERANCE_S = 15.0

#: Interval between two reads of a batch's files, and for a batch older than OLD_AFTER_S, in seconds. A read opens one file.
READ_INTERVAL_S, READ_INTERVAL_OLD_S, OLD_AFTER_S = 1.0, 2.5, 600.0

#: How long the files of an ended batch may lag on a network file system, in seconds.
FILES_LAG_S = 30.0

#: A job that neither queue nor accounting knows counts as gone after so long, in seconds: accounting lags.
UNKNOWN_LIMIT_S = 60.0


@dataclass(frozen=True)
class BatchStart:
    """Start of a batch: the id of its job, its nodes, its time (ns UTC by the file system's clock).

    ``ahead_s`` is how far the first node's own clock is ahead, in seconds, with the time that it takes to write a file.
    """

    job_id: str
    nodes: tuple[str, ...]
    started_ns: int
    ahead_s: float = 0.0


@dataclass(frozen=True)
class BatchUpdate:
    """What is new in a batch's files. ``exit`` is the batch's exit code after its end.

    ``damage`` is the fault of a file; it counts once it has lasted for ``tolerance_s`` seconds.
    """

    start: BatchStart | None = None
    data: bytes = b""
    exit: int | None = None
    more: bool = False  #: more can be read at once
    damage: str = ""
    tolerance_s: float = AWAY_TOLERANCE_S


class BatchFiles:
    """The files of one allocation's batch: ``ID.up``, ``ID.jsonl``, ``ID.over`` (see ``node/batch/output.py``)."""

    def __init__(self, folder: Path, allocation_id: str) -> None:
        self._up = folder / f"{allocation_id}.up"
        self._lines = folder / f"{allocation_id}.jsonl"
        self._over = folder / f"{allocation_id}.over"
        self._offset = 0
        self._start_read = False
        self.beat_ns = 0  #: mtime of the lines by the file system's clock; it changes while the batch lives

    def read(self, *, over_exists: bool = True) -> BatchUpdate:
        """Return what is new. Opening a file makes a network file system fetch its present state (close-to-open).

        ``over_exists``: whether to open ``ID.over``; a listing of the folder may have shown that it does not exist.
        """
        # Before the lines: all lines that precede it are visible then.
        over = self._read_json(self._over) if over_exists else None
        start = None
        if not self._start_read and (found := self._read_json(self._up)) is not None:
            start = _parse_start(*found)
            self._start_read = start is not None
        update = replace(self._read_lines(), start=start)
        if over is None or update.more or update.damage:
            return update
        code = over[0].get("exit")
        return replace(update, exit=code if isinstance(code, int) else 1)

    def _read_lines(self) -> BatchUpdate:
        try:
            fd = os.open(self._lines, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return self._damaged("has vanished") if self._offset else BatchUpdate()
        except OSError as error:
            return self._damaged(f"cannot be read: {error.strerror}")
        try:
            found = os.fstat(fd)
            refuse_others(self._lines, found)
            self.beat_ns = found.st_mtime_ns
            if found.st_size < self._offset:
                return self._damaged(f"was cut to {found.st_size} bytes", CUT_TOLERANCE_S)
            data = os.pread(fd, READ_BYTES, self._offset)
        except OSError as error:
            return self._damaged(f"cannot be read: {error.strerror}")
        finally:
            os.close(fd)
        self._offset += len(data)
        return BatchUpdate(data=data, more=self._offset < found.st_size)

    def _damaged(self, fault: str, tolerance_s: float = AWAY_TOLERANCE_S) -> BatchUpdate:
        return BatchUpdate(damage=f"the results file {self._lines} {fault}", tolerance_s=tolerance_s)

    @staticmethod
    def _read_json(path: Path) -> tuple[Mapping[str, Any], int] | None:
        """Return a file's content and the time of its last change (ns UTC, the file system's clock)."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                refuse_others(path, found)
                changed_ns = found.st_mtime_ns
                content = read_json(file.read(1 << 20))
        except (OSError, ValueError, RecursionError):
            return None  # another user's, or not there yet: files are renamed into place whole
        return (content, changed_ns) if isinstance(content, dict) else None


def list_batch_files(folder: Path) -> dict[str, set[str]]:
    """Return id -> suffixes (up, jsonl, over) of the files that batches have written, by one listing for all."""
    found: dict[str, set[str]] = {}
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone, every second
    except OSError:
        return found
    for name in names:
        if not name.startswith("."):
            allocation_id, _, suffix = name.rpartition(".")
            found.setdefault(allocation_id, set()).add(suffix)
    return found


def _parse_start(found: Mapping[str, Any], changed_ns: int) -> BatchStart | None:
    nodes, job_id, started = found.get("nodes"), found.get("job_id"), found.get("started_ns")
    if not (isinstance(nodes, list) and all(isinstance(node, str) for node in nodes)):
        return None
    ahead_s = (started - changed_ns) / 1e9 if isinstance(started, int) else 0.0
    return BatchStart(str(job_id or ""), tuple(nodes), changed_ns, ahead_s)


def clock_note(start: BatchStart) -> str:
    """Return a warning about the first node's clock, empty if it is right."""
    if abs(start.ahead_s) < CLOCK_TOLERANCE_S:
        return ""
    how = "ahead of" if start.ahead_s > 0 else "behind"
    return (
        f"the clock of {start.nodes[0] if start.nodes else 'its node'} is {abs(start.ahead_s):.0f} s {how} the file system's: "
        "times of its runs are as far off; check its time service"
    )


@dataclass
class JobAllocation:
    """State of one allocation. Times are of the provisioner's monotonic clock, in seconds."""

    handle: Handle
    name: str  #: the job's unique name
    since: float  #: submitted or adopted
    folder: Path  #: of the batch's files
    output: Path  #: the job's own output
    files: BatchFiles
    conversation: Conversation
    job: SchedulerJob | None = None  #: the last answer of the queue
    started: bool = False
    exit: int | None = None  #: the batch's exit code after its end
    beat_ns: int = 0
    beat_at: float = 0.0  #: when the heartbeat last changed
    reported: tuple[JobState, str] | None = None
    #: Messages of failed runs, until Slurm is queried about their cause.
    doubtful: list[Message] = field(default_factory=list)
    unknown_since: float | None = None  #: since when the queue does not know the job
    submit_tries: int = 0
    unanswered: int = 0  #: submissions without an answer and a known job: Slurm may have accepted them
    unanswered_at: float | None = None  #: time of the last of them
    next_read: float = 0.0
    started_at: float = 0.0
    exit_at: float = 0.0  #: when ``exit`` was first read
    duplicate: bool = False  #: a repeated submission may have made another job of the same name
    strange_answers: int = 0  #: answers in a row by which a started job waits for nodes
    cancelling: bool = False  #: its job has to be cancelled
    cancelled_at: float | None = None  #: when Slurm accepted that
    given_up: MlhpcError | None = None  #: its error once its job is gone
    damaged_since: float | None = None  #: since when the results file is damaged
    damage: str = ""  #: the lasting fault of the results file
    trouble: str = ""  #: why nothing comes of its batch at present
    awaits_energy: bool = False  #: the end of each run waits for its energy in the accounting
    energy_queries: int = 0  #: queries of the accounting that had no energy yet

    @property
    def submitted(self) -> bool:
        """Whether Slurm has accepted it."""
        return bool(self.handle.native_id)

    @property
    def pending(self) -> bool:
        """Whether it waits for nodes, as far as known."""
        return self.submitted and not self.started

    @property
    def needs_diagnosis(self) -> bool:
        """Whether files show a fault whose cause only Slurm knows."""
        return bool(self.doubtful) or (self.exit is not None and not self.conversation.complete)

    @property
    def urgent(self) -> bool:
        """Whether Slurm has to be queried at once."""
        return self.needs_diagnosis or self.strange_answers > 0 or self.given_up is not None

    def note_unanswered(self, now: float) -> None:
        """Note that a submission got no answer."""
        self.unanswered, self.unanswered_at = self.unanswered + 1, now

    def note_job_id(self, job_id: str) -> None:
        """Note the job of a submission that got no answer."""
        self.handle = replace(self.handle, native_id=job_id)
        self.unanswered = max(0, self.unanswered - 1)
        self.unanswered_at = self.unanswered_at if self.unanswered else None

    def presumed_ended(self, now: float) -> bool:
        """Return whether Slurm has not known the job for UNKNOWN_LIMIT_S: a single answer may lack it."""
        return self.unknown_since is not None and now - self.unknown_since > UNKNOWN_LIMIT_S

    def lags(self, job: SchedulerJob | None, now: float) -> bool:
        """Return whether lines may follow although the batch has ended: network file systems show files late."""
        if self.conversation.complete:
            return False
        if self.exit is not None:
            return self.exit == 0 and now - self.exit_at < FILES_LAG_S
        if job is None or job.state is not SchedulerState.COMPLETED or not job.end_ns:
            return False
        return time.time() - job.end_ns / 1e9 < FILES_LAG_S

    def read(self, now: float, *, over_exists: bool = True) -> list[Event]:
        """Return the events of all that the batch has written since the last call; sets ``next_read``."""
        events: list[Event] = []
        old = self.started and now - self.started_at > OLD_AFTER_S
        self.next_read = now + (READ_INTERVAL_OLD_S if old else READ_INTERVAL_S)
        while True:
            update = self.files.read(over_exists=over_exists)
            if update.start is not None:
                self.started, self.started_at = True, now
                job_id, known = update.start.job_id, self.handle.native_id
                if job_id and job_id != known:
                    self.note_job_id(job_id)
                self.duplicate = self.unanswered > 0 or self.handle.native_id != known != ""
                events.append(self._start_event(update.start))
            if update.data:
                events += self._postpone_doubtful(self.conversation.take(update.data))
            self._note_damage(update, now)
            if self.files.beat_ns != self.beat_ns or not self.beat_at:
                self.beat_ns, self.beat_at = self.files.beat_ns, now
            if update.exit is not None:
                self.exit_at = now if self.exit is None else self.exit_at
                self.exit = update.exit
            if not update.more:
                return events

    def _start_event(self, start: BatchStart) -> Event:
        note = clock_note(start)
        if note:
            logging.getLogger("pytest_mlhpc").warning("job %s: %s", self.handle.native_id, note)
        self.reported = (JobState.RUNNING, note)
        return StateChanged(
            self.handle, JobState.RUNNING, note, start.nodes, self.handle.native_id, since_ns=start.started_ns
        )

    def _note_damage(self, update: BatchUpdate, now: float) -> None:
        """Set ``damage`` once the results file has been damaged for its tolerance."""
        if not update.damage:
            self.damaged_since = None
            return
        self.damaged_since = now if self.damaged_since is None else self.damaged_since
        if now - self.damaged_since >= update.tolerance_s:
            self.damage = update.damage

    def state_events(self, state: JobState, reason: str, nodes: tuple[str, ...] = ()) -> list[Event]:
        """Return the event of a state or reason that is new."""
        if self.started or self.reported == (state, reason):
            return []  # the batch's own report takes precedence
        self.reported = (state, reason)
        return [StateChanged(self.handle, state, reason, nodes)]

    def silence_events(self, trouble: str) -> list[Event]:
        """Return the event of a *trouble* for which nothing comes of a batch that has begun, and of its end (empty text)."""
        if not self.started or self.trouble == trouble:
            return []
        self.trouble = trouble
        reason = f"{trouble}; the job goes on, and this is tried again" if trouble else ""
        return [StateChanged(self.handle, JobState.RUNNING, reason)]

    def release_doubtful(self) -> list[Message]:
        """Return the postponed messages, of each run its failure and then the later ones, and clear them."""
        doubtful, self.doubtful = self.doubtful, []
        return doubtful

    def log_tail(self) -> str:
        """Return the last lines of the job's own output."""
        with contextlib.suppress(OSError), self.output.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return last_lines(file.read(TAIL_BYTES))
        return ""

    def _postpone_doubtful(self, messages: list[Message]) -> list[Event]:
        """Return events of *messages*; those from a doubtful failure of a run on wait for the diagnosis."""
        events: list[Event] = []
        for message in messages:
            postponed = any(one.run_id == message.run_id for one in self.doubtful)
            postponed = postponed or (self.awaits_energy and message.kind == "end")
            if postponed or (message.kind == "failed" and message.body.get("outcome") in DOUBTFUL):
                self.doubtful.append(message)
            else:
                events.append(LineArrived(self.handle, message))
        return events
