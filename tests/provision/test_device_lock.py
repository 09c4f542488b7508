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
def folder(tmp_path):
    return tmp_path / "locks"


@pytest.fixture
def lock(folder):
    made = DeviceLock(folder)
    yield made
    made.release()


def take_turns(folder, steps):
    """Do *steps* such as "A owns 0 1"; return them with what each call answered.

    Who owns nothing in particular owns the cores.
    """
    locks = {name: DeviceLock(folder) for name in "ABC"}
    answered = []
    try:
        for step in steps:
            call = step.partition(": ")[0]
            name, verb, *devices = call.split()
            does = {"owns": "acquire", "shares": "share", "releases": "release"}[verb]
            answer = getattr(locks[name], does)(*([devices] if verb == "owns" else []))
            answered.append(f"{call}: {answer}" if answer else call)
    finally:
        for lock in locks.values():
            lock.release()
    return answered


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            ["A owns", f"B owns: {IN_USE}", f"B owns 0: {IN_USE}", "A releases", "B owns"],
            id="a run on cores owns the machine",
        ),
        pytest.param(
            ["A owns 0 1", "B owns 2", f"C owns 3 1: waiting for 1: in use by process {os.getpid()}"],
            id="runs on different devices go side by side",
        ),
        pytest.param(
            ["A shares", "B shares", "C owns 0"], id="what is not measured shares the machine with runs on devices"
        ),
        pytest.param(
            [
                "A shares", "B shares", f"C owns: {IN_USE}", "A releases", "B releases", "C owns", f"A shares: {IN_USE}",
                "C releases", "A shares",
            ],
            id="what is not measured and a run on cores wait for each other",
        ),
        pytest.param(
            ["A shares", f"C owns: {IN_USE}", f"B shares: {IN_LINE}", "A releases", "C owns"],
            id="an endless stream beside others does not starve a run on cores",
        ),
        pytest.param(
            [
                "A owns", f"C shares: {IN_USE}", f"B owns: {IN_LINE}", "A releases", f"B owns: {IN_LINE}", "C shares",
                f"B owns: {IN_USE}", "C releases", "B owns",
            ],
            id="an endless stream of runs on cores does not starve others",
        ),
        pytest.param(
            ["A owns 0", f"B owns 0: waiting for 0: in use by process {os.getpid()}", "C shares"],
            id="what shares the machine does not wait for runs that wait for devices",
        ),
        pytest.param(
            ["A owns 1", f"B owns 0 1: waiting for 1: in use by process {os.getpid()}", "B releases", "C owns 0"],
            id="a failed try holds nothing",
        ),
        pytest.param(
            ["A owns", f"B owns: {IN_USE}", "A releases", f"A owns: {IN_LINE}", "B owns", f"A owns: {IN_USE}"],
            id="who waits is next",
        ),
    ],
)  # fmt: skip
def test_locks_are_taken_in_turn(folder, steps):
    assert take_turns(folder, steps) == steps


def hold(folder, *user):
    argv = [sys.executable, "-c", HOLDER, str(folder), *user]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_dead_holder_holds_nothing(folder, lock):
    with hold(folder) as holder:
        assert holder.stdout.readline() == "''\n"
        holder.kill()
    assert lock.acquire([]) == ""


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


@pytest.mark.parametrize(
    ("mode", "make", "text"),
    [
        pytest.param(
            0o700,
            lambda folder: (folder / "turn.lock").symlink_to(folder.parent / "precious"),
            r"cannot use the lock .*turn\.lock",
            id="a link",
        ),
        pytest.param(0o700, lambda folder: os.mkfifo(folder / "turn.lock"), "no regular file", id="a FIFO"),
        pytest.param(0o777, lambda folder: None, "no sticky bit", id="an open directory"),
        pytest.param(
            0o700,
            lambda folder: (folder.rmdir(), folder.symlink_to(folder.parent)),
            "no directory",
            id="a link to a directory",
        ),
    ],
)
def test_what_somebody_else_put_in_the_place_of_a_lock_is_refused(folder, mode, make, text):
    (folder.parent / "precious").write_text("precious")
    folder.mkdir()
    folder.chmod(mode)
    make(folder)
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
def test_a_directory_that_only_we_may_use(folder, lock, monkeypatch, common, mode):
    if common:
        monkeypatch.setattr("pytest_mlhpc.provision.device_lock.DIRECTORY", str(folder))
    folder.mkdir(mode=0o700)
    assert lock.acquire([]) == ""
    assert folder.stat().st_mode & 0o7777 == mode


def test_a_devices_name_cannot_leave_the_directory(folder, lock):
    lock.acquire(["../../evil"])
    assert sorted(path.name for path in folder.iterdir()) == ["______evil.lock", "machine.lock", "turn.lock"]


def test_the_place_can_be_set():
    assert lock_directory({"MLHPC_LOCK_DIR": "/x"}) == Path("/x")
    assert lock_directory({}) == Path("/tmp/mlhpc-locks")
