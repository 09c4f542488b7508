"""The trainings of suites/training at size smoke, on a machine without other work and beside one and two loops that compute.

The language model, whose threads spun for each other beside two such loops, took 26 times as long as alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row

ROOT = Path(__file__).parents[1]
LOOP = "while True: pass"
#: Far beyond what all take on a machine without other work.
LIMIT_S = 3600


def run() -> list[Row]:
    """Return the times of all six trainings, and their ratios to the first."""
    quiet = _seconds()
    rows = [Row("six trainings of size smoke, no other work", "-", f"{quiet:.0f} s", None)]
    for loops, reach in ((1, 3.0), (2, 3.0)):
        with _busy(loops):
            ratio = _seconds() / quiet
        rows.append(
            Row(
                f"... beside {loops} busy loop{'s' * (loops > 1)}, ratio",
                f"<= {reach:g}",
                f"{ratio:.2f}",
                ratio <= reach,
            )
        )
    return rows


def _seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--system",
            "local",
            "--mlhpc-reruns",
            "0",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            f"mlhpc_baselines_dir={folder}",
        ]
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "pytest", "suites/training", *options],
            cwd=ROOT,
            env={**os.environ, "MLHPC_STATE": f"{folder}/state"},
            check=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
        return time.monotonic() - began


@contextlib.contextmanager
def _busy(loops: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()
