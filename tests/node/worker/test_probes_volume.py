"""A rank's folder on a volume: fresh, with room, removed; leftovers of killed runs go, those of others stay."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from file_trees import write_tree
from tables import table

from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import volume

HOUR = 3600.0
TABLES = table("volumes")


@pytest.mark.parametrize("failure", [None, KeyError], ids=["", "and after a failure"])
def test_the_folder_is_new_and_gone_afterwards(tmp_path, failure):
    with contextlib.suppress(KeyError), volume.own_folder(tmp_path, "run-1", 3, HOUR) as folder:
        write_tree(folder, {"some/file": "x"})
        assert folder == tmp_path / "mlhpc-storage-run-1-3"
        if failure:
            raise failure
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_else_removed_is_no_trouble(tmp_path):
    with volume.own_folder(tmp_path, "run-1", 0, HOUR) as folder:
        (folder / "owner.json").unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("below", "text"),
    [
        ("taken", "File exists"),
        ("nowhere", "nowhere on .*there is no such folder: make it"),
        ("file", "it is no folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path, below, text):
    existing = tmp_path / "taken/mlhpc-storage-run-1-0"
    existing.mkdir(parents=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerFailure, match=f"volume_unusable: .*{text}"):
        volume.own_folder(tmp_path / below, "run-1", 0, HOUR).__enter__()
    assert existing.exists()


@pytest.mark.parametrize("name", TABLES["errors"])
def test_each_error_has_its_name_and_a_hint(name):
    outcome, text = TABLES["errors"][name]
    number = getattr(errno, name)
    failure = volume.volume_error(Path("/scratch"), OSError(number, os.strerror(number)), "writing a file")
    assert failure.outcome == outcome
    assert failure.text.startswith(f"writing a file in /scratch on {socket.gethostname()}: ")
    assert text in failure.text


def test_names_of_the_environment_are_filled_in_on_the_node(tmp_path):
    found = volume.resolve("$SCRATCH/${PROJECT}/x", tmp_path, {"SCRATCH": "/scratch", "PROJECT": "p1"})
    assert found == Path("/scratch/p1/x")


@pytest.mark.parametrize("path", TABLES["refused"])
def test_a_path_that_names_nothing_is_refused(path, tmp_path):
    with pytest.raises(WorkerFailure, match=f"volume_unusable: .*{TABLES['refused'][path]}"):
        volume.resolve(path, tmp_path, {"SCRATCHE": "/s"})


def test_without_a_path_it_is_the_folder_of_the_run_that_the_controller_removes(tmp_path):
    assert volume.resolve("", tmp_path, {}) == tmp_path / "data"
    assert (tmp_path / "data").is_dir()


def leave(tmp_path: Path, run: str = "old", **changes) -> Path:
    """Leave what a killed run leaves; *changes* are those of its marker."""
    marker = json.dumps({**volume.marker(run, 0, HOUR), **changes})
    return write_tree(tmp_path / f"mlhpc-storage-{run}-0", {"small/f1": "x", "owner.json": marker})


def sweep(tmp_path: Path) -> int:
    with volume.own_folder(tmp_path, "new", 0, HOUR) as mine:
        removed = volume.remove_leftovers(tmp_path, mine)
        assert mine.is_dir()
    return removed


def age(path: Path, seconds: float) -> None:
    long_ago = time.time() - seconds - volume.MARGIN_S - 60
    os.utime(path, (long_ago, long_ago))


def test_what_a_dead_process_of_this_node_left_is_removed(tmp_path):
    pid = os.fork()
    if pid == 0:
        with volume.own_folder(tmp_path, "killed", 0, HOUR):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / "mlhpc-storage-killed-0").is_dir()
    assert sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_uses_stays(tmp_path):
    folder = leave(tmp_path)
    assert sweep(tmp_path) == 0
    assert (folder / "small" / "f1").exists()


def test_a_number_that_another_process_has_now_is_not_taken_for_its_owner(tmp_path):
    leave(tmp_path, started="1")
    assert sweep(tmp_path) == 1


@pytest.mark.parametrize("name", ["host", "boot", "namespace"])
def test_an_owner_that_cannot_be_looked_at_is_given_its_time(tmp_path, name):
    folder = leave(tmp_path, pid=2**22 + 1, started="1", **{name: "elsewhere"})
    assert sweep(tmp_path) == 0
    age(folder / "owner.json", HOUR)
    assert sweep(tmp_path) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "pid": "x"}'])
def test_a_marker_that_is_not_ours_protects_its_folder(tmp_path, text):
    folder = leave(tmp_path)
    (folder / "owner.json").write_text(text)
    assert sweep(tmp_path) == 0
    assert (folder / "small" / "f1").exists()


def test_a_folder_without_a_marker_goes_only_when_it_is_old_and_empty(tmp_path):
    empty, full = tmp_path / "mlhpc-storage-a-0", tmp_path / "mlhpc-storage-b-0"
    empty.mkdir()
    write_tree(full, {"precious": "x"})
    assert sweep(tmp_path) == 0
    for folder in (empty, full):
        age(folder, 0)
    assert sweep(tmp_path) == 1
    assert (full / "precious").exists()


def test_other_names_links_and_files_stay(tmp_path):
    victim = leave(tmp_path / "elsewhere", started="1")
    (tmp_path / "mlhpc-storage-link-0").symlink_to(victim)
    (tmp_path / "mlhpc-storage-file-0").write_text("x")
    other = leave(tmp_path, started="1").rename(tmp_path / "mlhpc-storage")
    assert sweep(tmp_path) == 0
    assert victim.is_dir() is other.is_dir() is True


def test_room_is_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    volume.require_room(tmp_path, 1, 1)
    text = "GB free for this user, the run needs 1e+12 GB and 5% besides"
    with pytest.raises(WorkerFailure, match=f"disk_full: .* {re.escape(text)}"):
        volume.require_room(tmp_path / ".", 10**21, 1)
    room_for_10_files = os.statvfs_result((4096, 4096, 1000, 1000, 1000, 1000, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: room_for_10_files)
    with pytest.raises(WorkerFailure, match=r"disk_full: .*room for 10 more files, the run needs 20"):
        volume.require_room(tmp_path, 1, 20)


@pytest.mark.parametrize(("device", "folder", "kind", "source"), TABLES["file_systems"])
def test_the_file_system_is_found_in_the_mount_table(device, folder, kind, source):
    found = volume.parse_mounts(TABLES["mounts"], device, folder)
    assert found == {"filesystem": kind, "mount_source": source}


def test_an_unreadable_mount_table_tells_nothing():
    assert volume.parse_mounts("", "1:2", "/x") == {}
    assert volume.describe(Path("/no/such/place")) == {}
