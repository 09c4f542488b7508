"""A measurement that is not what was asked for never passes; each way has its name and text."""

import dataclasses
import math
from typing import Any

import pytest
from pods import run_plan
from worlds import SECOND, measurement, rank, spec

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.session.check_measurement import check

RUN_ID = "01890000-0000-7000-8000-000000000001"


def plan(**changes: Any) -> RunPlan:
    run = run_plan(RUN_ID, workload="resnet50", argv=(), nonce="n", steps=10, warmup_steps=1)
    return dataclasses.replace(run, **changes)


def broken(metric: MetricValue, **changes: Any) -> MetricValue:
    """Return a metric as a hostile peer might build it, past the checks of its class."""
    copy = dataclasses.replace(metric)
    vars(copy).update(changes)
    return copy


def unchecked(metric: MetricValue) -> Measurement:
    run = measurement()
    vars(run)["metrics"] = (metric,)
    return run


RATE = MetricValue("rate", 100.0, "samples/s", "higher")
LOSS = MetricValue("loss", 1.0, "1", "lower", (2.0, 1.0), 2.0, 1.0)


def test_what_was_asked_for_has_nothing_wrong() -> None:
    assert check(measurement(per_rank=(rank(),), more=(LOSS,)), spec(), plan()) == []


@pytest.mark.parametrize(
    ("found", "asked", "outcome", "text"),
    [
        (measurement(run_id="x"), {}, "foreign_result", f"run id: asked for '{RUN_ID}', the result says 'x'"),
        (measurement(nonce="x"), {}, "foreign_result", "nonce"),
        (measurement(attempt=1), {}, "foreign_result", "attempt: asked for 0, the result says 1"),
        (measurement(workload="x"), {}, "foreign_result", "workload"),
        (
            measurement(device_type="cpu"),
            {"device_type": "cuda"},
            "wrong_device",
            "asked for cuda, ran on cpu",
        ),
        (
            measurement(device_type="cuda", per_rank=(rank(),)),
            {"device_type": "cuda"},
            "wrong_device",
            "ran on cpu, cuda",
        ),
        (measurement(), {"ranks": 2}, "too_few_ranks", "asked for 2 ranks, 1 reported"),
        (measurement(ranks=2, devices=2), {}, "foreign_result", "asked for 1 ranks, 2 ranks reported"),
        (
            measurement(ranks=2, devices=2, per_rank=(rank(0), rank(0))),
            {"ranks": 2},
            "foreign_result",
            "numbered [0, 0]",
        ),
        (
            measurement(ranks=2),
            {"ranks": 2},
            "too_few_devices",
            "asked for 2 devices (one a rank), 1 were used",
        ),
        (measurement(), {"nodes": 2}, "too_few_devices", "asked for 2 nodes, the ranks ran on n1"),
        (measurement(steps=9), {}, "too_few_steps", "asked for 10 steps, 9 were measured"),
        (measurement(step_times_s=(0.1,) * 9), {}, "too_few_steps", "times of 9 were reported"),
        (measurement(per_rank=(rank(steps=3),)), {}, "too_few_steps", "3 were measured"),
        (measurement(samples=0), {}, "too_few_steps", "consumed no sample"),
        (
            measurement(),
            {"data_kind": "real"},
            "foreign_result",
            "asked for real data, the run read synthetic",
        ),
        (
            measurement(),
            {"data_source": "files"},
            "foreign_result",
            "asked for data from files, it came from memory",
        ),
        (
            measurement(cache="warm"),
            {"cache": "cold"},
            "foreign_result",
            "asked for a cold page cache, it was warm",
        ),
        (measurement(ended_ns=SECOND // 2), {}, "clock_backwards", "the run ended 0.5 s before it started"),
        (measurement(step_times_s=(0.1,) * 9 + (-0.1,)), {}, "clock_backwards", "a step took -0.1 s"),
        (measurement(step_times_s=(0.0,) * 10), {}, "clock_backwards", "a step took 0 s"),
        (measurement(per_rank=(rank(ended_ns=0),)), {}, "clock_backwards", "rank 0 ended 1 s before"),
        (measurement(per_rank=(rank(wait_s=-1.0),)), {}, "clock_backwards", "wait_s is -1 s"),
        (measurement(per_rank=(rank(epoch_s=0.0),)), {}, "clock_backwards", "timed window took 0 s"),
        (measurement(per_rank=(rank(losses=(2.0, math.nan)),)), {}, "loss_nan", "observation 1 is nan"),
        (measurement(name="other"), {}, "metric_missing", "rate was not reported; the run reported other"),
        (measurement(0.0), {}, "metric_invalid", "rate is 0.0 samples/s; only a positive figure makes sense"),
        (measurement(-5.0), {}, "metric_invalid", "rate is -5.0 samples/s"),
        (unchecked(broken(RATE, value=math.nan)), {}, "metric_invalid", "rate is nan"),
        (unchecked(broken(RATE, value=math.inf)), {}, "metric_invalid", "rate is inf"),
        (unchecked(broken(LOSS, samples=(math.nan,))), {}, "loss_nan", "the loss became NaN or infinite"),
        (
            measurement(more=(MetricValue("wait", -1.0, "s", "lower"),)),
            {},
            "metric_invalid",
            "wait is -1.0 s; a negative figure makes no sense",
        ),
    ],
)
def test_less_than_was_asked_for_is_named(
    found: Measurement, asked: dict[str, Any], outcome: str, text: str
) -> None:
    failures = check(found, spec(), plan(**asked))
    assert any(failure.outcome == outcome and text in failure.text for failure in failures), failures
    assert all(failure.nodes == ("n1",) for failure in failures)


@pytest.mark.parametrize(
    "metric",
    [
        MetricValue("io_time", 0.0, "s", "lower"),
        MetricValue("change", -3.0, "1", "none"),
        MetricValue("loss", -1.0, "1", "lower"),
    ],
)
def test_a_figure_that_may_be_zero_or_negative_is_left_alone(metric: MetricValue) -> None:
    assert check(measurement(more=(metric,)), spec(), plan()) == []


COMMAND: dict[str, Any] = {
    "device_type": "none", "device_model": "", "devices": 0, "steps": 0, "samples": 0, "step_times_s": (),
    "data_kind": "none", "data_source": "none",
}  # fmt: skip


def test_a_command_has_neither_device_nor_steps() -> None:
    run = measurement(5.0, unit="items/s", **COMMAND)
    rules = {"rate": {"unit": "items/s", "better": "higher", "pattern": "x"}}
    assert check(run, spec(metrics=rules), plan(argv=("true",))) == []
    rules["rate"]["better"] = "lower"
    (failure,) = check(run, spec(metrics=rules), plan(argv=("true",)))
    assert failure.outcome == "metric_invalid"
    assert "asked for items/s (lower), found items/s (higher)" in failure.text


def test_another_runs_figures_are_not_looked_at() -> None:
    failures = check(measurement(-1.0, run_id="x"), spec(), plan())
    assert [failure.outcome for failure in failures] == ["foreign_result"]
