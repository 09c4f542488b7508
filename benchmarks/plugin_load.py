"""What loading the plug-in adds to a pytest that does not use it, and ``mlhpc --help`` to importing click."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row

REPEATS = 9


def _seconds(arguments: list[str], folder: str) -> float:
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder, check=True, capture_output=True
    )
    return time.perf_counter() - begin


def _cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _help() -> Row:
    """Compare the least CPU time of ``mlhpc --help`` with that of importing click."""
    commands = (["-m", "pytest_mlhpc.cli", "--help"], ["-c", "import click"])
    shown, imported = (min(_cpu_seconds(arguments) for _ in range(REPEATS)) for arguments in commands)
    ratio = shown / imported
    return Row(
        f"mlhpc --help against importing click, min of {REPEATS}", "<= 1.5x", f"{ratio:.2f}x", ratio <= 1.5
    )


def run() -> list[Row]:
    """Interleave runs with and without the plug-in; compare the fastest of each."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_one.py").write_text("def test_one():\n    pass\n")
        arguments = {"with": [], "without": ["-p", "no:mlhpc"]}
        times: dict[str, list[float]] = {name: [] for name in arguments}
        for _ in range(REPEATS):
            for name, extra in arguments.items():
                times[name].append(_seconds(extra, folder))
    fastest = {name: min(values) for name, values in times.items()}
    added = 1000 * (fastest["with"] - fastest["without"])
    measured = f"{added:.1f} ms ({1000 * fastest['with']:.0f} against {1000 * fastest['without']:.0f} ms)"
    return [Row(f"plug-in load, no --system, min of {REPEATS}", "<= 25 ms", measured, added <= 25), _help()]
