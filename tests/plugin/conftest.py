"""Suites of `command` jobs on the real local provisioner, run by pytest inside pytest."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SYSTEMS = """\
schema: 1
systems:
  local:
    description: this machine
    partitions:
      cpu: {scheduler: local, accelerator: cpu, preset: smoke, nodes: {cores: 1}, max_jobs: 4}
  site:
    description: as a site's system, where a missing baseline is a failure
    partitions:
      part:
        scheduler: elsewhere
        accelerator: cpu
        preset: smoke
        nodes: {cores: 4, memory: 4GiB, max: 2}
        environments: {default: {python: python3}}
"""

#: Serves the scheduler of `site` by this machine's own provisioner.
CONFTEST = """\
from pytest_mlhpc.hookspecs import hookimpl

@hookimpl
def mlhpc_schedulers():
    return {"elsewhere": None}

@hookimpl
def mlhpc_provisioner(partition, state_dir, session_id):
    if partition.scheduler == "elsewhere":
        from pytest_mlhpc.provision.local import LocalProvisioner
        return LocalProvisioner(state_dir=state_dir, session_id=session_id)
"""

HEADER = """\
import os, pathlib, sys, time
import pytest
RATE = {"rate": {"pattern": r"rate: (\\S+)", "unit": "items/s", "better": "higher"}}
def job(value=4.0, **spec):
    return pytest.mark.job("command", argv=["/bin/echo", f"rate: {value}"], metrics=RATE, **spec)
def script(text, **spec):
    return pytest.mark.job("command", argv=["/bin/sh", "-c", text], metrics=RATE, **spec)
"""


@dataclass
class Suite:
    """A folder with a systems file and tests; ``state`` is where everything goes that a session writes."""

    pytester: pytest.Pytester
    state: Path

    def write(self, body: str, name: str = "test_suite.py") -> None:
        self.pytester.path.joinpath(name).write_text(HEADER + textwrap.dedent(body))

    def run(self, *arguments: str, system: str = "local", n: int = 0) -> pytest.RunResult:
        """Run pytest in a process of its own; ``n`` workers of pytest-xdist, 0 for none."""
        workers = ["-p", "xdist", "-n", str(n)] if n else []
        selected = ["--system", system] if system else []
        return self.pytester.runpytest_subprocess("-rA", *selected, *workers, *arguments)

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted(self.state.glob("records/*/*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    def started(self) -> list[str]:
        """Return the programs that were started, as their plans say, in order of their ids, which sort by time."""
        plans = sorted(self.state.glob("runs/*/*/plan.json"), key=lambda path: path.parent.name)
        return [json.loads(path.read_text())["runs"][0]["argv"][-1] for path in plans]

    def nothing_was_written(self) -> bool:
        return not self.state.exists() or not any(
            path for path in self.state.rglob("*") if path.is_file() and "cache" not in path.parts
        )


@pytest.fixture
def suite(pytester: pytest.Pytester, state_dir: Path) -> Suite:
    pytester.path.joinpath("systems.yaml").write_text(SYSTEMS)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\n")
    return Suite(pytester, state_dir)


@pytest.fixture(params=[pytest.param(0, id="n0"), pytest.param(2, id="n2", marks=pytest.mark.servers)])
def workers(request: pytest.FixtureRequest) -> int:
    """Every feature of the plug-in is tested without and with two workers of pytest-xdist."""
    return int(request.param)
