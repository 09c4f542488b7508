"""What sharing an allocation is worth: 100 short tests that each take all nodes, packed, and one job each."""

from __future__ import annotations

from benchmarks.report import Row
from benchmarks.slurm_cluster import Cluster, Ended

TESTS, NODES, SECONDS = 100, 4, 0.2

SUITE = f"""
import pytest
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")

@pytest.mark.parametrize("name", [f"short{{number}}" for number in range({TESTS})])
@program("bash -c 'sleep {SECONDS}; echo rate: 100.0'", RATE, nodes={NODES}, time_limit=20, judge=False)
def test_short(run):
    assert run["rate"].value == 100.0
"""


def rows(cluster: Cluster) -> list[Row]:
    """Time whole pytest processes; in both, up to sixteen allocations are in Slurm's queue."""
    packed, packed_jobs = _timed(cluster, "--mlhpc-pack")
    alone, alone_jobs = _timed(cluster)
    ratio = alone.wall / packed.wall
    return [
        Row(
            f"{TESTS} tests of {SECONDS} s on all {NODES} nodes: one job each / packed, wall",
            ">= 5",
            f"{ratio:.1f} ({alone.wall:.1f} s in {alone_jobs} jobs against {packed.wall:.1f} s in {packed_jobs})",
            ratio >= 5,
        ),
        Row(
            "... wall of each packed test beyond its own time",
            "-",
            f"{1000 * (packed.wall / TESTS - SECONDS):.0f} ms",
            None,
        ),
    ]


def _timed(cluster: Cluster, *options: str) -> tuple[Ended, int]:
    cluster.forget()
    ended = cluster.session(
        "whole",
        SUITE,
        "reports",
        "-o",
        "mlhpc_max_jobs=16",
        *options,
        variables={"MLHPC_BENCH_REPORTS": "/dev/null"},
    )
    if ended.code or f"{TESTS} passed" not in ended.printed:
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[:5000]}")
    cluster.idle()
    return ended, cluster.calls()["sbatch"]
