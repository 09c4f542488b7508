"""Job specs and queues for tests of jobs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_specs import command, declare, target  # noqa: F401 - fixtures
from queue_world import QueueWorld

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.spec import JobSpec


@pytest.fixture
def problems(declare: Callable[..., JobSpec]) -> Callable[..., list[str]]:
    """Declare what must be refused; return what is said of it."""

    def refused(*workload: str, **marked: Any) -> list[str]:
        with pytest.raises(SpecError) as caught:
            declare(*workload, **marked)
        return [str(problem) for problem in caught.value.problems]

    return refused


@pytest.fixture
def start_queue(tmp_path: Path, command: Callable[..., JobSpec]) -> Iterator[Callable[..., QueueWorld]]:
    """Start a queue of so many jobs at a time; it ends with the test."""
    started: list[QueueWorld] = []

    def start(max_jobs: int = 1, *, unjudged: Any = lambda _job: None, **options: Any) -> QueueWorld:
        started.append(QueueWorld(tmp_path, command, max_jobs, unjudged, **options))
        return started[-1]

    yield start
    for world in started:
        world.close()
