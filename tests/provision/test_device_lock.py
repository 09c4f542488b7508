"""Device locks: measured runs take turns, whoever starts them."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.device_lock import (  # fmt: skip
    FOREIGN_LIMIT_S,
    DeviceLock,
    LockHolder,
    MachineLock,
    holder_of,
    lock_directory,
    own_directory,
)

IN_USE = "waiting for the machine: in use by this session"
IN_LINE = "waiting in line behind this session"

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
            ["A owns 0 1", "B owns 2", "C owns 3 1: waiting for device 1: in use by this session"],
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
            ["A owns 0", "B owns 0: waiting for device 0: in use by this session", "C shares"],
            id="what shares the machine does not wait for runs that wait for devices",
        ),
        pytest.param(
            ["A owns 1", "B owns 0 1: waiting for device 1: in use by this session", "B releases", "C owns 0"],
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
                assert (
                    second.stdout.readline() == f"'waiting for the machine: in use by process {first.pid}'\n"
                )
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


@pytest.fixture
def machine(folder):
    """Return a maker of locks of users on a machine whose clock stands unless a test sets it."""
    made = []

    def make(clock=lambda: 0.0):
        made.append(MachineLock({"MLHPC_LOCK_DIR": str(folder)}, clock))
        return made[-1]

    yield make
    for lock in made:
        lock.release()


OTHERS = "process 4711 of user 65501"


def test_a_user_of_this_machine_is_waited_for_by_name_and_not_for_ever(folder, machine, monkeypatch):
    now = 0.0
    others = DeviceLock(folder)
    others.acquire([])
    monkeypatch.setattr("pytest_mlhpc.provision.device_lock.holder_of", lambda _fd: LockHolder(4711, 65501))
    ours, later = machine(lambda: now), machine(lambda: now)
    words = f"waiting for the machine: in use by {OTHERS}; for at most 600 s, then this run goes on beside it"
    assert [ours.acquire([]), ours.beside] == [words, ""]
    now = FOREIGN_LIMIT_S - 1
    assert ours.acquire([]) == words
    now = FOREIGN_LIMIT_S
    assert ours.acquire([]) == ""
    assert ours.beside == f"not alone on this machine: {OTHERS} did not give its lock back within 600 s"
    # Our own sessions still take turns with each other.
    assert later.acquire([]).startswith("waiting for the machine: in use by ")
    ours.release()
    now += FOREIGN_LIMIT_S - 1
    assert later.acquire([]) == words
    others.release()
    assert [later.acquire([]), later.beside] == ["", ""]


def test_a_process_of_our_own_is_waited_for_as_long_as_it_takes(folder, machine):
    now = 0.0
    older = DeviceLock(folder)
    older.acquire([])
    ours = machine(lambda: now)
    assert ours.acquire([]) == IN_USE
    now = 10 * FOREIGN_LIMIT_S
    assert [ours.acquire([]), ours.beside] == [IN_USE, ""]
    older.release()
    assert [ours.acquire([]), ours.beside] == ["", ""]


def test_a_users_own_locks_are_for_nobody_else_to_take(folder, machine):
    ours = machine()
    assert ours.acquire([]) == ""
    assert [path.stat().st_mode & 0o7777 for path in (folder, folder / str(os.geteuid()))] == [0o1777, 0o700]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_a_folder_that_another_user_has_put_in_the_place_of_ours_is_named(folder, machine):
    folder.mkdir()
    (folder / "0").mkdir()
    os.chown(folder / "0", 65501, 0)
    with pytest.raises(
        ProvisionError, match=rf"locks in {folder}/0: it belongs to user 65501.*set MLHPC_LOCK_DIR"
    ):
        machine().acquire([])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_kernel_says_who_holds_a_lock_whatever_is_written_in_it():
    folder = Path("/tmp") / f"mlhpc-locks-test-{os.getpid()}"
    lock = MachineLock({"MLHPC_LOCK_DIR": str(folder)})
    try:
        with hold(folder, "65501") as other:
            assert other.stdout.readline() == "''\n"
            (folder / "machine.lock").write_text(f"{os.getpid()}\n")
            assert lock.acquire([]).startswith(
                f"waiting for the machine: in use by process {other.pid} of user 65501;"
            )
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("locks", "holder"),
    [
        pytest.param(
            "1: FLOCK  ADVISORY  WRITE {pid} {place} 0 EOF\n",
            "this session of user {user} (uid {uid})",
            id="this process",
        ),
        pytest.param(
            "1: FLOCK  ADVISORY  WRITE 1 {place} 0 EOF\n",
            "process 1 of user daemon (uid 1)",
            id="of another user",
        ),
        pytest.param(
            "1: FLOCK  ADVISORY  WRITE 0 {place} 0 EOF\n", "process 99", id="of another pid namespace"
        ),
        pytest.param("1: FLOCK  ADVISORY  WRITE 1 00:00:1 0 EOF\n", "process 99", id="none on this file"),
        pytest.param(
            "1: -> FLOCK  ADVISORY  WRITE 1 {place} 0 EOF\n?\n", "process 99", id="one that only waits"
        ),
    ],
)
def test_who_holds_a_lock_is_read_from_the_kernel(tmp_path, monkeypatch, locks, holder):
    (tmp_path / "machine.lock").write_text("99\n")
    found = (tmp_path / "machine.lock").stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    (tmp_path / "locks").write_text(locks.format(pid=os.getpid(), place=place))
    monkeypatch.setattr("pytest_mlhpc.provision.device_lock._user_of", {os.getpid(): os.geteuid(), 1: 1}.get)
    with (tmp_path / "machine.lock").open("rb") as file:
        found = holder_of(file.fileno(), tmp_path / "locks")
    words = {"pid": os.getpid(), "user": pwd.getpwuid(os.geteuid()).pw_name, "uid": os.geteuid()}
    assert f"{found}{found.user}" == holder.format(**words)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"MLHPC_LOCK_DIR": "/x", "XDG_RUNTIME_DIR": "{ours}"}, "/x/{uid}"),
        ({"XDG_RUNTIME_DIR": "{ours}"}, "{ours}/mlhpc-locks"),
        ({"XDG_RUNTIME_DIR": "{ours}/gone"}, "/tmp/mlhpc-locks-{uid}"),
        ({}, "/tmp/mlhpc-locks-{uid}"),
    ],
)
def test_a_users_own_locks_lie_on_this_machine(tmp_path, environment, place):
    words = {"ours": tmp_path, "uid": os.geteuid()}
    environment = {name: value.format(**words) for name, value in environment.items()}
    assert own_directory(environment) == Path(place.format(**words))
