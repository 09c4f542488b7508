"""A local provisioner for a test or for a module, and limits that no busy machine reaches."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_allocations import HANG_S, Local, python_path

from pytest_mlhpc.provision import command
from pytest_mlhpc.provision.local_process import LocalProcess
from pytest_mlhpc.provision.scheduler import script


@pytest.fixture(autouse=True)
def a_busy_machine_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SEARCH_LIMIT_S", HANG_S)
    monkeypatch.setattr(script, "_BASH_LIMIT_S", HANG_S)
    monkeypatch.setattr(LocalProcess, "grace_s", HANG_S)


def _local(state: Path, folder: Path) -> Iterator[Local]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLHPC_LOCK_DIR", str(folder / "locks"))
        patch.setenv("PYTHONPATH", python_path(folder))
        made = Local(state, folder, uuid.uuid4().hex)
        try:
            yield made
        finally:
            made.provisioner.close()


@pytest.fixture
def local(tmp_path: Path, state_dir: Path) -> Iterator[Local]:
    yield from _local(state_dir, tmp_path)


@pytest.fixture(scope="module")
def module_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    folder = tmp_path_factory.mktemp("allocations")
    yield from _local(folder / "state", folder)
