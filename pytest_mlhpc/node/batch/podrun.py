"""Starts a run's processes on several pods, and the processes of one run in one pod."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from pytest_mlhpc.node import spawn
from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.batch.main import BatchSignals
from pytest_mlhpc.node.batch.ranks import PODRUN
from pytest_mlhpc.node.launch import KEEP_GOING
from pytest_mlhpc.node.processes import (
    EXIT_TERMINATED,
    GrowthWatch,
    become_subreaper,
    describe_exit,
    end_descendants,
    reap,
)


@dataclass(frozen=True)
class Share:
    """What one pod does of a run: ``per_pod`` processes with ``argv``. ``ranks``: they receive their ranks."""

    run_id: str
    pod: int
    pods: int
    per_pod: int
    ranks: bool
    argv: Tuple[str, ...]
    keep_going: bool = False  #: one that ends badly ends no other

    def command(self, environment: Mapping[str, str], cwd: str) -> List[str]:
        """Return the arguments of one process; around a rank is what prints its number before each line.

        Raises:
            FileNotFoundError: there is no such program.
        """
        if not self.ranks:
            return list(self.argv)
        name = self.argv[0]
        path = os.path.join(cwd, name) if os.sep in name else name  # noqa: PTH118 - may be absolute
        if shutil.which(path, path=environment.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return [sys.executable, "-m", spawn.__name__, spawn.LABEL, "--", *self.argv]

    def variables(self, local: int) -> Dict[str, str]:
        """Return what tells a process its place; torchrun's agents tell their ranks themselves."""
        found = {"MLHPC_TASK_POD": str(self.pod)}
        if self.ranks:
            rank, world = self.pod * self.per_pod + local, self.pods * self.per_pod
            found.update(spawn.rank_variables(rank, local, world))
        return found


@dataclass(frozen=True)
class TaskExit:
    """How the process number *task* of all pods ended: code or minus signal; whether for its container's memory."""

    task: int
    code: int
    memory: bool = False

    def __str__(self) -> str:
        return describe_exit(self.code)


class Tasks:
    """Starts the processes of *share* at once. ``error`` is why one could not be started."""

    def __init__(
        self, share: Share, environment: Mapping[str, str], cwd: str, output: Optional[int] = None
    ) -> None:
        self.error = ""
        self.share = share
        self._memory = GrowthWatch()
        self._running: Dict[int, int] = {}  #: pid -> task
        self._processes: List[subprocess.Popen[bytes]] = []
        for local in range(share.per_pod):
            try:
                process = subprocess.Popen(
                    share.command(environment, cwd),
                    env={**environment, **share.variables(local)},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                bad = getattr(error, "filename", None) == cwd
                self.error = f"cannot start {share.argv[0]!r}{f' in {cwd!r}' if bad else ''}: {why}"
                return
            self._processes.append(process)
            self._running[process.pid] = share.pod * share.per_pod + local

    @property
    def running(self) -> bool:
        """Whether one of them has not ended."""
        return bool(self._running)

    def note(self, ended: Mapping[int, int]) -> Iterable[TaskExit]:
        """Take exit codes by pid, and yield those of this pod's ranks."""
        for process in self._processes:
            if process.pid in ended and process.pid in self._running:
                code = process.returncode = ended[process.pid]  # reaped here, not by Popen
                memory = code == -9 and self._memory.grown()
                yield TaskExit(self._running.pop(process.pid), code, memory)


RANKS = "--ranks"

EXIT_USAGE, EXIT_GONE, EXIT_NOT_STARTED = 64, 69, 127

#: How long all pods may take to start their processes, in seconds: an agent first ends what a former run has left, which takes
#: 15 s at most (``node/processes.py``), and may be short of processor time.
START_S = 120.0

#: How long other pods may take to end their processes, in seconds. Then the run is over for this pod; they go on ending.
END_S = 30.0

#: Time between SIGTERM and SIGKILL on this pod, in seconds.
GRACE_S = 5.0


class PodRun:
    """One run on the pods 0 to ``share.pods`` - 1, of which this is the first."""

    def __init__(self, share: Share, wire: Wire, signals: BatchSignals) -> None:
        self.code: Optional[int] = None  #: of the first thing that went wrong
        self._first = 0  #: what the first process ended with, where others go on
        self._share, self._wire, self._signals = share, wire, signals
        self._labels: List[str] = []
        self._starting: Set[int] = set(range(1, share.pods))
        self._open: Set[int] = set(range(1, share.pods))
        self._rest: Dict[int, bytes] = {}
        self._tasks: Optional[Tasks] = None
        self._deadline = time.monotonic() + START_S
        self._selector = selectors.DefaultSelector()

    def do(self) -> int:
        """Start, wait, and return the exit code."""
        self._selector.register(self._signals.wakeup, selectors.EVENT_READ)
        self._selector.register(self._wire.socket, selectors.EVENT_READ)
        request = {name: getattr(self._share, name) for name in ("pods", "per_pod", "ranks", "argv")}
        self._wire.send({"kind": "run", "run": self._share.run_id, "env": dict(os.environ), **request})
        while not self._over():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.waiting else 0)
            self._selector.modify(self._wire.socket, events)
            self._selector.select(1.0)
            self._turn()
        for pod in list(self._rest):
            self._show(pod, b"", last=True)
        return self._first if self.code is None else self.code

    def _over(self) -> bool:
        if self.code is None:
            return not self._open and self._tasks is not None and not self._tasks.running
        return not self._open or time.monotonic() >= self._deadline

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals.wakeup, 4096)
        self._wire.flush()
        for message in self._wire.read():
            self._handle(message)
        if self._wire.ended and self._open:
            self._fail(EXIT_GONE, {"not_started": f"this pod's agent cannot be asked: {self._wire.ended}"})
            self._open.clear()
        if self._signals.stop():
            self._fail(EXIT_TERMINATED, {})
        ended = reap()
        for one in self._tasks.note(ended) if self._tasks is not None else ():
            self._ended(0, one)
        if self._starting and self.code is None and time.monotonic() >= self._deadline:
            late = ", ".join(map(self._label, sorted(self._starting)))
            self._fail(
                EXIT_GONE,
                {"not_started": f"these pods did not start their part within {START_S:g} s: {late}"},
            )
        if not self._starting and self._tasks is None and self.code is None:
            self._tasks = Tasks(self._share, os.environ, str(Path.cwd()))
            if self._tasks.error:
                self._fail(EXIT_NOT_STARTED, {"no_program": f"{self._label(0)}: {self._tasks.error}"})

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind, pod = message["kind"], message.get("pod")
        if kind == "pods":
            self._labels = [str(name) for name in message["labels"]]
        if message.get("run", self._share.run_id) != self._share.run_id or not isinstance(pod, int):
            return
        if kind == "started":
            self._starting.discard(pod)
        elif kind == "output":
            self._show(pod, base64.b64decode(message["data"]))
        elif kind == "exit":
            self._ended(pod, TaskExit(int(message["task"]), int(message["code"]), bool(message["memory"])))
        elif kind == "refused":
            self._fail(EXIT_NOT_STARTED, {"no_program": f"{self._label(pod)}: {message['text']}"})
        elif kind == "lost":
            self._open.discard(pod)
            why, node = str(message["text"]), str(message["node"])
            self._fail(EXIT_GONE, {"lost": self._label(pod), "why": why, "node": node})
        elif kind == "done":
            self._open.discard(pod)
            if message.get("dropped"):
                self._say({"dropped": message["dropped"]})

    def _label(self, pod: int) -> str:
        return self._labels[pod] if pod < len(self._labels) else f"pod {pod}"

    def _ended(self, pod: int, one: TaskExit) -> None:
        code = one.code if one.code >= 0 else 128 - one.code
        if self._share.keep_going and not one.memory:
            self._first = code if one.task == 0 else self._first
        elif code:
            death = {"task": one.task, "pod": self._label(pod), "exit": one.code, "memory": one.memory}
            self._fail(code, {"death": death})

    def _fail(self, code: int, details: Mapping[str, Any]) -> None:
        """Say what went wrong first, and end everything."""
        if self.code is not None:
            return
        self.code = code
        if details:
            self._say(details)
        self._wire.send({"kind": "kill", "run": self._share.run_id})
        end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)
        self._deadline = time.monotonic() + END_S

    @staticmethod
    def _say(details: Mapping[str, Any]) -> None:
        sys.stderr.write(f"\n{PODRUN}{json.dumps(details)}\n")  # a rank may have left its line unfinished
        sys.stderr.flush()

    def _show(self, pod: int, data: bytes, *, last: bool = False) -> None:
        """Print whole lines, so that those of several pods do not mix."""
        data = self._rest.pop(pod, b"") + data
        cut = len(data) if last or len(data) > 1 << 16 else data.rfind(b"\n") + 1
        if data[cut:]:
            self._rest[pod] = data[cut:]
        rest = data[:cut]
        while rest:
            rest = rest[os.write(1, rest) :]


def share_of(arguments: List[str]) -> Share:
    """Return what the command line asks for.

    Raises:
        ValueError: it cannot be understood.
    """
    place = arguments.index("--")
    run_id, pods, per_pod, *flags = arguments[:place]
    argv = tuple(arguments[place + 1 :])
    if not argv or not {RANKS, KEEP_GOING}.issuperset(flags):
        raise ValueError(f"what follows is not understood: {arguments[3:]}")
    keep_going = KEEP_GOING in flags
    return Share(run_id, 0, int(pods), int(per_pod), RANKS in flags, argv, keep_going=keep_going)


def main(arguments: List[str]) -> int:
    """Run it and return the exit code."""
    try:
        share = share_of(arguments)
    except ValueError as error:
        sys.stderr.write(f"podrun: usage: RUN PODS PER_POD [--ranks] [--keep-going] -- ARGV: {error}\n")
        return EXIT_USAGE
    signals = BatchSignals()
    become_subreaper()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(os.environ.get("MLHPC_HUB", ""))
    except OSError as error:
        details = {"not_started": f"this pod's agent cannot be asked: {error.strerror or error}"}
        sys.stderr.write(f"{PODRUN}{json.dumps(details)}\n")
        return EXIT_GONE
    wire = Wire(connection)
    wire.trusted = True
    try:
        return PodRun(share, wire, signals).do()
    finally:
        wire.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
