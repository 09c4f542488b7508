"""Start real ranks against a real socket, and collect what they send."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.results.schema import RankReport, from_json, to_json

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

#: How long ranks may take: machines are slow when many tests run.
LIMIT_S = 300


def run_plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "run_id": "run-1", "nonce": "nonce", "attempt": 0, "workload": "tiny",
        "parameters": {"global_batch": 8, "seed": 3}, "nodes": 1, "ranks": 1, "cores_per_rank": 1,
        "device_type": "cpu", "launcher": "plain", "time_limit_s": 60.0, "steps": 12, "warmup_steps": 4,
        "variables": {"MLHPC_WORKLOAD_MODULE": "tiny_workload"},
    }  # fmt: skip
    return RunPlan(**{**values, **changes})


@dataclass
class Batch:
    """The batch's end of the channel: everything that every rank sent."""

    path: str
    messages: list[tuple[int, str, Any]] = field(default_factory=list)
    listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))
    connections: list[socket.socket] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.listener.bind(self.path)
        self.listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.hang_up()
        for thread in self.threads:
            thread.join(LIMIT_S)

    def join(self) -> None:
        """Wait until all that was sent by ranks that have ended is read."""
        for thread in self.threads[1:]:
            thread.join(LIMIT_S)

    def hang_up(self) -> None:
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # the rank was first
            finally:
                connection.close()

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        self.threads.append(thread)  # a test may join it at once

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._start(self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        rank = None
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    body = json.loads(line)
                    if rank is None:
                        rank = body["rank"]
                    else:
                        self.messages.append((rank, body["kind"], body["body"]))
        except (OSError, ValueError):
            return

    def of(self, kind: str) -> list[Any]:
        return [body for _, what, body in self.messages if what == kind]

    def reports(self) -> list[RankReport]:
        return [from_json(RankReport, body) for body in self.of("report")]


def prepare_rank(batch: Batch, run: RunPlan, folder: Path, **variables: str) -> dict[str, str]:
    """Write the plan of *run*, and return the environment of a rank of it."""
    plan = Plan("alloc", "source", str(folder), 1, 60.0, (run,))
    (folder / "plan.json").write_text(json.dumps(to_json(plan)))
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "MLHPC_PLAN": str(folder / "plan.json"),
        "MLHPC_RUN": run.run_id,
        "MLHPC_NONCE": run.nonce,
        "MLHPC_CHANNEL": batch.path,
        **variables,
    }


def start_rank(batch: Batch, run: RunPlan, folder: Path, python: str = sys.executable, **variables: str):
    return subprocess.Popen(
        [python, "-m", "pytest_mlhpc.worker.main"],
        env=prepare_rank(batch, run, folder, **variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(*processes: subprocess.Popen[bytes]) -> list[tuple[int, str]]:
    ended = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_S)
            ended.append((process.returncode, output.decode()))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return ended
