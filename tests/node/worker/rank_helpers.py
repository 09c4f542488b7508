"""Plans of real ranks, and the socket that takes what these send."""

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Self

from pytest_mlhpc.node.agents.wire import key_of_run
from pytest_mlhpc.node.batch.server import RankConnection
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, from_json, to_json

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

#: A hang guard for one rank.
LIMIT_S = 800


def run_plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "run_id": "run-1", "nonce": "nonce", "secret": "hidden", "attempt": 0, "workload": "tiny",
        "parameters": {"global_batch": 8, "seed": 3}, "nodes": 1, "ranks": 1, "cores_per_rank": 1,
        "device_type": "cpu", "launcher": "plain", "time_limit_s": 600.0, "steps": 12, "warmup_steps": 4,
        "variables": {"MLHPC_WORKLOAD_MODULE": "tiny_workload"},
    }  # fmt: skip
    return RunPlan(**{**values, **changes})


class Batch:
    """The batch's end of the channel: a thread lets ranks in, and notes what they send."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.key = b""  #: of the run whose ranks may come
        self._messages: list[tuple[int, str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: list[RankConnection] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> Self:
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []

    @property
    def messages(self) -> list[tuple[int, str, Any]]:
        """Rank, kind and body of each message, those of one rank in their order."""
        self._receive()
        return list(self._messages)

    def _work(self) -> None:
        while not self._over.wait(0.005):
            self._receive()
        self._receive()

    def _receive(self) -> None:
        with self._lock:
            with contextlib.suppress(OSError):  # until there is nothing more
                while True:
                    self._connections.append(RankConnection(self._listener.accept()[0], self.key))
            for one in self._connections:
                while heard := [] if one.ended else one.read():
                    said = [message for message in heard if message.kind != "hello"]
                    self._messages += [(one.rank, message.kind, message.body) for message in said]

    def of(self, kind: str) -> list[Any]:
        return [body for _, what, body in self.messages if what == kind]

    def reports(self) -> list[RankReport]:
        return [from_json(RankReport, body) for body in self.of("report")]


def prepare_rank(batch: Batch, run: RunPlan, folder: Path, **variables: str) -> dict[str, str]:
    """Write the plan of *run*, and return the environment of a rank of it."""
    plan = Plan("alloc", "source", str(folder), 1, 600.0, (run,))
    batch.key = key_of_run(variables.get("MLHPC_RUN", run.run_id), run.secret)
    # Whole at every moment: a rank that has been started already may be reading the same plan.
    (folder / "plan.json.new").write_text(json.dumps(to_json(plan)))
    (folder / "plan.json.new").replace(folder / "plan.json")
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "OMP_NUM_THREADS": "1",
        "MLHPC_PLAN": str(folder / "plan.json"),
        "MLHPC_RUN": run.run_id,
        "MLHPC_SECRET": run.secret,
        "MLHPC_CHANNEL": batch.path,
        **variables,
    }
