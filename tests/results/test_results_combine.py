from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.results.combine import combine, io_time
from pytest_mlhpc.results.samples import MOST_SAMPLES, percentile, thin
from pytest_mlhpc.results.schema import Measurement, RankReport, from_json, to_json

SECONDS = st.floats(min_value=1e-6, max_value=1e4)
OPTIONAL = st.none() | SECONDS


def plan(**changes):
    run = RunPlan(
        run_id="run-1", nonce="n", attempt=2, workload="cosmoflow", parameters={}, nodes=1, ranks=2, cores_per_rank=1,
        device_type="cpu", launcher="plain", time_limit_s=60.0, steps=4, warmup_steps=2,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def report(rank=0, **changes):
    base = RankReport(
        rank=rank, local_rank=rank, host="n1", device_type="cpu", device_index=rank, device_model="EPYC",
        steps=4, samples=16, started_ns=100 + rank, ended_ns=900 + rank, epoch_s=8.0, wait_s=1.0, copy_s=1.0,
        warmup_s=3.0, step_times_s=(2.0, 2.0, 1.0, 3.0), losses=(4.0, 3.0, 2.0, 1.0),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def values(measurement):
    return {metric.name: metric.value for metric in measurement.metrics}


@st.composite
def ranks(draw):
    count = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 6))
    found = []
    for rank in range(count):
        parts = draw(st.tuples(*[st.floats(min_value=0, max_value=0.33)] * 3))
        epoch_s = draw(SECONDS)
        found.append(
            report(
                rank,
                host=draw(st.sampled_from(["n1", "n2"])),
                steps=steps,
                samples=draw(st.integers(1, 10_000)),
                epoch_s=epoch_s,
                wait_s=parts[0] * epoch_s,
                copy_s=parts[1] * epoch_s,
                first_batch_s=parts[2] * epoch_s,
                step_times_s=tuple(draw(st.lists(SECONDS, min_size=steps, max_size=steps))),
                losses=tuple(draw(st.lists(st.floats(-1e6, 1e6), min_size=steps, max_size=steps))),
                read_s=draw(OPTIONAL),
                forward_s=draw(OPTIONAL),
                backward_s=draw(OPTIONAL),
                exposed_communication_s=draw(OPTIONAL),
                arrival_s=draw(OPTIONAL),
                energy_j=draw(OPTIONAL),
                peak_flops_per_s=draw(OPTIONAL),
                train_flop_per_sample=draw(OPTIONAL),
                calibration_before=draw(OPTIONAL),
            )
        )
    return found


def test_throughput_is_all_ranks_samples_over_the_slowest_rank_s_time():
    measurement = combine(plan(), [report(0, epoch_s=8.0), report(1, epoch_s=10.0)])

    assert values(measurement)["effective_throughput"] == 32 / 10.0
    assert (measurement.samples, measurement.steps, measurement.ranks, measurement.devices) == (32, 4, 2, 2)
    assert (measurement.started_ns, measurement.ended_ns) == (100, 901)


def test_io_is_that_of_the_rank_that_waited_longest_for_data():
    waiting = report(1, wait_s=3.0, copy_s=0.5, first_batch_s=0.5)

    found = values(combine(plan(), [report(0), waiting]))

    assert found["io_time"] == 4.0
    assert found["compute_time"] == 4.0
    assert found["compute_fraction"] == 0.5
    assert found["compute_throughput"] == 8.0
    assert found["wait_time"] == 3.0


def test_a_copy_behind_computation_costs_no_io_time():
    found = values(combine(plan(), [report(copy_s=5.0, exposed_copy_s=0.25)]))

    assert found["io_time"] == 1.25
    assert found["copy_time"] == 5.0
    assert found["exposed_copy_time"] == 0.25


def test_a_step_lasts_as_long_as_on_its_slowest_rank():
    measurement = combine(plan(), [report(0), report(1, step_times_s=(1.0, 5.0, 2.0, 1.0))])

    assert measurement.step_times_s == (2.0, 5.0, 2.0, 3.0)
    assert values(measurement)["step_time"] == 2.5
    assert values(measurement)["step_time_max"] == 5.0


def test_communication_and_backward_are_those_of_the_rank_that_waited_least():
    first = report(
        0, forward_s=2.0, backward_s=8.0, optimizer_s=1.0, exposed_communication_s=4.0, arrival_s=0.0
    )
    late = report(
        1, forward_s=4.0, backward_s=6.0, optimizer_s=1.0, exposed_communication_s=1.0, arrival_s=0.5
    )

    found = values(combine(plan(), [first, late]))

    assert (found["forward_time"], found["backward_time"], found["optimizer_time"]) == (1.0, 1.5, 0.25)
    assert found["exposed_communication_time"] == 0.25
    assert found["rank_skew"] == 0.5


def test_a_single_rank_reports_no_communication():
    found = values(combine(plan(), [report(exposed_communication_s=4.0, arrival_s=0.1)]))

    assert "exposed_communication_time" not in found
    assert "rank_skew" not in found


def test_utilisation_needs_every_rank_s_peak():
    told = {"train_flop_per_sample": 1e9, "peak_flops_per_s": 1e10}

    known = values(combine(plan(), [report(0, **told), report(1, **told)]))
    unknown = values(combine(plan(), [report(0, **told), report(1, train_flop_per_sample=1e9)]))

    assert known["achieved_flops"] == 4e9
    assert known["model_flops_utilization"] == 0.2
    assert "model_flops_utilization" not in unknown


def test_energy_that_one_rank_cannot_tell_is_absent():
    both = values(combine(plan(), [report(0, energy_j=20.0), report(1, energy_j=12.0)]))
    one = values(combine(plan(), [report(0, energy_j=20.0), report(1)]))

    assert (both["energy"], both["energy_efficiency"]) == (32.0, 1.0)
    assert "energy" not in one
    assert "energy_efficiency" not in one


def test_tokens_are_counted_for_language_models_only():
    assert values(combine(plan(), [report(tokens_per_sample=128)]))["tokens_throughput"] == 256.0
    assert "tokens_throughput" not in values(combine(plan(), [report()]))


def test_loss_is_the_global_batch_s_with_the_first_and_last_of_the_run():
    loss = combine(plan(), [report(0), report(1, losses=(2.0, 1.0, 0.0, 0.0))]).metric("loss")

    assert loss.samples == (3.0, 2.0, 1.0, 0.5)
    assert (loss.first, loss.last, loss.value, loss.better) == (3.0, 0.5, 0.5, "none")


def test_mixed_hardware_matches_nothing_that_was_asked():
    mixed = combine(plan(), [report(0), report(1, device_type="cuda", device_model="H100")])

    assert mixed.device_type == "cpu+cuda"
    assert mixed.device_model == "EPYC+H100"


def test_two_ranks_on_one_device_count_it_once():
    shared = combine(plan(), [report(0, device_index=0), report(1, device_index=0)])

    assert (shared.ranks, shared.devices) == (2, 1)


def test_a_window_without_time_has_no_throughput():
    found = values(combine(plan(), [report(epoch_s=0.0, wait_s=0.0, copy_s=0.0)]))

    assert found["epoch_time"] == 0.0
    assert "effective_throughput" not in found
    assert "compute_throughput" not in found


def test_other_programs_cores_are_what_the_ranks_of_a_node_did_not_use():
    busy = {"busy_cores": 3.5, "own_cores": 1.0, "steal": 0.1}

    found = combine(
        plan(), [report(0, contention=busy), report(1, contention={**busy, "steal": 0.3})]
    ).contention

    assert found["other_cores"] == 1.5
    assert found["steal"] == 0.3


def test_calibration_is_the_slowest_rank_s():
    run = plan(calibrate=True)
    reports = [
        report(0, calibration_before=90.0, calibration_after=80.0),
        report(1, calibration_before=100.0),
    ]

    measurement = combine(run, reports)

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
    assert math.isclose(
        found["compute_time"] + found["io_time"], found["epoch_time"], rel_tol=1e-9, abs_tol=1e-12
    )
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


def test_steps_that_become_slower_show_as_a_trend():
    steady = values(combine(plan(), [report(step_times_s=(2.0, 2.0, 2.0))]))
    slowing = values(combine(plan(), [report(step_times_s=(1.0, 1.5, 2.0))]))

    assert steady["step_time_trend"] == 1.0
    assert slowing["step_time_trend"] == 2.0
