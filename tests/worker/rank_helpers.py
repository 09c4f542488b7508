"""Plans of real ranks, and the socket that takes what these send."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Self

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.results.schema import RankReport, from_json, to_json

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

#: A hang guard for one rank.
LIMIT_S = 300


def run_plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "run_id": "run-1", "nonce": "nonce", "attempt": 0, "workload": "tiny",
        "parameters": {"global_batch": 8, "seed": 3}, "nodes": 1, "ranks": 1, "cores_per_rank": 1,
        "device_type": "cpu", "launcher": "plain", "time_limit_s": 600.0, "steps": 12, "warmup_steps": 4,
        "variables": {"MLHPC_WORKLOAD_MODULE": "tiny_workload"},
    }  # fmt: skip
    return RunPlan(**{**values, **changes})


class Batch:
    """The batch's end of the channel, which takes what ranks have sent when a test asks for it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._received: dict[socket.socket, bytes] = {}

    def __enter__(self) -> Self:
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._receive()
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        for connection in self._received:
            connection.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # until there is nothing more, or it is closed
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._received[connection] = b""
        for connection in self._received:
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    self._received[connection] += data

    @property
    def messages(self) -> list[tuple[int, str, Any]]:
        """Rank, kind and body of each message, those of one rank in their order."""
        self._receive()
        found = []
        for received in self._received.values():
            hello, *lines = [json.loads(line) for line in received.split(b"\n")[:-1]] or [None]
            found += [(hello["rank"], line["kind"], line["body"]) for line in lines]
        return found

    def of(self, kind: str) -> list[Any]:
        return [body for _, what, body in self.messages if what == kind]

    def reports(self) -> list[RankReport]:
        return [from_json(RankReport, body) for body in self.of("report")]


def prepare_rank(batch: Batch, run: RunPlan, folder: Path, **variables: str) -> dict[str, str]:
    """Write the plan of *run*, and return the environment of a rank of it."""
    plan = Plan("alloc", "source", str(folder), 1, 600.0, (run,))
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
