"""A run that holds its nodes for a test: the test requests programs through a file, and they run one after another."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Deque, Dict, List, Mapping, Optional, Set, Tuple

from pytest_mlhpc.node import processes
from pytest_mlhpc.node.batch import output
from pytest_mlhpc.node.batch.output import ControllerLost, Lines
from pytest_mlhpc.node.batch.ranks import LauncherOutput
from pytest_mlhpc.node.batch.runs import FOREIGN_VARIABLES, SIGNAL_LAG_S, EndSignals, Site
from pytest_mlhpc.node.files import make_private, unwritten
from pytest_mlhpc.node.launch import SCHEDULER, srun_argv
from pytest_mlhpc.node.processes import CappedLog, end_descendants, reap
from pytest_mlhpc.node.protocol.channel import running_payload
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.spawn import rank_variables

#: Most bytes that are stored of one stream of one process.
OUTPUT_CAP = 16 * 1024 * 1024

#: Most reads of 64 KiB from one pipe in one go, and after the end (a stranger may write for ever).
READS, READS_AT_END = 16, 1024


class ProgramRunner:
    """Starts processes, keeps their output in *folder* (``stdout.N``, ``stderr.N``), and knows how they ended."""

    def __init__(self, folder: Path) -> None:
        self.error = ""  #: why one could not be started
        self._folder = folder
        self._processes: List[subprocess.Popen[bytes]] = []
        self._logs: List[Tuple[CappedLog, CappedLog]] = []
        self._open: Dict[int, CappedLog] = {}
        self._argv_and_environ = LauncherOutput()
        self._codes: Dict[int, int] = {}

    def start(self, argv: List[str], environment: Mapping[str, str], cwd: str) -> None:
        """Start one process; if that fails ``error`` says why, and no more are started.

        Raises:
            OSError: its logs cannot be made.
        """
        if self.error:
            return
        number = len(self._logs)
        logs = tuple(
            CappedLog(self._folder / f"{name}.{number}", OUTPUT_CAP) for name in ("stdout", "stderr")
        )
        self._logs.append((logs[0], logs[1]))
        try:
            process = subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            bad_folder = getattr(error, "filename", None) == cwd
            self.error = f"cannot start {argv[0]!r}" + (f" in {cwd!r}" if bad_folder else "") + f": {why}"
            return
        self._processes.append(process)
        for stream, log in zip((process.stdout, process.stderr), logs):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._open[stream.fileno()] = log

    @property
    def outputs(self) -> List[int]:
        """Descriptors from which output may come."""
        return list(self._open)

    @property
    def ended(self) -> bool:
        """Whether all processes have ended by themselves."""
        self._note(reap())
        return all(process.pid in self._codes for process in self._processes)

    def read_output(self, reads: int = READS) -> None:
        """Take what was printed.

        Raises:
            OSError: it cannot be stored.
        """
        for descriptor, log in list(self._open.items()):
            with contextlib.suppress(BlockingIOError):
                for _ in range(reads):
                    data = os.read(descriptor, 1 << 16)
                    if not data:
                        del self._open[descriptor]
                        break
                    log.write(data)
                    if any(log is errors for _, errors in self._logs):
                        self._argv_and_environ.feed(data)

    def close(self, ended: Mapping[int, int]) -> None:
        """Take the last output and give descriptors back; *ended* are the exit codes of what had to be ended.

        Raises:
            OSError: output cannot be stored.
        """
        self._note(ended)
        try:
            self.read_output(READS_AT_END)
        finally:
            for process in self._processes:
                process.returncode = self._codes.get(process.pid, 0)  # reaped here, not by Popen
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
            for pair in self._logs:
                for log in pair:
                    log.close()
            self._open.clear()

    @property
    def broken_off(self) -> bool:
        """Whether srun, or what it started, was ended by a signal, as happens when the whole job is."""
        arguments = self._argv_and_environ
        ended = arguments.cancelled or any(death.exit < 0 for death in arguments.deaths)
        return ended or any(code < 0 for code in self._codes.values())

    def reply(self, *, labelled: bool) -> Dict[str, Any]:
        """Return what the test receives: exit code as a shell gives it, names of logs, and srun's own troubles."""
        codes = [self._codes.get(process.pid, 0) for process in self._processes]
        code = next((code for code in codes if code), 0)
        arguments = self._argv_and_environ
        return {
            "exit": 128 - code if code < 0 else code,
            "error": self.error,
            "stdout": [str(out.path.relative_to(self._folder.parent)) for out, _ in self._logs],
            "stderr": [str(err.path.relative_to(self._folder.parent)) for _, err in self._logs],
            "dropped": sum(log.dropped for pair in self._logs for log in pair),
            "labelled": labelled,
            "failed_nodes": arguments.failed_nodes if labelled else [],
            "not_started": arguments.not_started if labelled else "",
        }

    def _note(self, ended: Mapping[int, int]) -> None:
        self._codes.update(
            {process.pid: ended[process.pid] for process in self._processes if process.pid in ended}
        )


#: Time between two checks for requests, in seconds; each opens one small file.
LOOK_S = 0.2

#: Time between SIGTERM and SIGKILL for a program whose time is over, in seconds.
GRACE_S = 5.0


@dataclass(frozen=True)
class Request:
    """One program to be started on *nodes*, ``ranks_per_node`` times on each; ``timeout_s`` counts from its start."""

    id: str
    argv: Tuple[str, ...]
    nodes: Tuple[str, ...]
    ranks_per_node: int
    cores_per_rank: int
    timeout_s: float
    env: Mapping[str, str]
    cwd: Optional[str]


def hold(plan: Plan, run: RunPlan, relay: Lines, signals: EndSignals, *, site: Site) -> None:
    """Say that the nodes are there, and do what is asked until they are released or the time is over.

    Raises:
        ControllerLost: nobody listens any more, or a signal said to end; no program is left.
    """
    directory = Path(plan.directory) / run.run_id
    good = site.nodes[: run.nodes]
    failure: Optional[Tuple[str, str]] = None
    try:
        make_private(directory)
        for name in (output.REQUESTS, output.ANSWERS):
            output.create(directory / name)
    except OSError as error:
        failure = (unwritten(error), f"cannot write {error.filename or directory}: {error.strerror}")
    if len(good) < run.nodes:
        failure = (
            "unfit_nodes",
            f"the test wants {run.nodes} nodes, there are {len(good)}: {', '.join(good)}",
        )
    if failure is None:
        body = {"protocol": PROTOCOL, "payload_sha256": running_payload(), "host": socket.gethostname()}
        relay.send(run, "started", {**body, "nodes": list(good)})
        failure = RequestServer(run, directory, good, signals, site).serve()
    if failure is not None:
        relay.send(run, "failed", {"outcome": failure[0], "text": failure[1], "log": ""})
    relay.send(run, "end", {"exit": [0]})


class RequestServer:
    """Serves the requests of one test."""

    def __init__(
        self, run: RunPlan, directory: Path, nodes: Tuple[str, ...], signals: EndSignals, site: Site
    ) -> None:
        self._run, self._directory, self._nodes, self._signals, self._site = (
            run,
            directory,
            nodes,
            signals,
            site,
        )
        self._inbox = output.Inbox(directory / output.REQUESTS)
        self._asked: Deque[Request] = collections.deque()
        self._stopped: Set[str] = set()
        self._released = False
        self._number = 0
        self._deadline = time.monotonic() + run.time_limit_s

    def serve(self) -> Optional[Tuple[str, str]]:
        """Return when the nodes are released; otherwise with the failure (outcome, text) that ends the run."""
        try:
            while not self._released:
                self._poll()
                if time.monotonic() >= self._deadline:
                    return "time_limit", self._limit_text()
                if self._asked and not self._released:
                    self._do(self._asked.popleft())
                elif not self._released:
                    self._pause([], LOOK_S)
        except OSError as error:
            return (
                unwritten(error),
                f"cannot read or write {error.filename or self._directory}: {error.strerror}",
            )
        return None

    def _poll(self) -> None:
        for found in self._inbox.read():
            kind = found.get("kind")
            if kind == "release":
                self._released = True
            elif kind == "stop":
                self._stopped.add(str(found.get("id")))
            elif kind == "run":
                try:
                    self._asked.append(request_of(found))
                except (KeyError, TypeError, ValueError) as error:
                    self._answer(str(found.get("id")), {"error": f"the request cannot be read: {error!r}"})

    def _answer(self, request_id: str, content: Mapping[str, Any]) -> None:
        output.append(self._directory / output.ANSWERS, {"id": request_id, **content})

    def _do(self, request: Request) -> None:
        """Run one program to its end, or to that of its time, and answer."""
        self._number += 1
        folder = self._directory / f"{self._number:03d}"
        make_private(folder)
        began = time.monotonic()
        until = min(began + request.timeout_s, self._deadline)
        programs = ProgramRunner(folder)
        try:
            for argv, environment in self._argv_and_environ(request):
                programs.start(argv, environment, request.cwd or str(self._directory))
            while not programs.ended and not programs.error:
                self._poll()
                ends = request.id in self._stopped or self._released
                if ends or time.monotonic() >= until:
                    break
                self._pause(programs.outputs, min(LOOK_S, max(0.0, until - time.monotonic())))
                programs.read_output()
            finished = programs.ended
        except ControllerLost:
            end_descendants(os.getpid(), 1.0, self._signals.wakeup)
            raise
        finally:
            left_over = end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)
            programs.close(left_over[0])
        if self._site.slurm and finished and programs.broken_off:
            self._await_signal()
        if self._site.slurm and not finished:
            processes.end(os.environ.get("SLURM_JOB_ID", ""), self._run.run_id)
        reply = programs.reply(labelled=self._site.slurm)
        timed_out = not finished and not programs.error and time.monotonic() >= until
        # Said here as well as at the run's end: the controller may see this answer long before that.
        limit = self._limit_text() if timed_out and until >= self._deadline else ""
        seconds = round(time.monotonic() - began, 6)
        self._answer(request.id, {**reply, "timed_out": timed_out, "time_limit": limit, "seconds": seconds})

    def _limit_text(self) -> str:
        return f"the nodes were held for the time_limit of {self._run.time_limit_s:g} s; ask for more"

    def _await_signal(self) -> None:
        """Give a signal to the whole job time to arrive, which is sent to its steps first: then there is no answer.

        Raises:
            ControllerLost: it came.
        """
        until = time.monotonic() + SIGNAL_LAG_S
        while time.monotonic() < until:
            self._pause([], max(0.0, until - time.monotonic()))

    def _argv_and_environ(self, request: Request) -> List[Tuple[List[str], Dict[str, str]]]:
        """Return argument vector and environment of each process that we start: one srun, or all ranks here."""
        environment = program_environment(self._run, request.env)
        arguments = [*self._run.wrapper, *request.argv]
        if self._site.slurm:
            place = {**environment, SCHEDULER: "slurm"}
            argv = srun_argv(
                self._run, request.nodes, place, per_node=request.ranks_per_node, cores=request.cores_per_rank
            )
            # A node that fails its part must not silence the others, and what is left of a step that was ended must not
            # hold up the next.
            return [([*argv, "--kill-on-bad-exit=0", "--overlap", "--label", *arguments], environment)]
        return [
            (arguments, {**rank_variables(rank, rank, request.ranks_per_node), **environment})
            for rank in range(request.ranks_per_node)
        ]

    def _pause(self, outputs: List[int], seconds: float) -> None:
        """Wait until something is to be done.

        Raises:
            ControllerLost: a signal, or the end of our lifeline, says to end.
        """
        watched = [self._signals.wakeup, *([0] if self._site.lifeline else []), *outputs]
        poll = select.poll()  # not select(): descriptors may be beyond 1,024
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if self._signals.wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._signals.wakeup, 4096)
        if self._signals.stop():
            raise ControllerLost
        if self._site.lifeline and 0 in ready and not os.read(0, 4096):
            raise ControllerLost


def request_of(found: Mapping[str, Any]) -> Request:
    """Read one request.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    argv = tuple(_text(word) for word in found["argv"])
    if not argv:
        raise ValueError("no program")
    return Request(
        id=_text(found["id"]),
        argv=argv,
        nodes=tuple(_text(node) for node in found["nodes"]),
        ranks_per_node=int(found["ranks_per_node"]),
        cores_per_rank=int(found["cores_per_rank"]),
        timeout_s=float(found["timeout_s"]),
        env={_text(name): _text(value) for name, value in dict(found["env"]).items()},
        cwd=None if found["cwd"] is None else _text(found["cwd"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{value!r:.80} is no text")
    return value


def program_environment(run: RunPlan, more: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment of a test's program: the job's and the run's, without what is this batch's alone."""
    ours = [*FOREIGN_VARIABLES, "MLHPC_PLAN", "MLHPC_CHANNEL", "MLHPC_SECRET"]
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    payload = _payload()
    paths = [path for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path and path != payload]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return {**environment, **run.variables, "MLHPC_RUN": run.run_id, "PYTHONUNBUFFERED": "1", **more}


def _payload() -> str:
    """Return the zip that this module was read from; nothing if it was not."""
    here = str(Path(__file__).parents[3])
    return here if here.endswith(".zip") else ""
