"""A local provisioner, and plans for programs and for stand-in ranks."""

from __future__ import annotations

import itertools
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc import payload
from pytest_mlhpc.batch.plan import MetricPattern, Plan, RunPlan
from pytest_mlhpc.batch.processes import stat_fields
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.base import AllocationEnded, Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.local import LocalProvisioner
from pytest_mlhpc.results.lines import Message

RATE = {"rate": MetricPattern("items/s", "higher", r"rate: (\S+)")}

#: An interpreter that starts the stand-in where the worker is meant.
PYTHON = """#!/bin/sh
if [ "$2" = pytest_mlhpc.worker.main ]; then exec {python} {script}; fi
exec {python} "$@"
"""

#: A launcher of several ranks, as a third party would add one.
LAUNCHER = """
def launch(run, nodes, environment):
    return [run.python, "-m", "stand_in.spawn", str(run.ranks), run.python], environment
"""

#: Starts the ranks as torchrun does, waits for all of them, and hides how they ended.
SPAWN = """
import os, subprocess, sys
ranks = int(sys.argv[1])
argv = [sys.argv[2], "-m", "pytest_mlhpc.worker.main"]
started = [subprocess.Popen(argv, env=dict(os.environ, RANK=str(n), WORLD_SIZE=str(ranks))) for n in range(ranks)]
sys.exit(1 if any([process.wait() for process in started]) else 0)
"""

#: What every stand-in begins with.
RANK_HEAD = """
import os, signal, subprocess, sys, time
from pytest_mlhpc.batch.channel import RankChannel
from pytest_mlhpc.results.schema import RankReport
channel = RankChannel.from_environment()
channel.started({"torch": "none"})

def a_report(**changes):
    fields = dict(
        rank=channel.rank, local_rank=channel.rank, host="here", device_type="cpu", device_index=channel.rank,
        device_model="made up", steps=3, samples=6, started_ns=1, ended_ns=2, epoch_s=3.0, wait_s=0.1, copy_s=0.0,
        warmup_s=0.5, step_times_s=(1.0, 1.0, 1.0), losses=(2.0, 1.5, 1.0))
    return RankReport(**{**fields, **changes})

"""


@dataclass
class Heard:
    """All that one allocation said."""

    messages: list[Message] = field(default_factory=list)
    states: list[StateChanged] = field(default_factory=list)
    ended: bool = False
    error: MlhpcError | None = None

    def kinds(self) -> list[str]:
        return [message.kind for message in self.messages]

    def body(self, kind: str) -> dict[str, Any]:
        (found,) = [message.body for message in self.messages if message.kind == kind]
        return dict(found)

    def failure(self) -> tuple[str, str]:
        body = self.body("failed")
        return body["outcome"], body["text"]


def alive(pid: int | str) -> bool:
    """Whether a process runs; one that only waits for init to take its exit code does not."""
    return stat_fields(int(pid))[:1] not in ([], ["Z"], ["X"])


class Local:
    """A provisioner with the few calls that tests need."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.session = uuid.uuid4().hex
        self.provisioner = LocalProvisioner(state_dir=state, session_id=self.session)
        self.heard: dict[str, Heard] = {}
        self._numbers = itertools.count()

    def command(self, *argv: str, metrics: Any = RATE, **changes: Any) -> Handle:
        return self.submit(self.run(argv=argv, metrics=metrics, **changes))

    def shell(self, script: str, **changes: Any) -> Handle:
        return self.command("bash", "-c", script, **changes)

    def ranks(self, script: str, ranks: int = 1, sha256: str = "", **changes: Any) -> Handle:
        """Submit a training run whose ranks are *script*: one started by `plain`, several by a small launcher."""
        number = next(self._numbers)
        path = self.folder / f"rank{number}.py"
        path.write_text(RANK_HEAD + textwrap.dedent(script))
        python = self.folder / f"python{number}"
        python.write_text(PYTHON.format(python=sys.executable, script=path))
        python.chmod(0o755)
        folder = self.folder / "stand_in"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        (folder / "launcher.py").write_text(LAUNCHER)
        (folder / "spawn.py").write_text(SPAWN)
        launcher = "plain" if ranks == 1 else "stand_in.launcher"
        fields = {
            "workload": "resnet50",
            "launcher": launcher,
            "ranks": ranks,
            "python": str(python),
            **changes,
        }
        sent = payload.build(self.state).sha256
        if sha256:
            (self.state / "payload" / f"{sha256}.zip").write_bytes(
                (self.state / "payload" / f"{sent}.zip").read_bytes()
            )
        return self.submit(self.run(**fields), sha256=sha256 or sent)

    def run(self, **changes: Any) -> RunPlan:
        fields: dict[str, Any] = {
            "run_id": uuid.uuid4().hex,
            "nonce": uuid.uuid4().hex,
            "attempt": 0,
            "workload": "command",
            "parameters": {},
            "nodes": 1,
            "ranks": 1,
            "cores_per_rank": 1,
            "device_type": "cpu",
            "launcher": "plain",
            "time_limit_s": 30.0,
            "steps": 3,
            "warmup_steps": 0,
            "python": sys.executable,
            "exclusive": False,
        }
        return RunPlan(**{**fields, **changes})

    def submit(self, *runs: RunPlan, sha256: str = "", time_limit_s: float = 60.0) -> Handle:
        name = runs[0].run_id
        handle = self.provisioner.submit(Plan(name, sha256, str(self.folder / name), 1, time_limit_s, runs))
        self.heard[handle.id] = Heard()
        return handle

    def wait(self, handle: Handle, until: Callable[[Heard], bool] = lambda heard: heard.ended) -> Heard:
        deadline = time.monotonic() + 60
        heard = self.heard[handle.id]
        while not until(heard) and not heard.ended:
            assert time.monotonic() < deadline, f"nothing happened; heard so far: {heard}"
            for event in self.provisioner.events([handle], 1.0):
                self._take(event)
        return heard

    def _take(self, event: Event) -> None:
        heard = self.heard[event.handle.id]
        if isinstance(event, LineArrived):
            heard.messages.append(event.message)
        elif isinstance(event, StateChanged):
            heard.states.append(event)
        elif isinstance(event, AllocationEnded):
            heard.ended, heard.error = True, event.error


@pytest.fixture
def is_alive() -> Callable[[int | str], bool]:
    return alive


@pytest.fixture
def local(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("MLHPC_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Local(state_dir, tmp_path)
    yield made
    made.provisioner.close()
