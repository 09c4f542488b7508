"""How long `mlhpc vet quick` takes on this machine, from the start of its process to its end, with a folder for its verdict."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row

#: Options -> longest time in seconds, repetitions.
COMMANDS: dict[tuple[str, ...], tuple[float, int]] = {
    ("quick", "--no-load"): (0.5, 11),
    ("quick",): (12.0, 5),
}

NAMES = {("quick", "--no-load"): "passive checks only", ("quick",): "with compute, CPU"}


def rows() -> list[Row]:
    """Time both, and how long Python takes until the command's options are read."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-bench-vet-") as name:
        starts = [_seconds(["--help"], Path(name)) for _ in range(5)]
        bare = [_timed([sys.executable, "-c", "pass"], dict(os.environ)) for _ in range(5)]
        found = [_row(options, Path(name)) for options in COMMANDS]
    text = f"{1000 * statistics.median(starts):.0f} ms, Python alone {1000 * statistics.median(bare):.0f} ms"
    return [
        *found,
        Row("... of these: Python until the command has read its options (median of 5)", "-", text, None),
    ]


def _row(options: tuple[str, ...], folder: Path) -> Row:
    limit, times = COMMANDS[options]
    out = folder / "vet"
    seconds, inner = [], []
    _seconds(
        [*options, "--output", str(out)], folder
    )  # files that are read for the first time are no part of it
    for _ in range(times):
        seconds.append(_seconds([*options, "--output", str(out)], folder))
        inner.append(float(json.loads((out / "verdict.json").read_text())["seconds"]))
    middle = statistics.median(seconds)
    return Row(
        f"quick, one node, {NAMES[options]}, wall, {times} times",
        f"<= {limit:g} s",
        f"median {middle:.2f} s, longest {max(seconds):.2f} s (the vetting itself: median {statistics.median(inner):.2f} s)",
        middle <= limit,
    )


def _seconds(options: list[str], folder: Path) -> float:
    environ = {**os.environ, "MLHPC_STATE": str(folder / "state")}
    return _timed([sys.executable, "-m", "pytest_mlhpc.cli", "vet", *options], environ)


def _timed(argv: list[str], environ: dict[str, str]) -> float:
    """Return the seconds of one process; without floors on a CPU node its verdict may be that they are not compared (5)."""
    begun = time.perf_counter()
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode not in (0, 1, 5):
        raise SystemExit(f"{argv} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return seconds
