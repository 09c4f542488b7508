"""The wheel in an environment of its own, as a fixture, and a stranger who types there what was printed."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BENCHMARK = """\
from pathlib import Path

from pytest_mlhpc import Metric, program


@program(["cat", Path("what it prints").absolute()], Metric("rate", r"rate: (\\S+)", "items/s"))
def test_rate(run):
    pass
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Return an environment with the wheel in it; what the wheel needs is that of this interpreter."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "--quiet",
    ]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", wheel], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "needs.pth").write_text(sysconfig.get_path("purelib"))
    program = folder / "venv/bin/pytest"
    program.write_text(f'#!/bin/sh\nexec {python} -m pytest "$@"\n')
    program.chmod(0o755)
    return folder / "venv"


class Stranger:
    """Types commands in an empty folder whose name has a blank and a quote, with no checkout and no shell."""

    def __init__(self, environment: Path, folder: Path):
        self.folder = folder / "it's new"
        self.folder.mkdir()
        ours = re.compile("PYTHON|PYTEST|MLHPC_|XDG_|CI$|KUBECONFIG")
        self.variables = {name: value for name, value in os.environ.items() if not ours.match(name)}
        self.variables |= {"HOME": str(folder), "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def type(self, command: str, code: int = 0) -> str:
        """Run a command, expect its exit code, and return what it prints."""
        program, *words = shlex.split(command)
        found = next(
            path for one in self.variables["PATH"].split(":") if (path := Path(one, program)).exists()
        )
        done = subprocess.run(
            [found, *words], cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{command}\n{said}"
        return said


def printed(said: str, before: str) -> str:
    """Return the command that follows *before* in a line."""
    found = re.search(rf"{before}: (.+)", said)
    assert found, said
    return found[1]


def find_a_slower_program(stranger: Stranger, command: str, target: str) -> None:
    """Measure and accept a program by *command* and what it prints, make the program slower, and accept that."""
    name = f"test_rate[{target}]"
    stranger.write("suites/test_first.py", _BENCHMARK)
    stranger.write("what it prints", "rate: 100\n")
    first = stranger.type(command)
    assert re.search(rf"{re.escape(name)} +rate +100 items/s .* new\n1 new series recorded; ", first), first
    accept = printed(first, "to accept")
    assert "must say why" in stranger.type(accept, code=2)
    stranger.type(accept.replace("TEXT", "'it is fast'"))
    stranger.write("what it prints", "rate: 80\n")
    failed = stranger.type(command, code=1)
    reason, verdict = failed.partition(f"{name} ___")[2].splitlines()[1:3]
    assert reason == "rate 80 items/s: 20 % below 100 (3 of 3 re-runs agree)"
    assert verdict.startswith("  regressed: the fence is ")
    status = stranger.type("mlhpc status")
    assert f"regressed: suites/test_first.py::{name}\n  {reason}\n" in status
    for again in (printed(failed, "to repeat just this test"), printed(status, "next")):
        assert reason in stranger.type(again, code=1)
    stranger.type(printed(failed, "to accept the new value").replace("TEXT", "'it checks more'"))
    assert "1 passed" in stranger.type(command)
    assert "1 passed" in stranger.type("mlhpc status")


@pytest.fixture
def stranger(installed, tmp_path):
    return Stranger(installed, tmp_path)
