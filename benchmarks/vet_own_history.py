"""How far quick vettings of one machine differ from one to the next, and how often its own history warns of a healthy one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict

from benchmarks.report import Row

#: Vettings, one after the other, on a machine whose state directory is new.
RUNS = 20
#: Makes the median absolute deviation of a normal distribution its standard deviation.
MAD_SCALE = 1.4826


def run(runs: int = RUNS) -> list[Row]:
    """Vet this machine so often; return a row for each figure that only its own history judges."""
    values: dict[str, list[float]] = defaultdict(list)
    warned: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as state:
        for _ in range(runs):
            for one in vetting(state):
                values[one["metric"]].append(one["value"])
                warned[one["metric"]] += one["severity"] == "WARNING"
    return [_row(metric, figures, warned[metric]) for metric, figures in values.items()]


def vetting(state: str) -> list[dict[str, object]]:
    """Vet once; return what was found of figures that have no peers and no floor."""
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "vet", "--json"]
    environment = {**os.environ, "MLHPC_STATE": state}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    found = [finding for node in json.loads(done.stdout)["nodes"] for finding in node["findings"]]
    return [one for one in found if one.get("rule") in {"own_history", "uncompared"}]


def _row(metric: str, figures: list[float], warned: int) -> Row:
    middle = statistics.median(figures)
    sigma = MAD_SCALE * statistics.median(abs(value - middle) for value in figures)
    measured = (
        f"robust standard deviation {sigma / middle:.1%}, worst {1 - min(figures) / middle:.1%} below the median, "
        f"{warned} of {len(figures)} warned of"
    )
    return Row(metric, "at most 1 in 20 warned of", measured, warned <= len(figures) // 20)
