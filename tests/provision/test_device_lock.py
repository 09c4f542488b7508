"""Device locks: measured runs take turns, whoever starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.device_lock import DeviceLock, lock_directory

IN_USE = f"waiting for machine: in use by process {os.getpid()}"
IN_LINE = f"waiting in line behind process {os.getpid()}"

#: Takes the lock in a folder, shows what came of it, and keeps it until stdin is closed; as another user, if one is given.
HOLDER = """
import os, sys
from pathlib import Path
from pytest_mlhpc.provision.device_lock import DeviceLock
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))
lock = DeviceLock(Path(sys.argv[1]))
print(repr(lock.acquire([])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def locks(folder):
    """Three locks of one directory, all free in the end."""
    made = [DeviceLock(folder) for _ in range(3)]
    yield made
    for lock in made:
        lock.release()


def test_a_run_on_cores_owns_the_machine(locks):
    first, second, _ = locks
    assert first.acquire([]) == ""
    assert second.acquire([]) == IN_USE
    assert second.acquire(["0"]) == IN_USE
    first.release()
    assert second.acquire([]) == ""


def test_runs_on_different_devices_go_side_by_side(locks):
    first, second, third = locks
    assert first.acquire(["0", "1"]) == ""
    assert second.acquire(["2"]) == ""
    assert third.acquire(["3", "1"]) == f"waiting for 1: in use by process {os.getpid()}"


def test_what_is_not_measured_shares_the_machine_with_runs_on_devices(locks):
    first, second, device = locks
    assert [first.share(), second.share(), device.acquire(["0"])] == ["", "", ""]


def test_what_is_not_measured_and_a_run_on_cores_wait_for_each_other(locks):
    first, second, cores = locks
    first.share()
    second.share()
    assert cores.acquire([]) == IN_USE
    first.release()
    second.release()
    assert cores.acquire([]) == ""
    assert first.share() == IN_USE
    cores.release()
    assert first.share() == ""


def test_an_endless_stream_beside_others_does_not_starve_a_run_on_cores(locks):
    running, late, cores = locks
    running.share()
    cores.acquire([])
    assert late.share() == IN_LINE
    running.release()
    assert cores.acquire([]) == ""


def test_an_endless_stream_of_runs_on_cores_does_not_starve_others(locks):
    running, late, shared = locks
    running.acquire([])
    shared.share()
    assert late.acquire([]) == IN_LINE
    running.release()
    assert late.acquire([]) == IN_LINE
    assert shared.share() == ""
    assert late.acquire([]) == IN_USE
    shared.release()
    assert late.acquire([]) == ""


def test_what_shares_the_machine_does_not_wait_for_runs_that_wait_for_devices(locks):
    first, second, shared = locks
    first.acquire(["0"])
    second.acquire(["0"])
    assert shared.share() == ""


def test_a_failed_try_holds_nothing(locks):
    first, second, third = locks
    first.acquire(["1"])
    second.acquire(["0", "1"])
    second.release()
    assert third.acquire(["0"]) == ""


def test_who_waits_is_next(locks):
    first, second, _ = locks
    first.acquire([])
    second.acquire([])
    first.release()
    assert first.acquire([]) == IN_LINE
    assert second.acquire([]) == ""
    assert first.acquire([]) == IN_USE


def hold(folder: Path, *user: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLDER, str(folder), *user]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_dead_holder_holds_nothing(folder, locks):
    with hold(folder) as holder:
        assert holder.stdout.readline() == "''\n"
        holder.kill()
    assert locks[0].acquire([]) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users")
def test_two_users_share_the_locks():
    folder = Path("/tmp") / f"mlhpc-locks-test-{os.getpid()}"
    try:
        with hold(folder, "65501") as first:
            assert first.stdout.readline() == "''\n"
            with hold(folder, "65502") as second:
                assert second.stdout.readline() == f"'waiting for machine: in use by process {first.pid}'\n"
        with hold(folder, "65502") as second:
            assert second.stdout.readline() == "''\n"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def a_link(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "turn.lock").symlink_to(folder.parent / "precious")


def a_fifo(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "turn.lock")


def an_open_directory(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def a_link_to_a_directory(folder: Path) -> None:
    folder.symlink_to(folder.parent)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (a_link, r"cannot use the lock .*turn\.lock"),
        (a_fifo, "no regular file"),
        (an_open_directory, "no sticky bit"),
        (a_link_to_a_directory, "no directory"),
    ],
)
def test_what_somebody_else_put_in_the_place_of_a_lock_is_refused(folder, what, text):
    (folder.parent / "precious").write_text("precious")
    what(folder)
    with pytest.raises(ProvisionError, match=text):
        DeviceLock(folder).acquire([])
    assert (folder.parent / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    ("common", "mode"),
    [
        pytest.param(
            True, 0o1777, id="the common one, whose maker died before it was opened to all, is opened"
        ),
        pytest.param(False, 0o700, id="a user's own is not opened to all"),
    ],
)
def test_a_directory_that_only_we_may_use(folder, locks, monkeypatch, common, mode):
    if common:
        monkeypatch.setattr("pytest_mlhpc.provision.device_lock.DIRECTORY", str(folder))
    folder.mkdir(mode=0o700)
    assert locks[0].acquire([]) == ""
    assert folder.stat().st_mode & 0o7777 == mode


def test_a_devices_name_cannot_leave_the_directory(folder, locks):
    locks[0].acquire(["../../evil"])
    assert sorted(path.name for path in folder.iterdir()) == ["______evil.lock", "machine.lock", "turn.lock"]


def test_the_place_can_be_set():
    assert lock_directory({"MLHPC_LOCK_DIR": "/x"}) == Path("/x")
    assert lock_directory({}) == Path("/tmp/mlhpc-locks")
