"""What Cerebras' compiler leaves on disk goes with its run, whoever is killed outright: the rank, the batch or the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_mlhpc.cli import main

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.servers]

#: Longest wait for anything on a busy machine, in seconds; a limit, never a measure.
LIMIT_S = 600.0

SYSTEMS = """\
schema: 1
systems:
  cs:
    partitions:
      csx:
        scheduler: local
        accelerator: wse
        preset: smoke
        nodes: {{cores: 1, memory: 1GiB, devices: 1, device_model: Cerebras CS-3}}
        environments: {{default: {{python: {python}}}}}
"""

#: What is asked for, and how the folder is called in which Cerebras' package then writes.
ASKED = {
    "lowering": '@pytest.mark.job("lowering", of="cosmoflow")',
    "cerebras": '@pytest.mark.train("cosmoflow", cerebras="cpu", steps=100000)',
}

#: Who is killed, by the module that runs there; the session itself has none.
VICTIMS = {"rank": "pytest_mlhpc.worker.main", "batch": "pytest_mlhpc.batch.main", "session": ""}


@pytest.fixture
def python():
    found = os.environ.get("MLHPC_CEREBRAS_PYTHON") or str(ROOT / ".venv-cerebras/bin/python")
    if not Path(found).exists():
        pytest.fail(f"there is no {found}: run `make cerebras`", pytrace=False)
    return found


def started(folder: Path, python: str, asked: str) -> subprocess.Popen[str]:
    (folder / "systems.yaml").write_text(SYSTEMS.format(python=python))
    (folder / "test_x.py").write_text(f"import pytest\n\n{ASKED[asked]}\ndef test_x(run):\n    pass\n")
    words = ["--system", "cs", "--update-baselines", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if module.encode() in words and cookie in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"nobody runs {module}")


@pytest.mark.parametrize(
    ("asked", "victim"), [*(("lowering", victim) for victim in VICTIMS), ("cerebras", "rank")]
)
def test_nothing_of_the_compiler_is_left(asked, victim, python, tmp_path, state_dir):
    session = started(tmp_path, python, asked)
    try:
        ends = time.monotonic() + LIMIT_S
        while not written(state_dir, asked):
            assert session.poll() is None, session.communicate()[0]
            assert time.monotonic() < ends
            time.sleep(0.05)
        os.kill(pid_of(VICTIMS[victim]) if VICTIMS[victim] else session.pid, signal.SIGKILL)
        said, _ = session.communicate(timeout=LIMIT_S)
    finally:
        session.kill()
        session.wait()

    if victim == "session":
        assert main(["reap", "--state-dir", str(state_dir)]) == 0
    else:
        assert session.returncode == 1, said
        assert "Killed" in said or "SIGKILL" in said
    assert list(state_dir.glob("runs/*/*/plan.json"))
    assert not list(state_dir.glob(f"runs/**/{asked}-*"))
