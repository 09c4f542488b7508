"""The guardian: whatever ends the harness, nothing that it started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pytest_mlhpc.provision.guardian import (
    end_processes,
    processes_with,
    reap_session,
    remove_socket_folders,
    socket_base,
    socket_prefix,
)

HARNESS = """
import sys, time, uuid
from pathlib import Path
from pytest_mlhpc import payload
from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.provision.local import LocalProvisioner

session, folder, python = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
local = LocalProvisioner(state_dir=folder, session_id=session)

def submit(**changes):
    fields = dict(run_id=uuid.uuid4().hex, nonce="n", attempt=0, workload="command", parameters={}, nodes=1, ranks=1,
                  cores_per_rank=1, device_type="cpu", launcher="plain", time_limit_s=60.0, steps=1, warmup_steps=0,
                  exclusive=False)
    run = RunPlan(**{**fields, **changes})
    return local.submit(Plan(run.run_id, payload.build(folder).sha256, str(folder / run.run_id), 1, 60.0, (run,)))

submit(argv=("bash", "-c", "trap '' TERM; setsid sleep 60 & sleep 60"))
batch = submit(workload="resnet50", python=python)
while True:
    for event in local.events([batch], 1.0):
        if getattr(getattr(event, "message", None), "kind", "") == "progress":
            print("guardian", local._guardian.pid, flush=True)
"""

RANK = """
import signal, time
from pytest_mlhpc.batch.channel import RankChannel
channel = RankChannel.from_environment()
channel.started({"torch": "none"})
channel.progress(1, 2, 1.0)
time.sleep(60)
"""


@pytest.fixture
def harness(tmp_path: Path):
    """A harness of its own with a program and a batch under way; session id and the guardian's pid come with it."""
    (tmp_path / "rank.py").write_text(RANK)
    python = tmp_path / "python"
    python.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        if [ "$2" = pytest_mlhpc.worker.main ]; then exec {sys.executable} {tmp_path}/rank.py; fi
        exec {sys.executable} "$@"
        """)
    )
    python.chmod(0o755)
    (tmp_path / "harness.py").write_text(HARNESS)
    session = f"session-{tmp_path.name}-{os.getpid()}"
    # A surrounding nohup ignores SIGHUP, and children inherit that.
    argv = ["env", "--default-signal=HUP,TERM", sys.executable]
    argv += [str(tmp_path / "harness.py"), session, str(tmp_path), str(python)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        guardian = int(process.stdout.readline().split()[1])
        yield process, session, guardian
        process.kill()
    reap_session(session)


def socket_folders(session: str) -> list[Path]:
    return list(Path(socket_base()).glob(f"{socket_prefix(session)}*"))


def wait_until_gone(session: str, guardian: int, is_alive, seconds: float) -> list[int]:
    """Wait at most *seconds*; return what is left."""
    cookie = f"MLHPC_SESSION={session}".encode()
    deadline = time.monotonic() + seconds
    while (left := processes_with(cookie)) or is_alive(guardian):
        if time.monotonic() > deadline:
            return [*left, guardian] if is_alive(guardian) else left
        time.sleep(0.02)
    return []


@pytest.mark.servers
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_when_the_harness_dies_everything_ends_within_three_seconds(harness, is_alive, number):
    process, session, guardian = harness
    assert len(processes_with(f"MLHPC_SESSION={session}".encode())) >= 5
    process.send_signal(number)
    assert wait_until_gone(session, guardian, is_alive, 3.0) == []


@pytest.mark.servers
def test_when_the_harness_is_killed_no_socket_is_left(harness, is_alive):
    process, session, guardian = harness
    assert len(socket_folders(session)) == 1
    process.kill()
    assert wait_until_gone(session, guardian, is_alive, 20.0) == []
    assert socket_folders(session) == []


@pytest.mark.servers
def test_signals_that_end_a_harness_do_not_end_its_guardian(harness, is_alive):
    process, session, guardian = harness
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guardian, number)
    process.kill()
    assert wait_until_gone(session, guardian, is_alive, 3.0) == []


@pytest.mark.servers
def test_when_the_guardian_died_too_the_next_session_ends_what_is_left(harness, is_alive):
    process, session, guardian = harness
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    process.wait()
    assert processes_with(f"MLHPC_SESSION={session}".encode()) != []  # the program has no lifeline
    assert reap_session(session) == []
    assert socket_folders(session) == []
    assert processes_with(f"MLHPC_SESSION={session}".encode()) == []


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    name = tmp_path.name
    argv = ["bash", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"]
    with subprocess.Popen(argv, env={**os.environ, "COOKIE": name}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert end_processes("COOKIE", name, 0.2) == []
        assert process.wait() == -signal.SIGKILL


def test_only_the_whole_value_counts(tmp_path):
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "COOKIE": tmp_path.name + "1"}) as process:
        assert end_processes("COOKIE", tmp_path.name) == []
        assert process.poll() is None
        process.kill()


def test_only_socket_folders_of_the_session_are_removed(tmp_path):
    for name in ("mlhpc-one.a", "mlhpc-one.b", "mlhpc-other.a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s").touch()
    (tmp_path / "mlhpc-one.b" / "precious").touch()
    (tmp_path / "mlhpc-one.link").symlink_to(tmp_path / "mlhpc-other.a")
    remove_socket_folders("one", str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mlhpc-one.b", "mlhpc-other.a", "mlhpc-one.link"}
    assert (tmp_path / "mlhpc-other.a" / "s").exists()


def test_it_imports_little(tmp_path):
    code = "import sys; exec(open(sys.argv[1]).read(), {'__name__': 'x'}); print(*sys.modules)"
    path = Path(end_processes.__code__.co_filename)
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, path], capture_output=True, text=True, check=True
    )
    assert not {"subprocess", "json", "re", "pathlib"} & set(found.stdout.split())
