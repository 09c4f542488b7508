"""The leader thread of one vetting: conducts, judges, writes, prints and has the exit code; what earlier vettings may tell it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Protocol, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet import files, output
from pytest_mlhpc.node.vet.course import VettingRun
from pytest_mlhpc.node.vet.files import WrittenVerdict
from pytest_mlhpc.node.vet.finding import Exit, NodeReport, PairResult, Report, VetVerdict
from pytest_mlhpc.node.vet.judge import judge
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.place import VetPlace, key_of, leave_word, listen, own_addresses, told_ports
from pytest_mlhpc.node.vet.policies import built_in
from pytest_mlhpc.node.vet.workers import budget_of


@dataclass(frozen=True)
class Earlier:
    """What is known from before: settings with what was learned, and results by host that may be used for an equal boot id.

    ``pairs`` are exchanges between all nodes, or none. ``age_s`` is the oldest's.
    """

    settings: VetSettings
    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    pairs: Tuple[PairResult, ...] = ()
    age_s: float = 0.0


class ResultStore(Protocol):
    """Where earlier vettings are kept; the controller's (``vetting/reuse.py``), as the payload keeps nothing.

    ``grace_s`` is how long ``after`` may take, in seconds.
    """

    @property
    def grace_s(self) -> float:
        """Return it."""
        ...

    def before(self, settings: VetSettings, hosts: Sequence[str]) -> Earlier:
        """Return what is known of these nodes."""
        ...

    def after(
        self, identity: str, verdict: VetVerdict, report: Report, settings: VetSettings, reused: Sequence[str]
    ) -> None:
        """Take in a verdict; *reused* are the hosts that were not measured again."""
        ...


#: Share of the whole time, and most seconds, that are kept for the judge and the files.
JUDGE_SHARE, JUDGE_MOST_S = 0.05, 3.0

#: How long the verdict and its files may take beyond the deadline before they are given up, in seconds.
LAST_S = 3.0

#: How long earlier results may take to be read: in seconds, and as a share of the whole time.
MEMORY_S, MEMORY_SHARE = 10.0, 0.2

#: How long other nodes' agents are waited for when there is nothing to vet, to tell them so, in seconds.
COME_S = 10.0

#: From how many nodes on the usual limit of open files (1024) may be too low.
MANY = 200

T = TypeVar("T")


class Session:
    """One vetting as the first node conducts it. ``code`` is None until it is over; ``stage`` says what it is at."""

    def __init__(
        self,
        settings: VetSettings,
        place: VetPlace,
        first: Wire,
        environ: Mapping[str, str],
        *,
        begun: float,
        memory: Optional[ResultStore] = None,
    ) -> None:
        self._settings, self._place, self._first, self._environ = settings, place, first, environ
        self._begun, self._memory = begun, memory
        self._earlier = Earlier(settings)
        self._reused: Tuple[str, ...] = ()
        self._given_up = threading.Event()
        self.code: Optional[int] = None
        self.stage = "beginning"
        self._leader: Optional[Leader] = None
        self._word = ""

    @property
    def grace_s(self) -> float:
        """How long it may take beyond the deadline, in seconds."""
        return LAST_S + (self._memory.grace_s if self._memory is not None else 0.0)

    def give_up(self) -> None:
        """Say nothing more: the process is ending."""
        self._given_up.set()

    def run(self) -> None:
        """Conduct it. Whatever fails here is exit code 4 with its words."""
        try:
            self.code = int(self._run())
        except Exception as error:  # noqa: BLE001 - the thread's last chance to say what is the matter
            sys.stderr.write(
                f"mlhpc vet: internal error while {self.stage}: {type(error).__name__}: {error}\n"
            )
            sys.stderr.write("".join(traceback.format_tb(error.__traceback__)[-3:]))
            self.code = int(Exit.INTERNAL)
        finally:
            self._first.end("over")
            with contextlib.suppress(OSError):
                self._first.close()

    def _run(self) -> int:
        place, key = self._place, key_of(self._environ)
        listening = None
        if place.nodes > 1:
            ports = told_ports(place, key)
            self.stage = f"listening at port {' or '.join(map(str, ports))}, of which one must be free"
            listening = listen(ports)
        if place.nodes > MANY:
            from pytest_mlhpc.node.processes import raise_file_limit

            raise_file_limit(place.nodes)
        self._leader = Leader(place, key, self._first, listening)
        try:
            return self._vet(self._leader, listening)
        except files.FilesError as error:
            sys.stderr.write(f"mlhpc vet: error: {error}\n")
            return Exit.USAGE
        finally:
            self._dismiss()

    def _vet(self, leader: Leader, listening: Optional[socket.socket]) -> int:
        settings = self._settings
        self.stage = f"preparing the folder {settings.out}"
        folder = files.prepare(Path(settings.out)) if settings.out else None
        if listening is not None and settings.out:
            addresses, port = own_addresses(self._place.host), int(listening.getsockname()[1])
            self._word = leave_word(settings.out, key_of(self._environ), addresses, port)
        self._recall()
        self.stage = "vetting"
        report = self._conduct(leader)
        self._dismiss()
        self.stage = "judging"
        verdict = judge(report, self._settings, built_in().changed(settings.bounds))
        if self._given_up.is_set():
            return Exit.INTERNAL
        code = int(verdict.exit)
        if folder is not None:
            self.stage = f"writing the verdict to {settings.out}"
            try:
                folder.write(verdict, report)
            except files.FilesError as error:
                sys.stderr.write(f"mlhpc vet: error: {error}\n")
                code = int(Exit.INTERNAL)
        identity = folder.id if folder is not None else uuid.uuid4().hex
        self._remember(identity, verdict, report)
        self.stage = "printing the verdict"
        with contextlib.suppress(BrokenPipeError):
            if settings.as_json:
                output.show_json(WrittenVerdict(identity, time.time_ns(), verdict), sys.stdout)
            else:
                output.show(verdict, sys.stdout)
        return code

    def _recall(self) -> None:
        """Ask for what is known from before, but not for long: a hung file server must not end what it only helps."""
        memory, settings, place = self._memory, self._settings, self._place
        if memory is None:
            return
        hosts = [place.name_of(rank) for rank in range(place.nodes)]
        limit_s = min(MEMORY_S, MEMORY_SHARE * budget_of(settings))
        self.stage = "reading what earlier vettings found"
        found = within(limit_s, lambda: memory.before(settings, hosts))
        if found is None:
            sys.stderr.write(
                f"mlhpc vet: what earlier vettings found could not be read within {limit_s:g} s\n"
            )
            return
        self._earlier, self._settings = found, found.settings

    def _remember(self, identity: str, verdict: VetVerdict, report: Report) -> None:
        memory, settings, reused = self._memory, self._settings, self._reused
        if memory is None:
            return
        self.stage = "keeping the verdict"

        def after() -> bool:
            memory.after(identity, verdict, report, settings, reused)
            return True

        done = within(memory.grace_s, after)
        if done is None:
            sys.stderr.write(
                f"mlhpc vet: the verdict could not be kept, or acted upon, within {memory.grace_s:g} s\n"
            )

    def _conduct(self, leader: Leader) -> Report:
        settings, budget = self._settings, budget_of(self._settings)
        deadline = self._begun + budget - min(JUDGE_MOST_S, JUDGE_SHARE * budget)
        policy = built_in().changed(settings.bounds)
        course = VettingRun(leader, settings, policy, begun=self._begun, deadline=deadline)
        report = course.run(self._earlier.nodes, self._earlier.pairs)
        self._reused = course.reused
        return report

    def _dismiss(self) -> None:
        """Tell all that it is over; who has not come yet, because we failed so early, is given a little time to hear it."""
        leader, self._leader = self._leader, None
        if leader is not None:
            if self.stage != "vetting":
                leader.until(lambda: all(seat.came for seat in leader.seats), time.monotonic() + COME_S)
            leader.close()
        if self._word:
            with contextlib.suppress(OSError):
                Path(self._word).unlink()


def within(limit_s: float, act: Callable[[], T]) -> Optional[T]:
    """Return what *act* returns, or None when it takes longer; then it goes on in a thread that nobody waits for.

    Raises:
        Exception: what it raised.
    """
    found: List[T] = []
    failed: List[Exception] = []

    def work() -> None:
        try:
            found.append(act())
        except Exception as error:  # noqa: BLE001 - handed on below
            failed.append(error)

    thread = threading.Thread(target=work, name="within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return found[0] if found else None
