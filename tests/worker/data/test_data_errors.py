import errno
import pickle

import pytest

from pytest_mlhpc.results.failures import FAILURES, INFRASTRUCTURE
from pytest_mlhpc.worker.data.errors import DataError, read_error, write_error
from pytest_mlhpc.worker.failure import WorkerFailure


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_the_outcome_disk_full_and_names_the_path(number):
    error = write_error("/data/a", OSError(number, "no space"))
    assert str(error).startswith("/data/a: no room to write it (no space)")
    assert error.outcome == "disk_full"
    assert error.outcome in INFRASTRUCTURE


def test_other_trouble_is_the_runs_own(tmp_path):
    error = read_error(tmp_path / "a", OSError(errno.EIO, "bad sector"), "a sample")
    assert str(error) == f"{tmp_path / 'a'}: cannot be read (bad sector), expected a sample"
    assert error.outcome in FAILURES
    assert isinstance(error, WorkerFailure)  # a rank reports it by name, without a traceback


def test_it_travels_between_processes():
    again = pickle.loads(pickle.dumps(DataError("/a", "bad", "disk_full")))  # noqa: S301 - our own bytes
    assert (again.path, again.message, again.outcome, str(again)) == ("/a", "bad", "disk_full", "/a: bad")


def test_torch_can_raise_it_again_with_a_text_alone():
    assert str(DataError("Caught DataError in DataLoader worker process 0.")).startswith("Caught DataError")
