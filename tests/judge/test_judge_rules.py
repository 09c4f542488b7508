"""The judge, rule by rule: gate, quorum, drift, machine, missing things."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import entry, measurement, record, spec

from pytest_mlhpc.judge.entry import environment_digest
from pytest_mlhpc.judge.judge import entries_to_put, failure_of, judge
from pytest_mlhpc.judge.verdict import Judgement, Verdict
from pytest_mlhpc.results.schema import Metric

QUIET = (100.0, 100.4, 99.6, 100.2, 99.8, 100.1, 99.9, 100.0)


def judged(
    *values: float, history: tuple[float, ...] = (), baseline: Any = None, local: bool = False, **more: Any
) -> Judgement:
    settings = {"update": False, "reruns_allowed": 4, "in_ci": False, **more}
    attempts = [measurement(value) for value in values]
    book = {"rate": baseline if baseline is not None else entry()}
    return judge(attempts, spec(), book, {"rate": history}, local=local, **settings)


def test_a_value_inside_the_entrys_tolerance_passes() -> None:
    assert judged(95.5).verdict is Verdict.PASSED


def test_a_value_beyond_the_tolerance_asks_for_two_re_runs_first() -> None:
    judgement = judged(94.0)
    assert judgement.reruns_wanted == 2
    assert judgement.verdict is Verdict.INCONCLUSIVE


def test_eight_quiet_records_narrow_the_fence_to_one_and_a_half_percent() -> None:
    assert judged(98.4, history=QUIET[:7]).reruns_wanted == 0
    assert judged(98.4, history=QUIET).reruns_wanted == 2


def test_a_noisy_history_widens_the_fence_to_three_robust_sigma() -> None:
    noisy = (97.0, 103.0, 97.0, 103.0, 100.0, 100.0, 98.0, 102.0)
    metric = judged(94.0, history=noisy).metrics[0]
    assert metric.width == pytest.approx(3 * 1.4826 * 0.025, rel=1e-6)
    assert metric.verdict is Verdict.PASSED


def test_three_slightly_slow_nights_open_the_gate_though_each_is_inside() -> None:
    assert judged(98.0, history=(*QUIET, 98.4, 98.4), baseline=entry(tolerance=0.03)).reruns_wanted == 2
    assert judged(98.6, history=(*QUIET, 98.6, 98.6)).verdict is Verdict.PASSED


def test_drops_of_three_of_four_re_runs_make_a_regression() -> None:
    judgement = judged(90.0, 90.0, 99.9, 90.0, 90.0)
    assert judgement.verdict is Verdict.REGRESSED
    assert judgement.metrics[0].reruns == (90.0, 99.9, 90.0, 90.0)


def test_two_re_runs_inside_end_the_matter() -> None:
    judgement = judged(90.0, 99.0, 99.0)
    assert judgement.verdict is Verdict.PASSED
    assert "did not confirm" in judgement.explanation[1]


def test_a_regression_names_metric_distance_re_runs_and_the_accept_command() -> None:
    judgement = judged(85.0, 85.1, 84.9, 85.2)
    text = "\n".join(judgement.explanation)
    assert "rate: 85 samples/s, baseline 100 samples/s: 15.0% worse, the fence is 5.0%: regressed" in text
    assert "re-runs: 85.1, 84.9, 85.2 samples/s" in text
    assert judgement.accept_command.startswith(
        "mlhpc baseline accept 'suites/test_a.py::test_a[cirrus:standard]'"
    )
    failure = failure_of(judgement)
    assert failure is not None
    assert failure.outcome == "regressed"
    assert not failure.infrastructure


def test_a_better_value_passes_and_names_the_accept_command() -> None:
    judgement = judged(120.0)
    assert judgement.verdict is Verdict.IMPROVED
    assert judgement.accept_command
    assert failure_of(judgement) is None


def test_a_trailing_median_three_percent_down_is_a_drift_and_fails() -> None:
    judgement = judged(96.5, history=(96.5, 95.8, 97.2) * 4)
    assert judgement.reruns_wanted == 0  # a median of many nights needs none
    assert judgement.verdict is Verdict.DRIFTED
    failure = failure_of(judgement)
    assert failure is not None
    assert failure.outcome == "drifted"
    assert "median of the last 13 runs is 3.5% worse" in failure.text


def test_without_re_runs_a_single_bad_number_still_fails_and_says_so() -> None:
    judgement = judged(80.0, reruns_allowed=0)
    assert judgement.verdict is Verdict.REGRESSED
    assert "no re-runs were to be had" in judgement.metrics[0].reason


def test_too_few_ended_re_runs_are_infrastructure_trouble() -> None:
    failure = failure_of(judged(80.0, 80.0, reruns_allowed=0))
    assert failure is not None
    assert failure.outcome == "reruns_incomplete"
    assert failure.infrastructure


def test_re_runs_that_keep_breaking_come_to_an_end() -> None:
    assert judged(80.0, reruns_broken=2).reruns_wanted == 2
    judgement = judged(80.0, reruns_broken=6, reruns_allowed=12)
    assert judgement.reruns_wanted == 0
    failure = failure_of(judgement)
    assert failure is not None
    assert failure.outcome == "reruns_incomplete"
    assert "0 of 6 ended well" in failure.text


def test_only_the_re_runs_that_are_left_are_asked_for() -> None:
    assert judged(80.0, reruns_allowed=1).reruns_wanted == 1


def test_a_missing_baseline_fails_except_on_the_first_run_on_local() -> None:
    attempts = [measurement()]
    for local, in_ci, expected in (
        (False, False, "no_baseline"),
        (True, True, "no_baseline"),
        (True, False, None),
    ):
        judgement = judge(attempts, spec(), {}, {}, local=local, update=False, reruns_allowed=4, in_ci=in_ci)
        failure = failure_of(judgement)
        assert (failure.outcome if failure else None) == expected
    assert judgement.verdict is Verdict.NEW


def test_a_first_baseline_that_was_taken_on_a_busy_machine_says_so() -> None:
    run = measurement(contention={"steal": 0.3})
    judgement = judge([run], spec(), {}, {}, local=True, update=False, reruns_allowed=4, in_ci=False)
    assert judgement.verdict is Verdict.NEW
    assert "it may be too low, the machine was busy" in judgement.metrics[0].reason


def test_a_judged_metric_that_was_not_reported_never_passes() -> None:
    judgement = judge(
        [measurement()],
        spec(("other",)),
        {"other": entry()},
        {},
        local=True,
        update=False,
        reruns_allowed=0,
        in_ci=False,
    )
    failure = failure_of(judgement)
    assert failure is not None
    assert failure.outcome == "metric_missing"


def test_a_figure_that_is_not_a_number_never_passes() -> None:
    broken = Metric("rate", 1.0, "samples/s", "higher")
    object.__setattr__(broken, "value", float("nan"))
    run = measurement()
    object.__setattr__(run, "metrics", (broken,))
    judgement = judge(
        [run], spec(), {"rate": entry()}, {}, local=True, update=True, reruns_allowed=0, in_ci=False
    )
    failure = failure_of(judgement)
    assert failure is not None
    assert failure.outcome == "metric_invalid"


def test_a_baseline_in_another_unit_is_no_baseline() -> None:
    failure = failure_of(judged(100.0, baseline=entry(unit="items/s"), local=True))
    assert failure is not None
    assert failure.outcome == "no_baseline"
    assert "items/s" in failure.text


def local_run(value: float, rate: float, **changes: Any) -> Any:
    return measurement(value, calibration_before=rate, calibration_after=rate, **changes)


def judge_local(*attempts: Any, **changes: Any) -> Judgement:
    book = {"rate": entry(tolerance=0.10, calibration=50.0)}
    return judge(
        attempts, spec(), book, {}, local=True, update=False, reruns_allowed=4, in_ci=False, **changes
    )


def test_a_machine_that_is_slower_by_as_much_makes_it_inconclusive() -> None:
    judgement = judge_local(local_run(80.0, 40.0))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.reruns_wanted == 0
    assert "this machine is 20.0% slower today" in "\n".join(judgement.explanation)
    assert failure_of(judgement) is None


def test_a_code_that_is_slower_than_the_machine_explains_is_still_found() -> None:
    judgement = judge_local(local_run(60.0, 40.0))
    assert judgement.reruns_wanted == 2
    runs = [local_run(60.0, 40.0)] * 4
    assert judge_local(*runs).verdict is Verdict.REGRESSED


def test_a_faster_machine_excuses_no_improvement() -> None:
    assert judge_local(local_run(120.0, 60.0)).verdict is Verdict.PASSED
    assert judge_local(local_run(120.0, 50.0)).verdict is Verdict.IMPROVED


def test_a_gate_opened_on_a_busy_machine_is_inconclusive() -> None:
    judgement = judge_local(local_run(60.0, 50.0, contention={"steal": 0.3}))
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "the hypervisor gave 30.0%" in judgement.metrics[0].reason


def test_other_programs_beside_the_run_make_it_busy() -> None:
    judgement = judge_local(local_run(60.0, 50.0, contention={"busy_cores": 2.0, "other_cores": 0.5}))
    assert "other programs used 0.5 cores beside the run's 1.5" in judgement.metrics[0].reason
    quiet = local_run(60.0, 50.0, contention={"busy_cores": 2.0, "other_cores": 0.1, "load1_before": 9.0})
    assert judge_local(quiet).reruns_wanted == 2


def test_slow_re_runs_on_a_busy_machine_confirm_nothing() -> None:
    stolen = local_run(60.0, 50.0, contention={"steal": 0.3})
    judgement = judge_local(local_run(60.0, 50.0), stolen, stolen, stolen, stolen)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert "busy during 4 of 4 re-runs" in judgement.metrics[0].reason


def test_accepting_by_update_touches_only_what_lies_outside() -> None:
    inside, outside = judged(99.0, update=True), judged(80.0, update=True)
    assert inside.verdict is Verdict.PASSED
    assert outside.verdict is Verdict.NEW
    arguments: dict[str, Any] = {"local": False, "accepted_by": "me", "reason": "why", "now_ns": 0}
    assert entries_to_put([measurement(99.0)], inside, {"rate": entry()}, **arguments) == {}
    put = entries_to_put([measurement(80.0)], outside, {"rate": entry(epoch=3, tolerance=0.07)}, **arguments)
    assert put["rate"].value == 80.0
    assert put["rate"].epoch == 4
    assert put["rate"].tolerance == 0.07
    assert put["rate"].date == "1970-01-01T00:00:00Z"


def phased(value: float, io: float, compute: float, **changes: Any) -> Any:
    more = (Metric("io_time", io, "s", "lower"), Metric("compute_time", compute, "s", "lower"))
    return measurement(value, more=more, **changes)


def test_the_explanation_says_that_input_is_what_grew() -> None:
    good = record(measurement=phased(100.0, 0.1, 0.9, environment={"torch": "2.12"}), commit="abc")
    now = phased(80.0, 0.35, 0.9, environment={"torch": "2.13"}, nodes=("n7",))
    judgement = judge(
        [now], spec(), {"rate": entry()}, {}, local=False, update=False, reruns_allowed=0, in_ci=False,
        last_good=good, commit="abc",
    )  # fmt: skip
    text = "\n".join(judgement.explanation)
    assert "I/O is what grew: per step I/O +25 ms, compute +0 ms, of 100 ms before" in text
    assert "nodes: n7; last good run on n1" in text
    assert "torch 2.12 -> 2.13" in text


def test_same_commit_and_same_environment_blame_the_system() -> None:
    good = record(measurement=measurement(environment={"image": "sha256:1"}), commit="abc")
    now = measurement(80.0, environment={"image": "sha256:1"})
    judgement = judge(
        [now], spec(), {"rate": entry()}, {}, local=False, update=False, reruns_allowed=0, in_ci=False,
        last_good=good, commit="abc",
    )  # fmt: skip
    assert "Suspect the system, not the code" in judgement.explanation[-1]


def test_a_changed_checkout_is_no_reason_to_blame_the_system() -> None:
    good = record(measurement=measurement(environment={"host": "n1", "commit_changed": "no"}), commit="abc")
    now = measurement(80.0, environment={"host": "n2", "commit_changed": "yes"})
    judgement = judge(
        [now], spec(), {"rate": entry()}, {}, local=False, update=False, reruns_allowed=0, in_ci=False,
        last_good=good, commit="abc",
    )  # fmt: skip
    assert judgement.explanation[-1] == "  perhaps the code: the checkout has changes that are not committed"


def test_another_node_and_another_commit_are_the_same_software() -> None:
    one = environment_digest({"torch": "2.13", "host": "n1", "commit": "abc"})
    assert one == environment_digest({"torch": "2.13", "host": "n2", "commit": "def"})
    assert one != environment_digest({"torch": "2.12", "host": "n1", "commit": "abc"})


def test_a_test_that_judges_nothing_is_unjudged_and_fails_nothing() -> None:
    judgement = judge(
        [measurement()], spec(()), {}, {}, local=False, update=False, reruns_allowed=4, in_ci=True
    )
    assert judgement.verdict is Verdict.UNJUDGED
    assert failure_of(judgement) is None
