"""The channel between the controller of pytest-xdist and its workers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pytest_mlhpc import remote


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    """A directory for temporary files whose path, of characters of two bytes each, no Unix socket can have."""
    directory = tmp_path / ("ü" * 50)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_long_tmpdir_is_left_for_one_that_a_socket_can_lie_in(long_tmpdir):
    server = remote.Server(None)
    path = Path(server.address[0])
    try:
        assert path.is_socket()
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path)) < remote.SUN_PATH
    finally:
        server.close()
    assert not path.parent.exists()


def test_a_socket_that_cannot_be_made_leaves_no_folder_behind(long_tmpdir, monkeypatch):
    monkeypatch.setattr(remote, "SUN_PATH", 10_000)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        remote.Server(None)
    assert list(long_tmpdir.iterdir()) == []
