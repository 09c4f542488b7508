"""Groups of pods, and programs that stand for others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pods import Pods, orphans
from running_suites import wait_for


@contextmanager
def closing_pods(folder: Path) -> Iterator[Callable[..., Pods]]:
    """Yield what makes groups of pods; all that they started ends with it."""
    made: list[Pods] = []

    def make(*runs: Any, **changes: Any) -> Pods:
        made.append(Pods(folder, *runs, **changes))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    """Make a group of pods for one test."""
    with closing_pods(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def module_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pods]]:
    """Make a group of pods whose runs all tests of a module read."""
    folder = tmp_path_factory.mktemp("pods")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLHPC_TEST", str(folder))  # each worker has a folder of this name
        with closing_pods(folder) as make:
            yield make
            wait_for(lambda: not orphans())


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[[str], str]:
    """Make a shell script that stands for a program; return its path."""

    def make(script: str, name: str = "stand-in") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make
