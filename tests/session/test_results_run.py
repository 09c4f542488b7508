import re
from dataclasses import replace

import pytest

from pytest_mlhpc.errors import RunFailure
from pytest_mlhpc.jobs.job import Outcome
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.session.run import Baseline, Run, explain
from pytest_mlhpc.session.runtest import properties
from pytest_mlhpc.store.record import Failure, Judgement, MetricVerdict, Verdict


def outcome(verdict: Verdict | None = Verdict.PASSED) -> Outcome:
    metric = MetricValue("rate", 3.0, "items/s", "higher")
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


def test_a_metric_is_compared_with_numbers_and_metrics_of_its_unit():
    rate, other = Run(outcome())["rate"], Run(outcome())["rate"]
    assert rate > 2
    assert 2 < rate < 4
    assert rate >= other
    assert rate <= 3.0
    assert rate == pytest.approx(3)
    assert rate != 4
    assert (float(rate), rate.to("items/s"), repr(rate)) == (3.0, 3.0, "<rate 3 items/s>")


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda run: run["rate"] > "2", TypeError, "rate is compared with a number in items/s, as in run['rate'] > 1.0; found '2'"),
        (lambda run: run["rate"] < MetricValue("t", 1.0, "s", "lower"), TypeError, "rate is in items/s, and t in s"),
        (lambda run: run["rate"].to("GB/s"), ValueError, "rate is in items/s, which is not converted to GB/s"),
        (lambda run: run.rate, AttributeError, "a run has no attribute 'rate'; its metrics are found by name: run['rate']"),
        (lambda run: run > 3, TypeError, "or compare one metric, such as run['rate'] > 1.0"),
    ],
)  # fmt: skip
def test_what_a_newcomer_writes_is_answered_by_what_is_right(wrong, error, text):
    with pytest.raises(error, match=re.escape(text)):
        wrong(Run(outcome()))


@pytest.mark.parametrize("name", ["output.log", "id/rank0.log", "id/launcher.log", "other.log"])
def test_the_output_of_a_run_is_found_in_its_folder(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"Solution Validates\xff")
    found = Run(replace(outcome(), directory=str(tmp_path))).output
    assert found == ("" if name == "other.log" else "Solution Validates\N{REPLACEMENT CHARACTER}")


def test_an_output_that_is_gone_is_no_empty_one(tmp_path):
    with pytest.raises(RunFailure, match="the run's output was removed"):
        _ = Run(replace(outcome(), directory=str(tmp_path / "gone"))).output


def test_a_broken_run_raises_whatever_is_read_of_it():
    broken = Run(Outcome("t", "k", failure=Failure("loss_nan", "step 3")))
    with pytest.raises(RunFailure, match="loss_nan"):
        broken["loss"]


def test_the_explanation_has_figures_reruns_and_the_accept_command():
    text = " ".join(explain(outcome(Verdict.REGRESSED).judgement))
    parts = ("rate 3 items/s: 25 % below 4 ", "regressed: the fence is ", "re-runs: 3.1", "accept it")
    assert [part for part in parts if part not in text] == []


def test_properties_are_plain_pairs():
    expected = {"metric.rate": "3.0 items/s", "nodes": "n1,n2", "verdict": "passed"}
    assert {(f"mlhpc.{name}", value) for name, value in expected.items()} <= set(properties(outcome()))
