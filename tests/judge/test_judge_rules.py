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


NOISY = (97.0, 103.0, 97.0, 103.0, 100.0, 100.0, 98.0, 102.0)


def judged(
    *attempts: Any,
    history: tuple[float, ...] = (),
    baseline: Any = None,
    book: Any = None,
    of: Any = None,
    **more: Any,
) -> Judgement:
    """Judge attempts, which are measurements or figures of one, against an entry of 100 that tolerates 5 %."""
    runs = [measurement(one) if isinstance(one, float) else one for one in attempts]
    entries = {"rate": baseline or entry()} if book is None else book
    settings = {"local": False, "update": False, "reruns_allowed": 4, "in_ci": False, **more}
    return judge(runs, of or spec(), entries, {"rate": history}, **settings)


def outcome_of(judgement: Judgement) -> str:
    """Return the outcome of the failure, if there is one."""
    failure = failure_of(judgement)
    return failure.outcome if failure else ""


@pytest.mark.parametrize(
    ("values", "options", "verdict", "reruns"),
    [
        ([95.5], {}, Verdict.PASSED, 0),
        ([94.0], {}, Verdict.INCONCLUSIVE, 2),
        ([98.4], {"history": QUIET[:7]}, Verdict.PASSED, 0),
        ([98.4], {"history": QUIET}, Verdict.INCONCLUSIVE, 2),
        ([94.0], {"history": NOISY}, Verdict.PASSED, 0),
        ([98.0], {"history": (*QUIET, 98.4, 98.4), "baseline": entry(tolerance=0.03)}, Verdict.INCONCLUSIVE, 2),
        ([98.6], {"history": (*QUIET, 98.6, 98.6)}, Verdict.PASSED, 0),
        ([80.0], {"reruns_broken": 2}, Verdict.INCONCLUSIVE, 2),
        ([80.0], {"reruns_allowed": 1}, Verdict.INCONCLUSIVE, 1),
        ([90.0, 90.0, 99.9, 90.0, 90.0], {}, Verdict.REGRESSED, 0),
        ([90.0, 99.0, 99.0], {}, Verdict.PASSED, 0),
        ([80.0], {"reruns_allowed": 0}, Verdict.REGRESSED, 0),
        ([120.0], {}, Verdict.IMPROVED, 0),
        ([96.5], {"history": (96.5, 95.8, 97.2) * 4}, Verdict.DRIFTED, 0),
    ],
    ids=[
        "inside the entry's tolerance it passes",
        "beyond the tolerance two re-runs are asked for first",
        "seven quiet records are too few to narrow the fence",
        "eight quiet records narrow the fence to one and a half percent",
        "a noisy history widens the fence",
        "three slightly slow nights open the gate though each is inside",
        "three slightly slow nights that are near enough do not",
        "re-runs that broke are made again",
        "only the re-runs that are left are asked for",
        "drops of three of four re-runs make a regression",
        "two re-runs inside end the matter",
        "without re-runs a single bad number still fails",
        "a better value passes",
        "a trailing median three percent down is a drift, which needs no re-runs",
    ],
)  # fmt: skip
def test_a_figure_is_judged(
    values: list[float], options: dict[str, Any], verdict: Verdict, reruns: int
) -> None:
    judgement = judged(*values, **options)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)


def test_a_noisy_history_widens_the_fence_to_three_robust_sigma() -> None:
    assert judged(94.0, history=NOISY).metrics[0].width == pytest.approx(3 * 1.4826 * 0.025, rel=1e-6)


def test_re_runs_are_kept_in_order_and_those_inside_explain_that_they_did_not_confirm() -> None:
    assert judged(90.0, 90.0, 99.9, 90.0, 90.0).metrics[0].reruns == (90.0, 99.9, 90.0, 90.0)
    assert "did not confirm" in judged(90.0, 99.0, 99.0).explanation[1]


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
    assert (failure.outcome, failure.infrastructure) == ("regressed", False)


def test_a_better_value_passes_and_names_the_accept_command() -> None:
    judgement = judged(120.0)
    assert judgement.verdict is Verdict.IMPROVED
    assert judgement.accept_command
    assert failure_of(judgement) is None


@pytest.mark.parametrize(
    ("judgement", "outcome", "infrastructure", "text"),
    [
        (judged(96.5, history=(96.5, 95.8, 97.2) * 4), "drifted", False, "median of the last 13 runs is 3.5% worse"),
        (judged(80.0, reruns_allowed=0), "regressed", False, "no re-runs were to be had"),
        (judged(80.0, 80.0, reruns_allowed=0), "reruns_incomplete", True, ""),
        (judged(80.0, reruns_broken=6, reruns_allowed=12), "reruns_incomplete", True, "0 of 6 ended well"),
        (judged(100.0, baseline=entry(unit="items/s"), local=True), "no_baseline", False, "items/s"),
        (judged(100.0, of=spec(("other",)), book={"other": entry()}, local=True, reruns_allowed=0), "metric_missing", False, ""),
    ],
    ids=["a drift", "a bad number alone", "too few re-runs", "re-runs that keep breaking", "another unit", "not reported"],
)  # fmt: skip
def test_a_failure_has_a_name_and_a_text(
    judgement: Judgement, outcome: str, infrastructure: bool, text: str
) -> None:
    failure = failure_of(judgement)
    assert failure is not None
    assert judgement.reruns_wanted == 0
    assert (failure.outcome, failure.infrastructure) == (outcome, infrastructure)
    assert text in failure.text


@pytest.mark.parametrize(
    ("local", "in_ci", "outcome"),
    [(False, False, "no_baseline"), (True, True, "no_baseline"), (True, False, "")],
)
def test_a_missing_baseline_fails_except_on_the_first_run_on_local(
    local: bool, in_ci: bool, outcome: str
) -> None:
    judgement = judged(100.0, book={}, local=local, in_ci=in_ci)
    assert outcome_of(judgement) == outcome
    assert (judgement.verdict is Verdict.NEW) is (not outcome)


def test_a_first_baseline_that_was_taken_on_a_busy_machine_says_so() -> None:
    judgement = judged(measurement(contention={"steal": 0.3}), book={}, local=True)
    assert judgement.verdict is Verdict.NEW
    assert "it may be too low, the machine was busy" in judgement.metrics[0].reason


def test_a_figure_that_is_not_a_number_never_passes() -> None:
    broken = Metric("rate", 1.0, "samples/s", "higher")
    vars(broken)["value"] = float("nan")
    run = measurement()
    vars(run)["metrics"] = (broken,)
    assert outcome_of(judged(run, local=True, update=True, reruns_allowed=0)) == "metric_invalid"


def local_run(value: float, rate: float, **changes: Any) -> Any:
    return measurement(value, calibration_before=rate, calibration_after=rate, **changes)


def judge_local(*attempts: Any) -> Judgement:
    return judged(*attempts, baseline=entry(tolerance=0.10, calibration=50.0), local=True)


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
    put = entries_to_put([measurement(80.0)], outside, {"rate": entry(epoch=3, tolerance=0.07)}, **arguments)[
        "rate"
    ]
    assert (put.value, put.epoch, put.tolerance, put.date) == (80.0, 4, 0.07, "1970-01-01T00:00:00Z")


def phased(value: float, io: float, compute: float, **changes: Any) -> Any:
    more = (Metric("io_time", io, "s", "lower"), Metric("compute_time", compute, "s", "lower"))
    return measurement(value, more=more, **changes)


def test_the_explanation_says_that_input_is_what_grew() -> None:
    good = record(measurement=phased(100.0, 0.1, 0.9, environment={"torch": "2.12"}), commit="abc")
    now = phased(80.0, 0.35, 0.9, environment={"torch": "2.13"}, nodes=("n7",))
    judgement = judged(now, reruns_allowed=0, last_good=good, commit="abc")
    text = "\n".join(judgement.explanation)
    assert "I/O is what grew: per step I/O +25 ms, compute +0 ms, of 100 ms before" in text
    assert "nodes: n7; last good run on n1" in text
    assert "torch 2.12 -> 2.13" in text


def test_same_commit_and_same_environment_blame_the_system() -> None:
    good = record(measurement=measurement(environment={"image": "sha256:1"}), commit="abc")
    now = measurement(80.0, environment={"image": "sha256:1"})
    judgement = judged(now, reruns_allowed=0, last_good=good, commit="abc")
    assert "Suspect the system, not the code" in judgement.explanation[-1]


def test_a_changed_checkout_is_no_reason_to_blame_the_system() -> None:
    good = record(measurement=measurement(environment={"host": "n1", "commit_changed": "no"}), commit="abc")
    now = measurement(80.0, environment={"host": "n2", "commit_changed": "yes"})
    judgement = judged(now, reruns_allowed=0, last_good=good, commit="abc")
    assert judgement.explanation[-1] == "  perhaps the code: the checkout has changes that are not committed"


def test_another_node_and_another_commit_are_the_same_software() -> None:
    one = environment_digest({"torch": "2.13", "host": "n1", "commit": "abc"})
    assert one == environment_digest({"torch": "2.13", "host": "n2", "commit": "def"})
    assert one != environment_digest({"torch": "2.12", "host": "n1", "commit": "abc"})


def test_a_test_that_judges_nothing_is_unjudged_and_fails_nothing() -> None:
    judgement = judged(100.0, of=spec(()), book={}, in_ci=True)
    assert judgement.verdict is Verdict.UNJUDGED
    assert failure_of(judgement) is None
