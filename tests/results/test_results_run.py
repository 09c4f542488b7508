from __future__ import annotations

import pytest

from pytest_mlhpc.errors import RunFailure
from pytest_mlhpc.judge.verdict import Judgement, MetricVerdict, Verdict
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.junit import properties
from pytest_mlhpc.results.outcome import Outcome
from pytest_mlhpc.results.run import Baseline, Run, explain
from pytest_mlhpc.results.schema import Measurement, Metric


def outcome(verdict: Verdict | None = Verdict.PASSED) -> Outcome:
    metric = Metric("rate", 3.0, "items/s", "higher")
    of = ("id", "n", 0, "command", "cpu", "a cpu", ("n1", "n2"), 1, 1, 0, 0, 1, 2)
    measurement = Measurement(*of, metrics=(metric,))
    judgement = None
    if verdict:
        judged = MetricVerdict("rate", 3.0, "items/s", "higher", 4.0, -0.25, 0.05, verdict, (3.1,))
        judgement = Judgement(verdict, (judged,), accept_command="accept it")
    return Outcome("t.py::t", "key", measurement, judgement, attempts=1, record_id="id")


def both(verdict: Verdict) -> tuple[Run, Baseline]:
    found = outcome(verdict)
    return Run(found), Baseline(found.judgement)


@pytest.mark.parametrize(
    ("verdict", "holds"),
    [
        *((good, True) for good in (Verdict.PASSED, Verdict.IMPROVED, Verdict.NEW, Verdict.INCONCLUSIVE)),
        *((bad, False) for bad in (Verdict.REGRESSED, Verdict.DRIFTED)),
    ],
)
def test_a_run_holds_its_baseline_unless_it_is_worse(verdict, holds):
    run, baseline = both(verdict)
    assert (run >= baseline) == holds


def test_a_run_that_was_not_judged_cannot_be_compared():
    with pytest.raises(RunFailure, match="not judged"):
        Run(outcome(None)) >= Baseline(Judgement(Verdict.UNJUDGED))  # noqa: B015 - the comparison is the test


def test_metrics_and_baselines_are_found_by_name():
    run, baseline = both(Verdict.PASSED)
    assert (run["rate"].value, baseline["rate"]) == (3.0, 4.0)
    for thing in (run, baseline):
        with pytest.raises(KeyError, match="did you mean 'rate'"):
            thing["rates"]


def test_a_broken_run_says_so_to_whoever_looks_at_it():
    broken = Run(Outcome("t", "k", failure=Failure("loss_nan", "step 3")))
    with pytest.raises(RunFailure, match="loss_nan"):
        broken["loss"]


def test_the_explanation_has_figures_reruns_and_the_accept_command():
    text = " ".join(explain(outcome(Verdict.REGRESSED).judgement))
    parts = ("the run has regressed", "rate: 3 items/s", "baseline 4", "-25.0 %", "re-runs 3.1", "accept it")
    assert [part for part in parts if part not in text] == []


def test_properties_are_plain_pairs():
    expected = {"metric.rate": "3.0 items/s", "nodes": "n1,n2", "verdict": "passed"}
    assert {(f"mlhpc.{name}", value) for name, value in expected.items()} <= set(properties(outcome()))
