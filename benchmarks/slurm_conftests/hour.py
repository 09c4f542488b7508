"""A conftest of the suite in benchmarks/slurm_waiting.py: jobs wait an hour of a clock that only the harness believes in.

Every call of Slurm, every look at a file and every redraw of the terminal is made as in an hour; nobody waits in between.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc import builtin
from pytest_mlhpc.hookspecs import hookimpl
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.provisioner import MonotonicClock
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.session import session

HOUR_S = 3600.0
#: Where the result goes, as JSON.
RESULT = "MLHPC_BENCH_RESULT"
#: The file in which the commands of Slurm count their calls.
COUNTS = "MLHPC_BENCH_COUNTS"


class Hour:
    """A clock that jumps over every wait; its hour begins when all jobs are submitted."""

    def __init__(self) -> None:
        self._now = time.monotonic()
        self._begin: float | None = None
        self.over = threading.Event()

    def begin(self) -> None:
        """Let the hour begin."""
        self._begin = self._now

    def monotonic(self) -> float:
        """Return the time of this clock."""
        return self._now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Jump; when the hour has passed, wait as everybody does."""
        if self._begin is None or self.over.is_set() or event.is_set():
            return event.wait(seconds)
        self._now += seconds
        if self._now - self._begin >= HOUR_S:
            self.over.set()
        return False


HOUR = Hour()


def _used() -> tuple[float, float]:
    """Return CPU seconds of this process, and of the commands that it started."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def _calls() -> int:
    return len(Path(os.environ[COUNTS]).read_text(encoding="utf-8").splitlines())


def _wait(self: session.BenchmarkSession, node_id: str, tick: Callable[[Job], None] | None = None) -> Any:
    """Stand in for the session's wait: all jobs submitted, then an hour of redraws while the queue's thread has its own."""
    while any(job.state is not JobState.QUEUED for job in self.jobs.values()):
        time.sleep(0.1)
    before, calls = _used(), _calls()
    HOUR.begin()
    job = self.jobs[node_id]
    for _ in range(int(HOUR_S / session.TICK_S)):
        job.done.wait(0)
        if tick:
            tick(job)
    HOUR.over.wait()
    after = _used()
    result = {
        "jobs": sum(one.state is JobState.QUEUED for one in self.jobs.values()),
        "reason": job.reason,
        "own": after[0] - before[0],
        "commands": after[1] - before[1],
        "calls": _calls() - calls,
        "before": sum(before),
    }
    Path(os.environ[RESULT]).write_text(json.dumps(result), encoding="utf-8")
    pytest.exit("the hour is over", returncode=0)


session.BenchmarkSession.wait = _wait  # type: ignore[method-assign]  # the one place that waits in real time


@hookimpl
def mlhpc_provisioner(partition: Any, state_dir: Path, session_id: str) -> SlurmProvisioner:
    """Give the provisioner that the plug-in would make, with our clock."""
    made = builtin.mlhpc_provisioner(partition=partition, state_dir=state_dir, session_id=session_id)
    assert isinstance(made, SlurmProvisioner)
    made._clock = MonotonicClock(HOUR.monotonic, HOUR.wait)  # noqa: SLF001 - the way to it has no word for a clock
    return made


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw as on a terminal, which costs more than the quiet lines of a log."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    reporter.isatty = type(reporter.isatty)(True)
