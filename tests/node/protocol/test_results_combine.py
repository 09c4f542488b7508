"""One measurement of the reports of all ranks: which rank's figure counts, and what is absent where one cannot tell."""

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pods import run_plan

from pytest_mlhpc.node.protocol.combine import combine, io_time
from pytest_mlhpc.node.protocol.schema import (
    MOST_SAMPLES,
    Measurement,
    RankReport,
    from_json,
    percentile,
    thin,
    to_json,
)

SECONDS = st.floats(min_value=1e-6, max_value=1e4)
OPTIONAL = st.none() | SECONDS


def plan(**changes):
    return run_plan(
        "run-1", workload="cosmoflow", argv=(), ranks=2, attempt=2, steps=4, warmup_steps=2, **changes
    )


def report(rank=0, **changes):
    base = RankReport(
        rank=rank, local_rank=rank, host="n1", device_type="cpu", device_index=rank, device_model="EPYC",
        steps=4, samples=16, started_ns=100 + rank, ended_ns=900 + rank, epoch_s=8.0, wait_s=1.0, copy_s=1.0,
        warmup_s=3.0, step_times_s=(2.0, 2.0, 1.0, 3.0), losses=(4.0, 3.0, 2.0, 1.0),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def values(measurement):
    return {metric.name: metric.value for metric in measurement.metrics}


#: What a rank may tell, or not.
OPTIONAL_FIELDS = (
    "read_s", "forward_s", "backward_s", "exposed_communication_s", "arrival_s", "energy_j", "peak_flops_per_s",
    "train_flop_per_sample", "calibration_before",
)  # fmt: skip


@st.composite
def ranks(draw):
    steps = draw(st.integers(1, 6))
    found = []
    for rank in range(draw(st.integers(1, 4))):
        wait, copy, first = draw(st.tuples(*[st.floats(min_value=0, max_value=0.33)] * 3))
        epoch_s = draw(SECONDS)
        each = {
            "host": draw(st.sampled_from(["n1", "n2"])),
            "samples": draw(st.integers(1, 10_000)),
            "step_times_s": tuple(draw(st.lists(SECONDS, min_size=steps, max_size=steps))),
            "losses": tuple(draw(st.lists(st.floats(-1e6, 1e6), min_size=steps, max_size=steps))),
            **{name: draw(OPTIONAL) for name in OPTIONAL_FIELDS},
        }
        waits = {"wait_s": wait * epoch_s, "copy_s": copy * epoch_s, "first_batch_s": first * epoch_s}
        found.append(report(rank, steps=steps, epoch_s=epoch_s, **waits, **each))
    return found


TOLD = {"train_flop_per_sample": 1e9, "peak_flops_per_s": 1e10}


@pytest.mark.parametrize(
    ("reports", "metrics", "absent"),
    [
        ([report(0, epoch_s=8.0), report(1, epoch_s=10.0)], {"effective_throughput": 32 / 10.0}, []),
        (
            [report(0), report(1, wait_s=3.0, copy_s=0.5, first_batch_s=0.5)],
            {"io_time": 4.0, "compute_time": 4.0, "compute_fraction": 0.5, "compute_throughput": 8.0, "wait_time": 3.0},
            [],
        ),
        ([report(copy_s=5.0, exposed_copy_s=0.25)], {"io_time": 1.25, "copy_time": 5.0, "exposed_copy_time": 0.25}, []),
        ([report(0), report(1, step_times_s=(1.0, 5.0, 2.0, 1.0))], {"step_time": 2.5, "step_time_max": 5.0}, []),
        (
            [
                report(0, forward_s=2.0, backward_s=8.0, optimizer_s=1.0, exposed_communication_s=4.0, arrival_s=0.0),
                report(1, forward_s=4.0, backward_s=6.0, optimizer_s=1.0, exposed_communication_s=1.0, arrival_s=0.5),
            ],
            {"forward_time": 1.0, "backward_time": 1.5, "optimizer_time": 0.25, "exposed_communication_time": 0.25, "rank_skew": 0.5},
            [],
        ),
        ([report(exposed_communication_s=4.0, arrival_s=0.1)], {}, ["exposed_communication_time", "rank_skew"]),
        ([report(0, **TOLD), report(1, **TOLD)], {"achieved_flops": 4e9, "model_flops_utilization": 0.2}, []),
        ([report(0, **TOLD), report(1, train_flop_per_sample=1e9)], {}, ["model_flops_utilization"]),
        ([report(0, energy_j=20.0), report(1, energy_j=12.0)], {"energy": 32.0, "energy_efficiency": 1.0}, []),
        ([report(0, energy_j=20.0), report(1)], {}, ["energy", "energy_efficiency"]),
        ([report(tokens_per_sample=128)], {"tokens_throughput": 256.0}, []),
        ([report()], {}, ["tokens_throughput"]),
        (
            [report(epoch_s=0.0, wait_s=0.0, copy_s=0.0)],
            {"epoch_time": 0.0},
            ["effective_throughput", "compute_throughput"],
        ),
        ([report(step_times_s=(2.0, 2.0, 2.0))], {"step_time_trend": 1.0}, []),
        ([report(step_times_s=(1.0, 1.5, 2.0))], {"step_time_trend": 2.0}, []),
    ],
    ids=[
        "throughput is all ranks' samples over the slowest rank's time",
        "I/O is that of the rank that waited longest for data",
        "a copy behind computation costs no I/O time",
        "a step lasts as long as on its slowest rank",
        "communication and backward are those of the rank that waited least",
        "a single rank reports no communication",
        "utilisation is told by every rank's peak",
        "utilisation needs every rank's peak",
        "energy is that of all ranks",
        "energy that one rank cannot tell is absent",
        "tokens are counted for language models",
        "tokens are counted for language models only",
        "a window without time has no throughput",
        "steady steps have no trend",
        "steps that become slower show as a trend",
    ],
)  # fmt: skip
def test_ranks_make_metrics(reports, metrics, absent):
    found = values(combine(plan(), reports))
    assert {name: found.get(name) for name in metrics} == metrics
    assert not [name for name in absent if name in found]


@pytest.mark.parametrize(
    ("second", "fields"),
    [
        (
            {"step_times_s": (1.0, 5.0, 2.0, 1.0)},
            {"samples": 32, "steps": 4, "ranks": 2, "devices": 2, "step_times_s": (2.0, 5.0, 2.0, 3.0)},
        ),
        ({}, {"started_ns": 100, "ended_ns": 901}),
        (
            {"device_type": "cuda", "device_model": "H100"},
            {"device_type": "cpu+cuda", "device_model": "EPYC+H100"},
        ),
        ({"device_index": 0}, {"ranks": 2, "devices": 1}),
    ],
    ids=[
        "work is all ranks'",
        "it lasts from the first to the last",
        "hardware is mixed",
        "a device counts once",
    ],
)
def test_a_measurement_says_what_all_ranks_did(second, fields):
    found = combine(plan(), [report(0), report(1, **second)])
    assert {name: getattr(found, name) for name in fields} == fields


def test_loss_is_the_global_batch_s_with_the_first_and_last_of_the_run():
    loss = combine(plan(), [report(0), report(1, losses=(2.0, 1.0, 0.0, 0.0))]).metric("loss")

    assert loss.samples == (3.0, 2.0, 1.0, 0.5)
    assert (loss.first, loss.last, loss.value, loss.better) == (3.0, 0.5, 0.5, "none")


def test_other_programs_cores_are_what_the_ranks_of_a_node_did_not_use():
    busy = {"busy_cores": 3.5, "own_cores": 1.0, "steal": 0.1}
    reports = [report(0, contention=busy), report(1, contention={**busy, "steal": 0.3})]
    assert combine(plan(), reports).contention.items() >= {("other_cores", 1.5), ("steal", 0.3)}


def test_calibration_is_the_slowest_rank_s():
    first = report(0, calibration_before=90.0, calibration_after=80.0)
    measurement = combine(plan(calibrate=True), [first, report(1, calibration_before=100.0)])
    assert (measurement.calibration_before, measurement.calibration_after) == (90.0, 80.0)
    assert values(measurement)["calibration_rate"] == 90.0


@pytest.mark.parametrize("reports", [[], [report(0), report(0)]])
def test_no_report_or_two_of_one_rank_cannot_be_combined(reports):
    with pytest.raises(ValueError, match="run run-1: reports of ranks"):
        combine(plan(), reports)


@given(ranks())
def test_the_four_terms_always_fit_together(reports):
    measurement = combine(plan(), reports)
    found = values(measurement)

    assert measurement.ranks == len(reports)
    assert measurement.samples == sum(one.samples for one in reports)
    assert found["epoch_time"] == max(one.epoch_s for one in reports)
    assert found["io_time"] == max(map(io_time, reports))
    both = found["compute_time"] + found["io_time"]
    assert math.isclose(both, found["epoch_time"], rel_tol=1e-9, abs_tol=1e-12)
    assert 0 <= found["compute_fraction"] <= 1
    assert found["compute_throughput"] >= found["effective_throughput"]
    assert found["step_time"] <= found["step_time_p95"] * (1 + 1e-12) <= found["step_time_max"] * (1 + 2e-12)


@given(ranks(), st.randoms())
def test_the_order_in_which_ranks_report_changes_nothing(reports, random):
    shuffled = list(reports)
    random.shuffle(shuffled)

    assert combine(plan(calibrate=True), shuffled) == combine(plan(calibrate=True), reports)


@given(ranks())
def test_a_measurement_survives_its_json_form(reports):
    measurement = combine(plan(), reports)

    assert from_json(Measurement, to_json(measurement)) == measurement


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.integers(2, 10))
def test_thinned_samples_keep_order_ends_and_limit(samples, most):
    kept = thin(samples, most)

    assert len(kept) == min(len(samples), most)
    assert (kept[0], kept[-1]) == (samples[0], samples[-1])
    places = iter(samples)
    assert all(value in places for value in kept)


def test_no_metric_carries_more_samples_than_the_schema_allows():
    loss = combine(plan(), [report(losses=tuple(map(float, range(10_000))))]).metric("loss")

    assert len(loss.samples) == MOST_SAMPLES
    assert (loss.samples[0], loss.samples[-1]) == (0.0, 9999.0)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_percentiles_run_from_the_least_to_the_largest(samples):
    assert percentile(samples, 0.0) == min(samples)
    assert percentile(samples, 1.0) == max(samples)
    assert percentile(samples, 0.5) == pytest.approx(statistics.median(samples), rel=1e-9, abs=1e-6)
