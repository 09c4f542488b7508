"""Real ranks in milliseconds: one process imports torch once and forks every rank, where importing would take each of them seconds.

A rank is ``pytest_mlhpc.node.worker.main`` in a process, a process group and a folder of its own, with the environment that
its launcher would give it. Ranks end with the server, and the server ends with its tests.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, Self

from rank_helpers import HERE, LIMIT_S, ROOT

#: What ranks import late: optimizers import ``torch._dynamo``.
PRELOADED = (
    "torch._dynamo", "torch.distributed", "torch.profiler", "pytest_mlhpc.node.worker.main", "pytest_mlhpc.node.worker.rank",
    "pytest_mlhpc.node.worker.probes.measure", "pytest_mlhpc.node.worker.quality.measure", "pytest_mlhpc.node.worker.data.make",
)  # fmt: skip


class ServedRank:
    """A rank that the server has forked; its output goes to a file."""

    def __init__(self, server: RankServer, pid: int, output: Path) -> None:
        self.pid, self._server, self._output = pid, server, output
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self, wait_s: float = 0) -> int | None:
        """Return the exit code as subprocess does, None for one that still runs after *wait_s*."""
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if select.select([descriptor], [], [], wait_s)[0]:
                    self.returncode = self._server.ask(reap=self.pid)
            finally:
                os.close(descriptor)
        return self.returncode

    def finish(self) -> tuple[int, str]:
        """Wait for the end of the rank and of all processes that it started; return its exit code and its output."""
        try:
            code = self.poll(LIMIT_S)
            assert code is not None, f"a rank does not end: {self._output.read_text()}"
            deadline = time.monotonic() + LIMIT_S
            while self._signal_all(0):  # loader processes get a signal when it ends
                assert time.monotonic() < deadline, "a process that a rank has started lives on"
                time.sleep(0.01)
        finally:
            self.kill()
        return code, self._output.read_text()

    def kill(self) -> None:
        """End the rank and all that it started."""
        self._signal_all(signal.SIGKILL)
        self.poll(LIMIT_S)

    def _signal_all(self, number: int) -> bool:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True


class RankServer:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        environment = {name: value for name, value in os.environ.items() if name != "MLHPC_TEST"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, **request: Any) -> int:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, environment: dict[str, str], folder: Path) -> ServedRank:
        """Fork a rank that runs in *folder*. Folders of PYTHONPATH may hold a ``sitecustomize``, which it runs first."""
        output = folder / f"output-{next(self._numbers)}"
        pid = self.ask(environment=environment, folder=str(folder), output=str(output))
        return ServedRank(self, pid, output)


def _become_rank(request: dict[str, Any]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.argv = ["pytest_mlhpc.node.worker.main"]
        for folder in map(Path, os.environ["PYTHONPATH"].split(os.pathsep)):
            if (folder / "sitecustomize.py").exists():
                runpy.run_path(str(folder / "sitecustomize.py"))
        importlib.import_module("pytest_mlhpc.node.worker.main").main()
    except BaseException:  # noqa: BLE001 - nothing may go on in the server's place
        traceback.print_exc()
    finally:
        os._exit(70)


def _serve() -> None:
    sys.path.pop(0)  # this folder is on the path of ranks anyway
    for name in PRELOADED:
        importlib.import_module(name)
    running = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            running.discard(request["reap"])
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork() or _become_rank(request)
            os.setpgid(answer, answer)  # here too: it may be killed before it has come so far
            running.add(answer)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
