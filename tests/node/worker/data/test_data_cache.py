import os

import pytest

from pytest_mlhpc.node.worker.data import dataset_files
from pytest_mlhpc.node.worker.data.dataset_files import DataError


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(3)]
    for path in paths:
        path.write_bytes(os.urandom(300_000))
    return paths


@pytest.fixture
def cold(files):
    """Return what evicted files are: some file systems (tmpfs) hold theirs in the page cache and nowhere else."""
    dataset_files.evict(files)
    return "unknown" if dataset_files.residency(files) > 0 else "cold"


@pytest.mark.parametrize(("evicted", "asked"), [(False, "unknown"), (False, "cold"), (True, "warm")])
def test_the_state_that_was_asked_for_is_made_and_proved(files, cold, evicted, asked):
    (dataset_files.evict if evicted else dataset_files.read_through)(files)
    assert dataset_files.prepare(files, asked) == (cold if asked == "cold" else asked)
    assert (dataset_files.residency(files) == 1.0) == (asked != "cold" or cold == "unknown")


def test_half_a_set_in_memory_is_neither(files, monkeypatch):
    monkeypatch.setattr(dataset_files, "evict", lambda paths: None)  # a file system that ignores the advice
    assert dataset_files.prepare(files, "cold") == "unknown"


def test_the_file_that_other_ranks_watch_does_not_count(files, cold, monkeypatch):
    evict = dataset_files.evict

    def evict_and_read_one(paths):
        evict(paths)
        files[0].read_bytes()

    monkeypatch.setattr(dataset_files, "evict", evict_and_read_one)
    assert dataset_files.prepare(files, "cold") == cold


def test_a_kernel_that_does_not_tell_makes_unknown(files, monkeypatch):
    def refuse(path):
        raise OSError(1, "not permitted")

    monkeypatch.setattr(dataset_files, "resident_pages", refuse)
    assert dataset_files.prepare(files, "warm") == "unknown"


def test_an_empty_file_has_no_pages(tmp_path):
    (tmp_path / "empty").touch()
    assert dataset_files.resident_pages(tmp_path / "empty") == (0, 0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        dataset_files.prepare([tmp_path / "gone"], "cold")
