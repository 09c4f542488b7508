"""What Cerebras' compiler leaves on disk goes with its run, whoever is killed outright: the rank, the batch or the session."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running_suites import LIMIT_S, wait_for
from zipped_batch import interpreter

from pytest_mlhpc.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.servers]

#: What is asked for, and how the folder is called in which Cerebras' package then writes.
ASKED = {
    "lowering": '@workload("lowering", of="cosmoflow")',
    "cerebras": '@train("cosmoflow", cerebras="cpu", steps=100000)',
}

#: Who is killed, by the module that runs there; the session itself has none.
VICTIMS = {"rank": "pytest_mlhpc.node.worker.main", "batch": "pytest_mlhpc.node.batch.main", "session": ""}


def started(folder: Path, asked: str) -> subprocess.Popen[str]:
    python = interpreter("MLHPC_CEREBRAS_PYTHON", ".venv-cerebras", "make cerebras")
    systems = Path(__file__).with_name("cerebras_systems.yaml").read_text().replace("PYTHON", python)
    (folder / "systems.yaml").write_text(systems)
    (folder / "test_x.py").write_text(
        f"from pytest_mlhpc import train, workload\n\n{ASKED[asked]}\ndef test_x(run):\n    pass\n"
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "--system",
        "cs",
        "--mlhpc-baseline=update",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def written(state: Path, asked: str) -> list[Path]:
    """Return what Cerebras' package has written, folders too: they may go while they are looked for."""
    walked = os.walk(state / "runs")
    found = [Path(folder, name) for folder, folders, files in walked for name in (*folders, *files)]
    return [path for path in found if any(part.startswith(f"{asked}-") for part in path.parent.parts)]


def pid_of(module: str) -> int:
    """Return this test's process that runs *module*."""
    cookie = f"MLHPC_TEST={os.environ['MLHPC_TEST']}".encode()
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if module.encode() in arguments and cookie in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no process runs {module}")


@pytest.mark.parametrize(
    ("asked", "victim"), [*(("lowering", victim) for victim in VICTIMS), ("cerebras", "rank")]
)
def test_nothing_of_the_compiler_is_left(asked, victim, tmp_path, state_dir):
    session = started(tmp_path, asked)
    try:
        wait_for(lambda: written(state_dir, asked) or session.poll() is not None)
        assert session.poll() is None, session.communicate()[0]
        os.kill(pid_of(VICTIMS[victim]) if VICTIMS[victim] else session.pid, signal.SIGKILL)
        output, _ = session.communicate(timeout=LIMIT_S)
    finally:
        session.kill()
        session.wait()

    if victim == "session":
        assert main(["reap", "--state-dir", str(state_dir)]) == 0
    else:
        assert session.returncode == 1, output
        assert "Killed" in output or "SIGKILL" in output
    assert list(state_dir.glob("runs/*/*/plan.json"))
    assert not list(state_dir.glob(f"runs/**/{asked}-*"))
