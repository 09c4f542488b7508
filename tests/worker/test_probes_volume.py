"""A rank's folder on a volume: fresh, with room, removed; leftovers of killed runs go, those of others stay."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.probes import volume

HOUR = 3600.0


def test_the_folder_is_new_and_gone_afterwards(tmp_path):
    with volume.own_folder(tmp_path, "run-1", 3, HOUR) as folder:
        (folder / "some").mkdir()
        (folder / "some" / "file").write_text("x")
        assert folder == tmp_path / "mlhpc-storage-run-1-3"
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_a_failure_too(tmp_path):
    def fail() -> None:
        with volume.own_folder(tmp_path, "run-1", 0, HOUR) as folder:
            (folder / "file").write_text("x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_else_removed_is_no_trouble(tmp_path):
    with volume.own_folder(tmp_path, "run-1", 0, HOUR) as folder:
        (folder / "owner.json").unlink()
        folder.rmdir()


def test_a_folder_of_that_name_is_never_taken_over(tmp_path):
    (tmp_path / "mlhpc-storage-run-1-0").mkdir()
    with pytest.raises(WorkerFailure, match=r"volume_unusable.*File exists"):
        volume.own_folder(tmp_path, "run-1", 0, HOUR).__enter__()
    assert (tmp_path / "mlhpc-storage-run-1-0").exists()


def test_a_missing_folder_is_named_with_what_to_do(tmp_path):
    with pytest.raises(
        WorkerFailure, match=r"volume_unusable: .*nowhere on .*there is no such folder: make it"
    ):
        volume.own_folder(tmp_path / "nowhere", "run-1", 0, HOUR).__enter__()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerFailure, match=r"volume_unusable: .*it is no folder"):
        volume.own_folder(tmp_path / "file", "run-1", 0, HOUR).__enter__()


@pytest.mark.parametrize(
    ("number", "outcome", "text"),
    [
        (errno.ENOSPC, "disk_full", "No space left on device; free space"),
        (errno.EDQUOT, "disk_full", "the quota is used up; free space, raise the quota"),
        (errno.EFBIG, "disk_full", "File too large; free space, raise the quota or limit"),
        (errno.EROFS, "volume_unusable", "it is mounted read-only: name a path that may be written to"),
        (errno.EACCES, "volume_unusable", "this user may not write there: name another path"),
        (errno.ENOENT, "volume_unusable", "there is no such folder: make it, or mount the volume"),
        (errno.EINVAL, "volume_unusable", "with io='direct', use io='buffered'"),
        (errno.ESTALE, "volume_unusable", "the file server has forgotten it"),
        (errno.EIO, "volume_unusable", "Input/output error; look at the volume"),
    ],
)
def test_each_trouble_has_its_name_and_says_what_to_do(number, outcome, text):
    failure = volume.volume_error(Path("/scratch"), OSError(number, os.strerror(number)), "writing a file")
    assert failure.outcome == outcome
    assert failure.text.startswith(f"writing a file in /scratch on {socket.gethostname()}: ")
    assert text in failure.text


def test_names_of_the_environment_are_filled_in_on_the_node(tmp_path):
    found = volume.resolve("$SCRATCH/${PROJECT}/x", tmp_path, {"SCRATCH": "/scratch", "PROJECT": "p1"})
    assert found == Path("/scratch/p1/x")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("$SCRATCH/x", r"SCRATCH is not set in the run's environment on .*name it in `variables:`"),
        ("some/where", "is not absolute"),
        ("/a/$", r"a \$ must be followed by a name"),
        ("$(rm -rf /)", r"a \$ must be followed by a name"),
        ("~nobody-of-that-name/x", "knows no home of that user"),
        ("$SCRATCHES/x", "SCRATCHES is not set"),
    ],
)
def test_a_path_that_names_nothing_is_refused(path, text, tmp_path):
    with pytest.raises(WorkerFailure, match=f"volume_unusable: .*{text}"):
        volume.resolve(path, tmp_path, {"SCRATCHE": "/s"})


def test_without_a_path_it_is_the_folder_of_the_run_that_the_controller_removes(tmp_path):
    assert volume.resolve("", tmp_path, {}) == tmp_path / "data"
    assert (tmp_path / "data").is_dir()


def leave(tmp_path: Path, run: str = "old", **changes) -> Path:
    """Leave what a killed run leaves; *changes* of its marker."""
    folder = tmp_path / f"mlhpc-storage-{run}-0"
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "f1").write_text("x")
    (folder / "owner.json").write_text(json.dumps({**volume.marker(run, 0, HOUR), **changes}))
    return folder


def swept(tmp_path: Path) -> int:
    with volume.own_folder(tmp_path, "new", 0, HOUR) as mine:
        removed = volume.remove_leftovers(tmp_path, mine)
        assert mine.is_dir()
    return removed


def test_what_a_dead_process_of_this_node_left_is_removed(tmp_path):
    code = (
        "import json, os, pathlib, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pytest_mlhpc.worker.probes import volume\n"
        "stack = volume.own_folder(pathlib.Path(sys.argv[1]), 'killed', 0, 3600.0); stack.__enter__()\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(root)], check=False, timeout=60)
    assert ended.returncode == -9
    assert (tmp_path / "mlhpc-storage-killed-0").is_dir()
    assert swept(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_uses_stays(tmp_path):
    folder = leave(tmp_path)
    assert swept(tmp_path) == 0
    assert (folder / "small" / "f1").exists()


def test_a_number_that_another_process_has_now_is_not_taken_for_its_owner(tmp_path):
    leave(tmp_path, started="1")
    assert swept(tmp_path) == 1


@pytest.mark.parametrize("name", ["host", "boot", "namespace"])
def test_an_owner_that_cannot_be_looked_at_is_given_its_time(tmp_path, name):
    folder = leave(tmp_path, pid=2**22 + 1, started="1", **{name: "elsewhere"})
    assert swept(tmp_path) == 0
    old = time.time() - HOUR - volume.MARGIN_S - 60
    os.utime(folder / "owner.json", (old, old))
    assert swept(tmp_path) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "pid": "x"}'])
def test_a_marker_that_is_not_ours_protects_its_folder(tmp_path, text):
    folder = leave(tmp_path)
    (folder / "owner.json").write_text(text)
    assert swept(tmp_path) == 0
    assert (folder / "small" / "f1").exists()


def test_a_folder_without_a_marker_goes_only_when_it_is_old_and_empty(tmp_path):
    empty, full = tmp_path / "mlhpc-storage-a-0", tmp_path / "mlhpc-storage-b-0"
    empty.mkdir()
    full.mkdir()
    (full / "precious").write_text("x")
    assert swept(tmp_path) == 0
    old = time.time() - volume.MARGIN_S - 60
    for folder in (empty, full):
        os.utime(folder, (old, old))
    assert swept(tmp_path) == 1
    assert (full / "precious").exists()


def test_other_names_links_and_files_stay(tmp_path):
    victim = leave(tmp_path / "elsewhere", started="1")
    (tmp_path / "mlhpc-storage-link-0").symlink_to(victim)
    (tmp_path / "mlhpc-storage-file-0").write_text("x")
    other = leave(tmp_path, started="1").rename(tmp_path / "mlhpc-storage")
    assert swept(tmp_path) == 0
    assert victim.is_dir()
    assert other.is_dir()


def test_room_is_looked_at_before_anything_is_written(tmp_path):
    volume.require_room(tmp_path, 1, 1)
    with pytest.raises(
        WorkerFailure, match=r"disk_full: .* GB free for this user, the run needs 1e\+12 GB and 5% besides"
    ):
        volume.require_room(tmp_path / ".", 10**21, 1)


def test_room_for_files_is_looked_at_too(tmp_path, monkeypatch):
    whole = os.statvfs(tmp_path)
    values = [*whole][:10]
    values[5], values[6], values[7] = 1000, 10, 10
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(values))
    with pytest.raises(WorkerFailure, match=r"disk_full: .*room for 10 more files, the run needs 20"):
        volume.require_room(tmp_path, 1, 20)


MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /scratch rw,nosuid shared:5 - lustre 10.1.1.1@o2ib:/fs1 rw,flock
31 30 0:26 / /scratch/fast\040disk rw - nfs4 server:/export rw
40 22 0:50 / /home rw - btrfs /dev/sdb rw
broken line
"""


@pytest.mark.parametrize(
    ("device", "folder", "kind", "source"),
    [
        ("254:0", "/tmp/x", "ext4", "/dev/vda"),
        ("0:25", "/scratch/me", "lustre", "10.1.1.1@o2ib:/fs1"),
        ("0:26", "/scratch/fast disk/me", "nfs4", "server:/export"),
        ("0:77", "/home/me", "btrfs", "/dev/sdb"),
        ("254:0", "/scratchy", "ext4", "/dev/vda"),
    ],
)
def test_the_file_system_is_found_in_the_mount_table(device, folder, kind, source):
    assert volume.parse_mounts(MOUNTS, device, folder) == {"filesystem": kind, "mount_source": source}


def test_an_unreadable_mount_table_tells_nothing():
    assert volume.parse_mounts("", "1:2", "/x") == {}
    assert volume.describe(Path("/no/such/place")) == {}
