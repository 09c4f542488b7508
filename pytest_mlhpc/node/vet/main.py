"""One process of a vetting: ``python -m pytest_mlhpc.node.vet.main SETTINGS.json``. On the first node its leader thread conducts, judges, writes and prints."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Protocol, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.agents.wire import Wire, listen
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet import output, verdict_files
from pytest_mlhpc.node.vet.agent import Agent, farewell
from pytest_mlhpc.node.vet.checks.job_processes import pids, variables
from pytest_mlhpc.node.vet.finding import Exit, NodeReport, PairResult, Report, VetVerdict
from pytest_mlhpc.node.vet.judge import judge
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.machine import Machine
from pytest_mlhpc.node.vet.place import (
    WRITE_S,
    PlaceError,
    VetPlace,
    announced_ports,
    key_of,
    own_addresses,
    place_of,
    shared_key,
    write_leader_file,
)
from pytest_mlhpc.node.vet.policy import built_in
from pytest_mlhpc.node.vet.verdict_files import WrittenVerdict
from pytest_mlhpc.node.vet.vetting_run import VettingRun
from pytest_mlhpc.node.vet.workers import WorkerModules, WorkerSignals, budget_of


@dataclass(frozen=True)
class PreviousResults:
    """What is known from before: settings with what was learned, and results by host that may be used for an equal boot id.

    ``pairs`` are exchanges between all nodes, or none.
    """

    settings: VetSettings
    nodes: Mapping[str, NodeReport] = field(default_factory=dict)
    pairs: Tuple[PairResult, ...] = ()


class ResultStore(Protocol):
    """Where earlier vettings are stored; the controller's (``vetting/reuse.py``), as the payload keeps nothing.

    ``grace_s`` is how long ``after`` may take, in seconds.
    """

    @property
    def grace_s(self) -> float:
        """Return it."""
        ...

    def before(self, settings: VetSettings, hosts: Sequence[str]) -> PreviousResults:
        """Return what is known of these nodes."""
        ...

    def after(
        self, identity: str, verdict: VetVerdict, report: Report, settings: VetSettings, reused: Sequence[str]
    ) -> None:
        """Take in a verdict; *reused* are the hosts that were not measured again."""
        ...


#: Share of the whole time, and most seconds, that are reserved for the judge and the files.
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
        self._earlier = PreviousResults(settings)
        self._reused: Tuple[str, ...] = ()
        self._given_up = threading.Event()
        self.code: Optional[int] = None
        self.stage = "beginning"
        self._leader: Optional[Leader] = None
        self._leader_file = ""

    @property
    def grace_s(self) -> float:
        """How long it may take beyond the deadline, in seconds."""
        return LAST_S + (self._memory.grace_s if self._memory is not None else 0.0)

    def give_up(self) -> None:
        """Say nothing more: the process is ending."""
        self._given_up.set()

    def run(self) -> None:
        """Conduct it. Whatever fails here is exit code 4 with its message."""
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
            ports = announced_ports(place, key)
            self.stage = f"listening at port {' or '.join(map(str, ports))}, of which one must be free"
            listening = listen(ports)
        if place.nodes > MANY:
            from pytest_mlhpc.node.processes import raise_file_limit

            raise_file_limit(place.nodes)
        self._leader = Leader(place, key, self._first, listening)
        try:
            return self._vet(self._leader, listening)
        except verdict_files.FilesError as error:
            sys.stderr.write(f"mlhpc vet: error: {error}\n")
            return Exit.USAGE
        finally:
            self._dismiss()

    def _vet(self, leader: Leader, listening: Optional[socket.socket]) -> int:
        settings = self._settings
        self.stage = f"preparing the folder {settings.out}"
        folder = verdict_files.prepare(Path(settings.out)) if settings.out else None
        if listening is not None and settings.out:
            addresses, port = own_addresses(self._place.host), int(listening.getsockname()[1])
            self._leader_file = write_leader_file(settings.out, key_of(self._environ), addresses, port)
        self._read_previous()
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
            except verdict_files.FilesError as error:
                sys.stderr.write(f"mlhpc vet: error: {error}\n")
                code = int(Exit.INTERNAL)
        identity = folder.id if folder is not None else uuid.uuid4().hex
        self._store(identity, verdict, report)
        self.stage = "printing the verdict"
        with contextlib.suppress(BrokenPipeError):
            if settings.as_json:
                output.show_json(WrittenVerdict(identity, time.time_ns(), verdict), sys.stdout)
            else:
                output.show(verdict, sys.stdout)
        return code

    def _read_previous(self) -> None:
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

    def _store(self, identity: str, verdict: VetVerdict, report: Report) -> None:
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
                f"mlhpc vet: the verdict could not be stored, or acted upon, within {memory.grace_s:g} s\n"
            )

    def _conduct(self, leader: Leader) -> Report:
        settings, budget = self._settings, budget_of(self._settings)
        deadline = self._begun + budget - min(JUDGE_MOST_S, JUDGE_SHARE * budget)
        policy = built_in().changed(settings.bounds)
        vetting_run = VettingRun(leader, settings, policy, begun=self._begun, deadline=deadline)
        report = vetting_run.run(self._earlier.nodes, self._earlier.pairs)
        self._reused = vetting_run.reused
        return report

    def _dismiss(self) -> None:
        """Tell all that it is over; who has not come yet, because we failed so early, is given a little time to hear it."""
        leader, self._leader = self._leader, None
        if leader is not None:
            if self.stage != "vetting":
                leader.until(lambda: all(state.came for state in leader.states), time.monotonic() + COME_S)
            leader.close()
        if self._leader_file:
            with contextlib.suppress(OSError):
                Path(self._leader_file).unlink()


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


#: How long the first task may take to appear, and how often it is looked for, in seconds: srun starts all at once.
APPEARS_S, LOOK_S = 5.0, 0.1


def first_task(machine: Machine) -> Optional[int]:
    """Return the process of our job step's first task on this node, None where there is none (any more)."""
    environ = machine.environ
    step = (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID"))
    for pid in pids(machine):
        theirs = variables(machine, pid)
        if theirs.get("SLURM_LOCALID") == "0" and step == (
            theirs.get("SLURM_JOB_ID"),
            theirs.get("SLURM_STEP_ID"),
        ):
            return pid
    return None


def stay(environ: Mapping[str, str], most_s: float, machine: Optional[Machine] = None) -> bool:
    """Wait until the first task of this node has ended, *most_s* seconds at most; return whether there was one.

    Without pidfd_open(2) (Linux 5.3, Python 3.9) there is no waiting.
    """
    if not environ.get("SLURM_STEP_ID") or not hasattr(os, "pidfd_open"):
        return False
    machine = machine or Machine(environ=environ)
    deadline = time.monotonic() + min(APPEARS_S, most_s)
    pid = first_task(machine)
    while pid is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # nothing tells when another process begins
        pid = first_task(machine)
    if pid is None:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is old
        return True
    try:
        select.select([descriptor], [], [], max(0.0, most_s))
    finally:
        os.close(descriptor)
    return True


#: How long the folder that all nodes share may take to give the key, in seconds.
KEY_S = 2 * WRITE_S


def run(
    settings: VetSettings,
    environ: Mapping[str, str],
    programs: Optional[WorkerModules] = None,
    memory: Optional[ResultStore] = None,
) -> int:
    """Vet, as one node of those that do; return the exit code. Processes that cannot be ended are left behind.

    Where the leader itself hangs (in writing to a file server, say) this process ends at once, by exit code 4.

    *memory* is asked for earlier results and given this one's, on the first node alone.
    """
    try:
        place = place_of(environ, hosts=settings.hosts, single=settings.single)
    except PlaceError as error:
        _complain(str(error))
        return Exit.USAGE
    if place.extra:
        if settings.wanted.purpose == "job":  # the first one reads how all tasks of the node are bound
            stay(environ, budget_of(settings))
        return Exit.READY  # another process on this node does it
    if place.rank == 0 and settings.need > place.nodes:
        nodes = "1 node" if place.nodes == 1 else f"{place.nodes} nodes"
        _complain(f"--need {settings.need}, but there is {nodes}{': ' + place.hint if place.hint else ''}")
        return Exit.USAGE
    if place.hint:
        _complain(place.hint)
    try:
        shared, secret = _secret(settings, place, environ)
    except OSError as error:
        _complain(f"the key of this job's processes: {error.filename}: {error.strerror}")
        return Exit.READY if place.rank else Exit.USAGE
    environ = {**environ, **secret}
    signals, chosen = WorkerSignals(), programs or WorkerModules()
    try:
        if place.rank == 0:
            return _lead(settings, place, chosen, signals, environ=environ, memory=memory)
        return _follow(Agent(settings, place, chosen, signals, environ=environ), place, signals)
    finally:
        signals.close()
        if shared and place.rank == 0:
            with contextlib.suppress(OSError):
                Path(shared).unlink()


def _secret(
    settings: VetSettings, place: VetPlace, environ: Mapping[str, str]
) -> Tuple[str, Mapping[str, str]]:
    """Return the file of the secret that all nodes' processes share, and the variable that holds it; neither for one alone.

    Raises:
        OSError: it cannot be had, or is another user's.
    """
    if place.nodes == 1:
        return "", {}
    found = within(KEY_S, lambda: shared_key(environ, settings.out))
    if found is None:
        text = f"no answer within {KEY_S:g} s; look at this file system, or set MLHPC_VET_KEY on all nodes"
        raise OSError(errno.ETIMEDOUT, text, settings.out or ".")
    return found


def _lead(
    settings: VetSettings,
    place: VetPlace,
    programs: WorkerModules,
    signals: WorkerSignals,
    *,
    environ: Mapping[str, str],
    memory: Optional[ResultStore],
) -> int:
    """Be the first node, and conduct."""
    begun = time.monotonic()
    ours, theirs = socket.socketpair()
    session = Session(settings, place, Wire(ours), environ, begun=begun, memory=memory)
    thread = threading.Thread(target=session.run, name="leader", daemon=True)
    thread.start()
    trouble = Agent(settings, place, programs, signals, environ=environ, wire=Wire(theirs)).work()
    if signals.received:
        session.give_up()
        return _stopped(signals)
    thread.join(max(0.1, begun + budget_of(settings) + session.grace_s - time.monotonic()))
    if session.code is None:
        why = f": {trouble}" if trouble else ""
        _complain(f"the leader did not come to an end in time, {session.stage}{why}")
        leave(Exit.INTERNAL)  # whatever the thread hangs in, it may hold what Python wants before it ends
    return session.code or 0


def _follow(agent: Agent, place: VetPlace, signals: WorkerSignals) -> int:
    """Be a node that is not the first."""
    trouble = agent.work()
    if signals.received:
        return _stopped(signals)
    if trouble:
        farewell(place, f"{trouble}; the verdict, and the exit code, are the first node's")
    return Exit.READY


def _stopped(signals: WorkerSignals) -> int:
    _complain(f"ended by {signal.Signals(signals.received).name}: there is no verdict")
    return 128 + signals.received


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(f"mlhpc vet: {text}\n")
        sys.stderr.flush()


def main(
    argv: List[str], programs: Optional[WorkerModules] = None, memory: Optional[ResultStore] = None
) -> int:
    """Read the settings and vet; *programs* and *memory* as of :func:`run`."""
    if len(argv) != 1 or argv[0].startswith("-"):
        _complain("usage: python -m pytest_mlhpc.node.vet.main SETTINGS.json")
        return Exit.USAGE
    try:
        settings = from_json(VetSettings, read_json(Path(argv[0]).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, SchemaError) as error:
        _complain(f"the settings {argv[0]} cannot be used: {error}")
        return Exit.USAGE
    return run(settings, os.environ, programs, memory)


def leave(code: int) -> None:
    """End this process now, with threads and children that hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
