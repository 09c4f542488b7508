"""A real Grid Engine for tests, by `ci/services up gridengine`, and the look for what a test left on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from over_time_services import Service, own, share
from services import CLEAR_LIMIT_S, wait_until

#: Fixtures that start one.
FIXTURES = {"gridengine", "own_gridengine"}
HOSTS = ("node1", "node2")


@dataclass(frozen=True)
class GridEngine:
    """A master and two hosts of 16 slots each. Only a private one may be broken: `service.kill("node1")`, `service.start()`."""

    service: Service

    @property
    def directory(self) -> Path:
        """Return its own folder."""
        return self.service.directory

    @property
    def environment(self) -> dict[str, str]:
        """Return all that its commands need; they come first on PATH."""
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**self.service.environment, "PATH": path}

    def run(
        self, *argv: str | Path, limit_s: float = 1200.0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with this Grid Engine in its environment."""
        return subprocess.run(
            list(map(str, argv)), env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, cwd=cwd,
            capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False,
        )  # fmt: skip

    def query(self, *argv: str) -> str:
        """Return what a command prints once the master answers it: a busy machine's may not at first."""
        answers: list[subprocess.CompletedProcess[str]] = []

        def answered() -> bool:
            answers.append(self.run(*argv))
            return "error: " not in answers[-1].stderr

        assert wait_until(answered), answers[-1].stderr
        return answers[-1].stdout

    def jobs(self) -> dict[str, str]:
        """Return id -> what qstat says of it, of each job that has not ended."""
        blocks = self.query("qstat", "-j", "*").split(f"{'=' * 62}\n")
        found = {}
        for block in blocks:
            words = dict(line.partition(":")[::2] for line in block.splitlines())
            if "job_number" in words:
                found[words["job_number"].strip()] = block
        return found

    def state(self, job: str) -> str:
        """Return the state of a job in Grid Engine's letters; an empty text if it has ended."""
        lines = [line.split() for line in self.query("qstat", "-u", "*").splitlines()[2:]]
        return next((words[4] for words in lines if words[0] == job), "")

    def host(self, job: str) -> str:
        """Return the first host of a job that runs."""
        (line,) = [line for line in self.query("qstat").splitlines() if line.split()[:1] == [job]]
        return line.partition("@")[2].split()[0]

    def account(self, job: str) -> dict[str, str]:
        """Wait until the accounting has the entry of a job, which it gets a moment after the job left the queue; return it."""
        assert wait_until(lambda: self.run("qacct", "-j", job).returncode == 0), self.run("qstat", "-j", job)
        lines = [line.split(None, 1) for line in self.run("qacct", "-j", job).stdout.splitlines()]
        return {words[0]: words[1].strip() for words in lines if len(words) == 2}


@pytest.fixture(scope="session")
def gridengine(request: pytest.FixtureRequest) -> Iterator[GridEngine]:
    """One Grid Engine for the whole session, shared by all workers; not to be broken (see own_gridengine)."""
    for service in share(request.config, "gridengine"):
        yield GridEngine(service)


@pytest.fixture
def own_gridengine(request: pytest.FixtureRequest) -> Iterator[GridEngine]:
    """A Grid Engine of this test alone, which it may break."""
    for service in own(request.config, "gridengine"):
        yield GridEngine(service)


@pytest.fixture(autouse=True)
def clean_gridengine(
    request: pytest.FixtureRequest, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves a job or a queue in error; clear it away for the next."""
    used = [request.getfixturevalue(name) for name in sorted(FIXTURES.intersection(request.fixturenames))]
    folders = [tmp_path]
    if used and "pytester" in request.fixturenames:
        folders.append(request.getfixturevalue("pytester").path)
    for cluster in used:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
    yield
    left = [line for cluster in used for line in clear_away(cluster, folders)]
    assert not left, "the test left on Grid Engine: " + "; ".join(left)


def clear_away(cluster: GridEngine, folders: Sequence[Path], limit_s: float = CLEAR_LIMIT_S) -> list[str]:
    """Return what a test left, in sentences, after clearing it away.

    Args:
        cluster: Where it ran.
        folders: Jobs that were submitted from below these, or write there, are its own.
        limit_s: What ends by itself ends in that time.
    """

    def jobs() -> list[str]:
        found = cluster.jobs().items()
        return [job for job, text in found if any(str(folder) in text for folder in folders)]

    wait_until(lambda: not jobs(), limit_s)
    left = [f"job {job} was left {cluster.state(job)}" for job in jobs()]
    for job in jobs():
        cluster.run("qdel", "-f", job)
    wait_until(lambda: not jobs())
    for queue in cluster.run("qselect", "-qs", "E").stdout.split():
        left.append(f"queue {queue} was left in error")
        cluster.run("qmod", "-cq", queue)
    return left
