"""The bridge to pytest-benchmark: with one of its options, every run is a row in its table, its JSON and its comparisons.

pytest-benchmark has no public call for a measurement that was made elsewhere; this uses one private attribute of its
plug-in (``config._benchmarksession``) and does nothing where that is not there. Judging stays ours.
"""

from __future__ import annotations

import types
from typing import Any

import pytest

from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.session.bench import Bench


def add_row(config: pytest.Config, job: Job) -> None:
    """Add the run of *job* as one benchmark: its rounds are the slowest rank's step times, in seconds.

    A run without steps (`command`) is one round, as long as the program ran. A test that is run again
    (pytest-rerunfailures) has the same run, and no second row.
    """
    benchmarks = getattr(config, "_benchmarksession", None)
    outcome = job.outcome
    if benchmarks is None or outcome is None or outcome.measurement is None:
        return
    if any(row.fullname == job.spec.node_id for row in benchmarks.benchmarks[-1:]):
        return
    from pytest_benchmark.stats import Metadata

    measurement, spec = outcome.measurement, job.spec
    fixture = types.SimpleNamespace(
        name=spec.node_id.rpartition("::")[2],
        fullname=spec.node_id,
        group=spec.workload,
        param=spec.target.id,
        params={"system": spec.target.id, **{name: str(value) for name, value in spec.asked.items()}},
        extra_info=_extra_info(job),
        cprofile_stats=None,
        has_error=False,
    )
    row: Any = Metadata(fixture, iterations=1, options={"timer": "remote"})  # type: ignore[no-untyped-call]  # theirs
    whole = (measurement.ended_ns - measurement.started_ns) / 1e9
    for seconds in measurement.step_times_s or (whole,):
        row.update(seconds)
    benchmarks.benchmarks.append(row)


def add_machine(machine_info: dict[str, Any], bench: Bench) -> None:
    """Say where the figures were made: pytest-benchmark itself only knows the machine that pytest runs on."""
    machine_info["mlhpc"] = sorted(target.id for target in bench.targets)


def _extra_info(job: Job) -> dict[str, Any]:
    outcome = job.outcome
    if outcome is None or outcome.measurement is None:
        return {}
    return {
        "benchmark": outcome.benchmark,
        "run": outcome.record_id,
        "verdict": outcome.judgement.verdict.value if outcome.judgement else "",
        "device_model": outcome.measurement.device_model,
        "nodes": list(outcome.measurement.nodes),
        "metrics": {metric.name: metric.value for metric in outcome.measurement.metrics},
    }
