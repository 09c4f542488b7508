"""The guardian: whatever ends the harness, nothing that it started goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_allocations import is_alive, python_path, wait_until

from pytest_mlhpc.provision import guardian

HARNESS = """
import sys
from pathlib import Path
from local_allocations import Local
folder = Path(sys.argv[1])
local = Local(folder, folder, sys.argv[2])
local.shell("trap '' TERM; setsid sleep 600 & env -i setsid sleep 600 & sleep 600")
batch = local.ranks("channel.progress(1, 2, 1.0); time.sleep(600)")
local.wait_for(batch, "progress")
print(local.provisioner._guardian.pid, flush=True)
while True:
    local.provisioner.events([batch], 600.0)
"""


@pytest.fixture
def harness(tmp_path):
    """A harness of its own with a program and a batch under way."""
    session = f"session-{os.getpid()}-{tmp_path.name}"  # the folder of its sockets has only the first part of the name
    # A surrounding nohup ignores SIGHUP, and children inherit that.
    argv = ["env", "--default-signal=HUP,TERM", sys.executable, "-c", HARNESS, str(tmp_path), session]
    environ = {**os.environ, "PYTHONPATH": python_path(tmp_path, Path(__file__).parents[1])}
    try:
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environ) as process:
            try:
                pid = int(process.stdout.readline())
                yield SimpleNamespace(process=process, session=session, guardian=pid)
            finally:
                process.kill()
    finally:
        guardian.reap_session(session)


def processes_of(session):
    return guardian.processes_with(f"MLHPC_SESSION={session}".encode())


def socket_folders(session):
    return list(Path(guardian.socket_base()).glob(f"{guardian.socket_prefix(session)}*"))


@pytest.mark.servers
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_when_the_harness_dies_everything_ends_and_no_socket_is_left(harness, number):
    wait_until(lambda: len(processes_of(harness.session)) >= 6)  # the program's own children may start late
    assert len(socket_folders(harness.session)) == 1
    harness.process.send_signal(number)
    wait_until(lambda: not processes_of(harness.session) and not is_alive(harness.guardian))
    assert socket_folders(harness.session) == []


@pytest.mark.servers
def test_signals_that_end_a_harness_do_not_end_its_guardian(harness):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(harness.guardian, number)
    harness.process.kill()
    wait_until(lambda: not processes_of(harness.session) and not is_alive(harness.guardian))


@pytest.mark.servers
def test_when_the_guardian_died_too_the_next_session_ends_what_is_left(harness):
    os.kill(harness.guardian, signal.SIGKILL)
    harness.process.kill()
    harness.process.wait()
    assert processes_of(harness.session) != []  # the program has no lifeline
    assert guardian.reap_session(harness.session) == []
    assert socket_folders(harness.session) == processes_of(harness.session) == []


def test_only_the_whole_value_counts(tmp_path):
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "COOKIE": tmp_path.name + "1"}) as process:
        try:
            assert guardian.end_processes("COOKIE", tmp_path.name) == []
            assert process.poll() is None
        finally:
            process.kill()


def test_only_socket_folders_of_the_session_are_removed(tmp_path):
    for name in ("mlhpc-one.a", "mlhpc-one.b", "mlhpc-other.a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s").touch()
    (tmp_path / "mlhpc-one.b" / "precious").touch()
    (tmp_path / "mlhpc-one.link").symlink_to(tmp_path / "mlhpc-other.a")
    guardian.remove_socket_folders("one", str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mlhpc-one.b", "mlhpc-other.a", "mlhpc-one.link"}
    assert (tmp_path / "mlhpc-other.a" / "s").exists()


def test_it_imports_little():
    code = "import sys; exec(open(sys.argv[1]).read(), {'__name__': 'x'}); print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", code, guardian.end_processes.__code__.co_filename]
    found = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert not {"subprocess", "json", "re", "pathlib"} & set(found.stdout.split())
