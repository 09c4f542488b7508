"""A local provisioner with the few calls that tests need, and what its allocations reported."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from allocation_worlds import run_plan

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Handle, LineArrived, StateChanged
from pytest_mlhpc.node.processes import stat_fields
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import MetricPattern, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, from_json
from pytest_mlhpc.provision import payload
from pytest_mlhpc.provision.local import LocalProvisioner

#: In which whatever comes at all has come, on a machine however busy, in seconds.
HANG_S = 300.0

RATE = {"rate": MetricPattern("items/s", "higher", r"rate: (\S+)")}

#: An interpreter that starts a script where the worker is meant.
PYTHON = """#!/bin/sh
if [ "$2" = pytest_mlhpc.node.worker.main ]; then exec {python} {script}; fi
exec {python} "$@"
"""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "this never came about"
        time.sleep(0.01)


def is_alive(pid: int | str) -> bool:
    """Whether a process runs; one that only waits for init to take its exit code does not."""
    return stat_fields(int(pid))[:1] not in ([], ["Z"], ["X"])


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond *size* bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass
class Report:
    """All that one allocation reported."""

    messages: list[Message] = field(default_factory=list)
    states: list[StateChanged] = field(default_factory=list)
    ended: bool = False
    error: MlhpcError | None = None

    def of(self, run_id: str) -> Report:
        """Return what concerns one of several runs."""
        return replace(self, messages=[one for one in self.messages if one.run_id == run_id])

    def kinds(self) -> list[str]:
        return [message.kind for message in self.messages]

    def body(self, kind: str) -> dict[str, Any]:
        (found,) = [message.body for message in self.messages if message.kind == kind]
        return dict(found)

    @property
    def exit(self) -> list[int]:
        return list(self.body("end")["exit"])

    @property
    def failure(self) -> tuple[str, str]:
        """Outcome and text."""
        body = self.body("failed")
        return body["outcome"], body["text"]

    @property
    def measurement(self) -> Measurement:
        return from_json(Measurement, self.body("measurement"))


class Local:
    """A provisioner; *folder* takes the directories of allocations, and what stands for interpreters."""

    def __init__(self, state: Path, folder: Path, session: str) -> None:
        self.state = state
        self.folder = folder
        self.session = session
        self.provisioner = LocalProvisioner(state_dir=state, session_id=session)
        self.reports: dict[str, Report] = {}
        self._numbers = itertools.count()

    def run(self, **changes: Any) -> RunPlan:
        fields = {
            "nonce": uuid.uuid4().hex,
            "secret": uuid.uuid4().hex,
            "workload": "command",
            "exclusive": False,
            "time_limit_s": 600.0,
        }
        return run_plan(**{"run_id": uuid.uuid4().hex, **fields, "python": sys.executable, **changes})

    def rank_run(self, script: str, ranks: int = 1, **changes: Any) -> RunPlan:
        """Return a run whose ranks are *script*: one started by `plain`, several by a small launcher."""
        path = self.folder / f"rank{next(self._numbers)}.py"
        path.write_text(f"from stand_in.rank import *\n{textwrap.dedent(script)}")
        python = self.interpreter(PYTHON.format(python=sys.executable, script=path))
        launcher = "plain" if ranks == 1 else "stand_in.launcher"
        fields = {"workload": "resnet50", "launcher": launcher, "ranks": ranks, "python": python, "steps": 3}
        return self.run(**{**fields, **changes})

    def interpreter(self, text: str) -> str:
        """Write a program that stands for Python; return its path."""
        path = self.folder / f"python{next(self._numbers)}"
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def submit(
        self, *runs: RunPlan, name: str = "", sha256: str = "", time_limit_s: float = 1200.0
    ) -> Handle:
        name = name or runs[0].run_id
        plan = Plan(name, sha256, str(self.folder / name), 1, time_limit_s, runs)
        handle = self.provisioner.submit(plan)
        self.reports[handle.id] = Report()
        return handle

    def payload(self) -> Path:
        """Return the payload, made if need be."""
        return self.state / "payload" / f"{payload.build(self.state).sha256}.zip"

    def batch(self, *runs: RunPlan, **changes: Any) -> Handle:
        return self.submit(*runs, sha256=self.payload().stem, **changes)

    def ranks(self, script: str, **changes: Any) -> Handle:
        return self.batch(self.rank_run(script, **changes))

    def command(self, *argv: str, metrics: Any = RATE, **changes: Any) -> Handle:
        return self.submit(self.run(argv=argv, metrics=metrics, **changes))

    def shell(self, script: str, **changes: Any) -> Handle:
        return self.command("bash", "-c", script, **changes)

    def process(self, handle: Handle) -> Any:
        """Return the process at the top of a running allocation."""
        return self.provisioner._running[handle.id].process

    def wait(self, handle: Handle, until: Callable[[Report], object] = lambda report: report.ended) -> Report:
        deadline = time.monotonic() + HANG_S
        report = self.reports[handle.id]
        while not until(report) and not report.ended:
            assert time.monotonic() < deadline, f"nothing happened; so far: {report}"
            for event in self.provisioner.events([handle], 1.0):
                source = self.reports[event.handle.id]
                if isinstance(event, LineArrived):
                    source.messages.append(event.message)
                elif isinstance(event, StateChanged):
                    source.states.append(event)
                elif isinstance(event, AllocationEnded):
                    source.ended, source.error = True, event.error
        return report

    def wait_for(self, handle: Handle, kind: str) -> Report:
        """Wait for a message of this kind."""
        return self.wait(handle, lambda report: kind in report.kinds())


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH for batches that use what stands in for workers and launchers."""
    return os.pathsep.join(map(str, (*folders, Path(__file__).parent)))
