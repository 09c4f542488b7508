"""What it costs to wait: 200 real jobs pend for an hour that passes only on the harness's clock."""

from __future__ import annotations

import json

from benchmarks.report import Row
from benchmarks.slurm_cluster import Cluster

JOBS = 200

SUITE = f"""
import pytest
from pytest_mlhpc import Metric, program

RATE = Metric("rate", r"rate: (\\S+)", "items/s")

@pytest.mark.parametrize("name", [f"waits{{number}}" for number in range({JOBS})])
@program(["true"], RATE, judge=False)
def test_waits(run):
    raise AssertionError("it cannot have run")
"""


def rows(cluster: Cluster) -> list[Row]:
    """Hold all nodes with one job, let 200 pend behind it, and measure the harness's hour; on a terminal, which it redraws."""
    words = [
        "--parsable",
        "--partition=cpu",
        "--nodes=4",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 3600",
    ]
    holder = cluster.slurm("sbatch", *words).strip()
    result = cluster.folder / "hour.json"
    cluster.forget()
    try:
        ended = cluster.session(
            "quarter", SUITE, "hour", "-o", f"mlhpc_max_jobs={JOBS}", variables={"MLHPC_BENCH_RESULT": str(result)}
        )  # fmt: skip
    finally:
        cluster.slurm("scancel", holder)
    if not result.exists():
        raise SystemExit(f"pytest ended with {ended.code}:\n{ended.printed[-5000:]}")
    hour = json.loads(result.read_text())
    cluster.idle()
    used = hour["own"] + hour["commands"]
    text = f"{used:.1f} s ({hour['own']:.1f} s itself, {hour['commands']:.1f} s in {hour['calls']} calls of Slurm)"
    return [
        Row(
            f"CPU of the harness while {JOBS} jobs wait an hour",
            "<= 10 s",
            text,
            hour["jobs"] == JOBS and used <= 10,
        ),
        Row(f"... before that: start, collection, {JOBS} submissions", "-", f"{hour['before']:.1f} s", None),
    ]
