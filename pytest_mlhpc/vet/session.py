"""PAYLOAD. The leader's thread in the first node's process: conducts, judges, writes, prints, and has the exit code."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Optional, Protocol, Sequence, Tuple

from pytest_mlhpc.batch.pod_wire import Wire
from pytest_mlhpc.vet.course import Course
from pytest_mlhpc.vet.leader import Leader
from pytest_mlhpc.vet.load import budget_of
from pytest_mlhpc.vet.place import Place
from pytest_mlhpc.vet.policy import built_in
from pytest_mlhpc.vet.rendezvous import key_of, leave_word, listen, own_addresses, told_ports
from pytest_mlhpc.vet.report import NodeReport, PairResult, Report
from pytest_mlhpc.vet.settings import Settings
from pytest_mlhpc.vet.verdict import Exit, Verdict

#: Share of the whole time, and most seconds, that are kept for the judge and the files.
JUDGE_SHARE, JUDGE_MOST_S = 0.05, 3.0


@dataclass(frozen=True)
class Earlier:
    """What is known from before: settings with what was learned, and results by host that may be used for an equal boot id.

    ``pairs`` are exchanges between all nodes, or none. ``age_s`` is the oldest's.
    """

    settings: Settings
    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    pairs: Tuple[PairResult, ...] = ()
    age_s: float = 0.0


class Memory(Protocol):
    """Where earlier vettings are kept; the controller's (``command/remembering.py``), as the payload keeps nothing."""

    def before(self, settings: Settings, hosts: Sequence[str]) -> Earlier:
        """Return what is known of these nodes."""
        ...

    def after(
        self, identity: str, verdict: Verdict, report: Report, settings: Settings, reused: Sequence[str]
    ) -> None:
        """Take in a verdict; *reused* are the hosts that were not measured again."""
        ...


class Session:
    """One vetting as the first node conducts it. ``code`` is None until it is over; ``stage`` says what it is at."""

    def __init__(
        self,
        settings: Settings,
        place: Place,
        first: Wire,
        environ: Mapping[str, str],
        *,
        begun: float,
        memory: Optional[Memory] = None,
    ) -> None:
        self._settings, self._place, self._first, self._environ = settings, place, first, environ
        self._begun, self._memory = begun, memory
        self._earlier = Earlier(settings)
        self._reused: Tuple[str, ...] = ()
        self._given_up = threading.Event()
        self.code: Optional[int] = None
        self.stage = "beginning"
        self.verdict: Optional[Verdict] = None

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
        from pytest_mlhpc.vet import files

        settings, folder = self._settings, None
        self.stage = f"preparing {settings.out}"
        if settings.out:
            try:
                folder = files.prepare(Path(settings.out))
            except files.FilesError as error:
                sys.stderr.write(f"mlhpc vet: error: {error}\n")
                return Exit.USAGE
        if self._memory is not None:
            self.stage = "reading what earlier vettings found"
            place = self._place
            hosts = [place.name_of(rank) for rank in range(place.nodes)]
            self._earlier = self._memory.before(settings, hosts)
            self._settings = self._earlier.settings
        report = self._conduct()
        self.stage = "judging"
        verdict = self.verdict = self._judge(report)
        if self._given_up.is_set():
            return Exit.INTERNAL
        self.stage = "writing the verdict"
        code = int(verdict.exit)
        if folder is not None:
            try:
                folder.write(verdict, report)
            except files.FilesError as error:
                sys.stderr.write(f"mlhpc vet: error: {error}\n")
                code = int(Exit.INTERNAL)
        if self._memory is not None:
            identity = folder.id if folder is not None else uuid.uuid4().hex
            self._memory.after(identity, verdict, report, self._settings, self._reused)
        self._print(verdict)
        return code

    def _conduct(self) -> Report:
        settings, place, key = self._settings, self._place, key_of(self._environ)
        budget = budget_of(settings)
        deadline = self._begun + budget - min(JUDGE_MOST_S, JUDGE_SHARE * budget)
        listening, word = None, ""
        if place.nodes > 1:
            ports = told_ports(place, key)
            self.stage = f"listening at port {' or '.join(map(str, ports))}, of which one must be free"
            listening = listen(ports)
            if settings.out:
                addresses = own_addresses(place.host)
                word = leave_word(settings.out, key, addresses, int(listening.getsockname()[1]))
        leader = Leader(place, key, self._first, listening)
        self.stage = "vetting"
        try:
            policy = built_in().changed(settings.bounds)
            course = Course(leader, settings, policy, begun=self._begun, deadline=deadline)
            report = course.run(self._earlier.nodes, self._earlier.pairs)
            self._reused = course.reused
            return report
        finally:
            leader.close()
            if word:
                with contextlib.suppress(OSError):
                    Path(word).unlink()

    def _judge(self, report: Report) -> Verdict:
        from pytest_mlhpc.vet.judge import judge

        return judge(report, self._settings, built_in().changed(self._settings.bounds))

    def _print(self, verdict: Verdict) -> None:
        from pytest_mlhpc.vet import text

        with contextlib.suppress(BrokenPipeError):
            text.show(verdict, sys.stdout)
