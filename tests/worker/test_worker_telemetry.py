"""A run with the sampler beside it tells what its processes used; one without has no word of it."""

from __future__ import annotations

import pytest
from rank_helpers import run_plan

from pytest_mlhpc.results.combine import combine

pytestmark = pytest.mark.servers

NAMES = {"telemetry_cores", "telemetry_memory", "telemetry_cost"}


def figures(done, run):
    measurement = combine(run, done.batch.reports())
    return {metric.name: metric for metric in measurement.metrics if metric.name.startswith("telemetry_")}


def test_the_samplers_figures_are_in_the_measurement_and_it_ends_with_the_rank(ranks):
    run = run_plan(parameters={"global_batch": 8, "seed": 3, "telemetry": True})
    done = ranks(run)
    assert [code for code, _ in done.ended] == [0], done.ended
    found = figures(done, run)
    assert set(found) >= NAMES
    assert found["telemetry_memory"].value > 50 << 20
    assert found["telemetry_cores"].value > 0
    assert all(metric.better == "none" for metric in found.values())


def test_without_the_field_there_is_none(ranks):
    run = run_plan(parameters={"global_batch": 8, "seed": 3, "telemetry": None})
    assert figures(ranks(run), run) == {}
