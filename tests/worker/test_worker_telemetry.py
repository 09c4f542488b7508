"""A run with the sampler beside it reports what its processes used; one without has no figure of it."""

import pytest
from rank_helpers import run_plan

pytestmark = pytest.mark.servers


@pytest.fixture
def figures(ranks):
    """Return the sampler's figures of a run by name."""

    def measure(telemetry):
        run = run_plan(parameters={"global_batch": 8, "seed": 3, "telemetry": telemetry})
        metrics = ranks(run).measurement.metrics
        return {metric.name: metric for metric in metrics if metric.name.startswith("telemetry_")}

    return measure


def test_the_samplers_figures_are_in_the_measurement_and_it_ends_with_the_rank(figures):
    found = figures(True)
    assert set(found) >= {"telemetry_cores", "telemetry_memory", "telemetry_cost"}
    assert found["telemetry_memory"].value > 50 << 20
    assert found["telemetry_cores"].value > 0
    assert all(metric.better == "none" for metric in found.values())


def test_without_the_field_there_is_none(figures):
    assert figures(None) == {}
