"""Metrics of operations that ranks timed: all ranks' amounts over the slowest rank's time, in each repetition."""

import dataclasses
import json

import pytest
from pods import run_plan
from worlds import SECOND, measurement, rank, spec

from pytest_mlhpc.judge.baseline_files import LOCAL_TOLERANCE, TOLERANCE, Entry
from pytest_mlhpc.judge.judge import make_entry
from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import (
    MetricValue,
    RankReport,
    Rate,
    SchemaError,
    TimedOperation,
    from_json,
    to_json,
)
from pytest_mlhpc.session import check_measurement


def storage_run(ranks: int = 2) -> RunPlan:
    """Return the plan of three repetitions of operations on storage."""
    fields = {
        "workload": "storage",
        "argv": (),
        "data_source": "none",
        "data_kind": "none",
        "warmup_steps": 1,
    }
    return run_plan("01890000-0000-7000-8000-000000000001", nonce="n", ranks=ranks, steps=3, **fields)


def report(number: int, *timed: TimedOperation, **changes) -> RankReport:
    fields = {"steps": 3, "samples": 3, "step_times_s": (1.0,) * 3, "losses": (), "data_source": "none",
              "data_kind": "none", "timed": timed}  # fmt: skip
    return rank(number, **{**fields, **changes})


def write(*seconds: float, amount: float = 100.0, **changes) -> TimedOperation:
    return TimedOperation("write", seconds, (Rate("write_bandwidth", "B/s", amount, **changes),))


#: Three repetitions of a second each.
WHOLE = write(1.0, 1.0, 1.0)


UNEVEN = report(0, write(1.0, 2.0, 4.0)), report(1, write(2.0, 1.0, 1.0))


def metrics(*reports: RankReport) -> dict[str, MetricValue]:
    return {metric.name: metric for metric in combine(storage_run(len(reports)), reports).metrics}


def test_amounts_of_ranks_add_up_and_the_slowest_rank_is_the_time():
    found = metrics(*UNEVEN)["write_bandwidth"]
    assert found.samples == (100.0, 100.0, 50.0)
    assert (found.value, found.first, found.last, found.better) == (100.0, 100.0, 50.0, "higher")


def test_the_slowest_of_several_ranks_alone_is_reported():
    found = metrics(*UNEVEN)["write_bandwidth_of_slowest_rank"]
    assert (found.value, found.samples) == (50.0, (50.0, 100.0))
    assert "write_bandwidth_of_slowest_rank" not in metrics(report(0, write(1.0, 2.0, 4.0)))


def test_an_amount_of_all_ranks_together_counts_once():
    found = metrics(*(report(one, write(1.0, 1.0, 2.0, together=True)) for one in range(2)))
    assert found["write_bandwidth"].value == 100.0
    assert "write_bandwidth_of_slowest_rank" not in found


def test_a_time_is_a_metric_where_it_is_asked_for():
    timed = TimedOperation("step", (3.0, 1.0, 2.0), times=("latency",), tolerance=0.3)
    found = metrics(report(0, timed))["latency"]
    assert (found.value, found.unit, found.better, found.tolerance) == (2.0, "s", "lower", 0.3)


def test_what_training_reports_is_not_made_up():
    assert set(metrics(report(0, write(1.0, 1.0, 1.0)))) == {"epoch_time", "write_bandwidth"}


@pytest.mark.parametrize(
    "other",
    [
        write(1.0, 1.0, 1.0, amount=50.0, together=True),
        TimedOperation("write", (1.0,) * 3),
        TimedOperation("write", (1.0,) * 3, (Rate("read_bandwidth", "B/s", 100.0, together=True),)),
        write(together=True),
        write(1.0, 0.0, 1.0, together=True),
    ],
    ids=["another amount", "no rate", "another metric", "no repetition", "no time"],
)
def test_ranks_that_disagree_make_no_metric(other):
    assert "write_bandwidth" not in metrics(report(0, write(1.0, 1.0, 1.0, together=True)), report(1, other))


def test_a_report_travels_as_json():
    sent = report(0, write(1.0, 2.0, 3.0, tolerance=0.2))
    assert from_json(RankReport, json.loads(json.dumps(to_json(sent)))) == sent


def test_a_time_that_is_no_number_is_refused_when_it_is_read():
    body = to_json(report(0, write(1.0, 2.0, 3.0)))
    body["timed"][0]["seconds"][1] = float("nan")
    with pytest.raises(SchemaError, match=r"timed\[0\].seconds\[1\]: nan is not a finite number"):
        from_json(RankReport, body)


def outcomes(*reports: RankReport) -> list[str]:
    made = combine(storage_run(), reports)
    wanted = dataclasses.replace(spec(("write_bandwidth",)), workload="storage", ranks=2, steps=3)
    return [f"{one.outcome}: {one.text}" for one in check_measurement.check(made, wanted, storage_run())]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([WHOLE], [WHOLE], []),
        ([WHOLE], [], ["metric_missing: write was not timed by all ranks that take part; missing: 1"]),
        ([dataclasses.replace(WHOLE, ranks=(0,))], [], []),
        ([write(1.0, 1.0)], [WHOLE], ["too_few_steps: rank 0 timed write 2 times, asked were 3"]),
        (
            [WHOLE],
            [write(1.0, -1.0, 1.0)],
            [
                "clock_backwards: rank 1: write took -1 s",
                "metric_missing: write_bandwidth was not reported; the run reported epoch_time",
            ],
        ),
        (
            [WHOLE],
            [write(1.0, 1.0, 1.0, amount=0.0)],
            [
                "metric_invalid: rank 1: write_bandwidth of an amount of 0",
                "metric_invalid: write_bandwidth_of_slowest_rank is 0.0 B/s; only a positive figure makes sense",
            ],
        ),
        ([WHOLE, WHOLE], [WHOLE], ["duplicate_result: rank 0 timed write twice"]),
    ],
    ids=[
        "a whole one",
        "one that a rank did not time",
        "one of some ranks needs just those",
        "too few repetitions",
        "one that took no time",
        "one of nothing",
        "one that was timed twice",
    ],
)
def test_an_operation_that_was_not_measured_as_asked_fails_the_run(first, second, expected):
    assert outcomes(report(0, *first), report(1, *second)) == expected


def accepted(noise: float | None, old: Entry | None = None, *, local: bool = False) -> Entry:
    """Return the baseline of a metric that is so noisy."""
    noisy = measurement(
        metrics=(MetricValue("rate", 10.0, "B/s", "higher", tolerance=noise),), started_ns=SECOND
    )
    said = {"accepted_by": "me", "reason": "first", "date": "2026-01-01", "definition": "storage nodes=1"}
    return make_entry("rate", [noisy], old, local=local, **said)


@pytest.mark.parametrize(("own", "expected"), [(None, TOLERANCE), (0.01, TOLERANCE), (0.3, 0.3)])
def test_a_new_baseline_is_as_wide_as_the_metric_is_noisy(own, expected):
    assert accepted(own).tolerance == expected


def test_a_chosen_tolerance_is_used():
    old = accepted(0.3, local=True)
    assert old.tolerance == 0.3 > LOCAL_TOLERANCE
    assert accepted(0.3, dataclasses.replace(old, tolerance=0.02), local=True).tolerance == 0.02


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -0.1])
def test_a_tolerance_is_a_share(tolerance):
    with pytest.raises(SchemaError, match="not between 0 and 1"):
        MetricValue("rate", 1.0, "B/s", "higher", tolerance=tolerance)
