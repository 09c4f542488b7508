"""Suites on which `mlhpc alert drill` plants faults: on a real scheduler a training and a program, whose owners a channel has."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from running_suites import Suite

TESTS = """
@train("cosmoflow", nodes=2, steps=3, owner="@hpc/training")
def test_training(run):
    pass

@program(["/bin/sh", "-c", "touch {begun}; sleep {seconds}; echo rate: 4"], RATE, owner="@hpc/storage")
def test_copy(run):
    pass
"""


def write_site(suite: Suite, seconds: int = 0, more: str = "") -> Path:
    """Write tests, of which the program takes so long, and a channel that nobody listens at.

    Args:
        suite: Where they are written.
        seconds: How long the program takes.
        more: Further tests.

    Returns:
        The file that the program makes when it begins.
    """
    begun = suite.folder / "begun"
    suite.tests(TESTS.format(begun=begun, seconds=seconds) + more)
    hook = "{type: webhook, url: 'http://127.0.0.1:9/${NO_SUCH_TOKEN}'}"
    (suite.folder / "alerts.yaml").write_text(f"channels:\n  team: {hook}\n")
    return begun


def digest(*folders: Path) -> dict[str, str]:
    """Return a digest of each file below *folders*, but of those that pytest or the program of a suite makes."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not {"__pycache__", "begun"} & set(path.parts)
    }


def drill(suite: Suite, *words: str) -> subprocess.Popen[str]:
    """Start a drill of one night in the folder of *suite*."""
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "alert", "drill", "test_faults.py"]
    argv += ["--system", suite.system, "--state-dir", str(suite.state), "--nights", "1", "--json", *words]
    return subprocess.Popen(argv, cwd=suite.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def nothing_planted(suite: Suite) -> bool:
    """Return whether the state directory has no folder of a drill."""
    return not list(suite.state.glob("drills/*"))
