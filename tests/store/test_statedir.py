"""Where state lies, and why it cannot lie there; the suite may run as root, who may write anywhere."""

import contextlib
import errno
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.store.locations import default_state_dir, unusable

NOBODY = 65534


@pytest.fixture
def private() -> Iterator[Path]:
    """A folder of somebody else's, which only its owner may enter, in one that everybody may."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are private
        Path(folder).chmod(0o755)
        place = Path(folder) / "private"
        place.mkdir(mode=0o700 if os.geteuid() == 0 else 0)
        yield place


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user who may not do everything."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_folder_in_somebody_elses_is_named(private):
    with as_nobody():
        assert unusable(private / "state") == f"{private}/state: Permission denied"
        assert unusable(private) == f"{private} may not be written by user {os.geteuid()}"
    assert unusable(private.parent / "new" / "state") == ""


def test_a_folder_below_a_file_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert unusable(file / "new" / "state") == f"{file} is no folder"


@pytest.mark.parametrize("given", [{}, {"MLHPC_STATE": "~/x"}, {"XDG_STATE_HOME": "~/x"}], ids=str)
def test_a_user_without_a_home_has_to_name_a_folder(homeless, given):
    with pytest.raises(UsageError, match=r"HOME is not set, and user \d+ .*name a folder by MLHPC_STATE"):
        default_state_dir(given)
    assert default_state_dir({"MLHPC_STATE": "/x"}) == Path("/x")


@pytest.fixture
def homeless(monkeypatch):
    def unknown(_uid):
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS])
def test_only_a_full_disk_is_called_full(number):
    error = OSError(number, os.strerror(number))
    wrapped = StoreError("cannot be written")
    wrapped.__cause__ = error
    full = number in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    assert unwritten(error) == unwritten(wrapped) == ("disk_full" if full else "not_writable")
