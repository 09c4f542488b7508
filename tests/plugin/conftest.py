"""Fixtures of suites that pytest runs inside a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from inner_sessions import Suite


@pytest.fixture
def suite(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.setenv("COLUMNS", "80")
    return Suite(tmp_path / "suite", state_dir)


@pytest.fixture(scope="module")
def shared_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """A suite that a module's tests run once and read."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
            patch.delenv(name, raising=False)
        patch.setenv("COLUMNS", "80")
        patch.setenv("MLHPC_STATE", str(folder / "state"))
        patch.setenv("MLHPC_LOCK_DIR", str(folder / "locks"))
        yield Suite(folder / "suite", folder / "state")
