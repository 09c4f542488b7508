"""What the harness takes for many tests that are in Slurm's queue at once, from collection to the last verdict."""

from __future__ import annotations

import json

from benchmarks.report import Row
from benchmarks.slurm_cluster import Cluster

FEW, TESTS = 10, 300

SUITE = """
import pytest
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")

@pytest.mark.parametrize("name", [f"short{{number}}" for number in range({tests})])
@program("echo rate: 100.0", RATE, time_limit=60, judge=False)
def test_short(run):
    assert run["rate"].value == 100.0
"""


def rows(cluster: Cluster) -> list[Row]:
    """Run a few tests and many, a job each, all of them submitted before the first has ended; the difference is the tests'."""
    few, many = _used(cluster, FEW), _used(cluster, TESTS)
    each_ms = 1000 * (many["own"] - few["own"]) / (TESTS - FEW)
    commands_ms = 1000 * (many["commands"] - few["commands"]) / (TESTS - FEW)
    return [
        Row(
            f"{TESTS} tests, a job each: CPU of the harness per test",
            "<= 30 ms",
            f"{each_ms:.1f} ms (Slurm's commands: {commands_ms:.1f} ms more)",
            each_ms <= 30,
        ),
        Row("... most memory of the harness", "<= 150 MB", f"{many['mb']:.0f} MB", many["mb"] <= 150),
    ]


def _used(cluster: Cluster, tests: int) -> dict[str, float]:
    result = cluster.folder / f"usage-{tests}.json"
    ended = cluster.session(
        "quarter", SUITE.format(tests=tests), "usage", "-o", f"mlhpc_max_jobs={tests}", variables={"MLHPC_BENCH_RESULT": str(result)}
    )  # fmt: skip
    if ended.code or f"{tests} passed" not in ended.printed:
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[:5000]}")
    cluster.idle()
    used: dict[str, float] = json.loads(result.read_text())
    return used
