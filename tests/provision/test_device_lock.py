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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_a_run_on_cores_owns_the_machine(folder):
    first, second = DeviceLock(folder), DeviceLock(folder)
    assert first.acquire([]) == ""
    assert second.acquire([]) == f"waiting for machine: in use by process {os.getpid()}"
    assert second.acquire(["0"]) == f"waiting for machine: in use by process {os.getpid()}"
    first.release()
    assert second.acquire([]) == ""
    second.release()


def test_runs_on_different_devices_go_side_by_side(folder):
    first, second, third = DeviceLock(folder), DeviceLock(folder), DeviceLock(folder)
    assert first.acquire(["0", "1"]) == ""
    assert second.acquire(["2"]) == ""
    assert third.acquire(["3", "1"]) == f"waiting for 1: in use by process {os.getpid()}"
    for lock in (first, second, third):
        lock.release()


def test_what_is_not_measured_shares_the_machine_with_all_but_a_run_on_cores(folder):
    first, second, device, cores = (DeviceLock(folder) for _ in range(4))
    assert [first.share(), second.share(), device.acquire(["0"])] == ["", "", ""]
    device.release()
    assert cores.acquire([]) == f"waiting for machine: in use by process {os.getpid()}"
    first.release()
    second.release()
    assert cores.acquire([]) == ""
    assert first.share() == f"waiting for machine: in use by process {os.getpid()}"
    cores.release()
    assert first.share() == ""
    first.release()


def test_an_endless_stream_beside_others_does_not_starve_a_run_on_cores(folder):
    running, late, cores = (DeviceLock(folder) for _ in range(3))
    running.share()
    cores.acquire([])
    assert late.share() == f"waiting in line behind process {os.getpid()}"
    running.release()
    assert cores.acquire([]) == ""
    for lock in (late, cores):
        lock.release()


def test_an_endless_stream_of_runs_on_cores_does_not_starve_others(folder):
    running, late, shared = (DeviceLock(folder) for _ in range(3))
    running.acquire([])
    shared.share()
    assert late.acquire([]) == f"waiting in line behind process {os.getpid()}"
    running.release()
    assert late.acquire([]) == f"waiting in line behind process {os.getpid()}"
    assert shared.share() == ""
    assert late.acquire([]) == f"waiting for machine: in use by process {os.getpid()}"
    shared.release()
    assert late.acquire([]) == ""
    late.release()


def test_what_shares_the_machine_does_not_wait_for_runs_that_wait_for_devices(folder):
    first, second, shared = (DeviceLock(folder) for _ in range(3))
    first.acquire(["0"])
    second.acquire(["0"])
    assert shared.share() == ""
    for lock in (first, second, shared):
        lock.release()


def test_a_failed_try_holds_nothing(folder):
    first, second, third = DeviceLock(folder), DeviceLock(folder), DeviceLock(folder)
    first.acquire(["1"])
    second.acquire(["0", "1"])
    second.release()
    assert third.acquire(["0"]) == ""
    first.release()
    third.release()


def test_who_waits_is_next(folder):
    first, second = DeviceLock(folder), DeviceLock(folder)
    first.acquire([])
    second.acquire([])
    first.release()
    assert first.acquire([]) == f"waiting in line behind process {os.getpid()}"
    assert second.acquire([]) == ""
    assert first.acquire([]) == f"waiting for machine: in use by process {os.getpid()}"
    second.release()
    first.release()


def test_a_dead_holder_holds_nothing(folder):
    code = (
        "import os, sys; from pathlib import Path; from pytest_mlhpc.provision.device_lock import DeviceLock\n"
        "print(DeviceLock.acquire(lock := DeviceLock(Path(sys.argv[1])), []), flush=True); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
    lock = DeviceLock(folder)
    assert lock.acquire([]) == ""
    lock.release()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become two other users")
def test_two_users_share_the_locks(tmp_path_factory):
    folder = Path("/tmp") / f"mlhpc-locks-test-{os.getpid()}"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from pytest_mlhpc.provision.device_lock import DeviceLock\n"
        "os.setuid(int(sys.argv[2]))\n"
        "lock = DeviceLock(Path(sys.argv[1])); print(repr(lock.acquire([])), flush=True); sys.stdin.read()"
    )

    def user(uid: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", code, str(folder), str(uid)]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    try:
        with user(65501) as first:
            assert first.stdout.readline() == "''\n"
            with user(65502) as second:
                assert second.stdout.readline() == f"'waiting for machine: in use by process {first.pid}'\n"
                second.communicate()
            first.communicate()
        with user(65502) as second:
            assert second.stdout.readline() == "''\n"
            second.communicate()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_link_in_place_of_a_lock_is_refused(folder, tmp_path):
    folder.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("precious")
    (folder / "turn.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ProvisionError, match=r"cannot use the lock .*turn\.lock"):
        DeviceLock(folder).acquire([])
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_fifo_in_place_of_a_lock_is_refused(folder):
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "turn.lock")
    with pytest.raises(ProvisionError, match="no regular file"):
        DeviceLock(folder).acquire([])


def test_a_directory_in_which_everybody_may_replace_files_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ProvisionError, match="no sticky bit"):
        DeviceLock(folder).acquire([])


def test_a_link_in_place_of_the_directory_is_refused(folder, tmp_path):
    folder.symlink_to(tmp_path)
    with pytest.raises(ProvisionError, match="no directory"):
        DeviceLock(folder).acquire([])


def test_a_directory_whose_maker_died_before_it_was_opened_to_all_is_opened(folder, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.device_lock.DIRECTORY", str(folder))
    folder.mkdir(mode=0o700)
    lock = DeviceLock(folder)
    assert lock.acquire([]) == ""
    lock.release()
    assert folder.stat().st_mode & 0o7777 == 0o1777


def test_a_users_own_directory_is_not_opened_to_all(folder):
    folder.mkdir(mode=0o700)
    lock = DeviceLock(folder)
    assert lock.acquire([]) == ""
    lock.release()
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_a_devices_name_cannot_leave_the_directory(folder, tmp_path):
    lock = DeviceLock(folder)
    lock.acquire(["../../evil"])
    lock.release()
    assert sorted(path.name for path in folder.iterdir()) == ["______evil.lock", "machine.lock", "turn.lock"]


def test_the_place_can_be_set():
    assert lock_directory({"MLHPC_LOCK_DIR": "/x"}) == Path("/x")
    assert lock_directory({}) == Path("/tmp/mlhpc-locks")
