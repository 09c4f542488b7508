"""The judge of a young series, rule by rule: gate, quorum, machine, missing things."""

from dataclasses import replace

import pytest
from worlds import entry, inputs, measurement, record, spec

from pytest_mlhpc.judge.baseline_files import environment_digest
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judge import entries_to_put, failure_of, fences_of, judge
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import RecordedFence, Verdict

QUIET = (100.0, 100.4, 99.6, 100.2, 99.8, 100.1, 99.9, 100.0)
NOISY = (97.0, 103.0, 97.0, 103.0, 100.0, 100.0, 98.0, 102.0)


def judged(*attempts, history=(), baseline=None, book=None, of=None, last_good=None, commit="", **terms):
    """Judge attempts, which are measurements or figures of one, against an entry of 100 that tolerates 5 %."""
    runs = [measurement(one) if isinstance(one, float) else one for one in attempts]
    entries = {"rate": baseline or entry()} if book is None else book
    nights = {"rate": [Attempts(value) for value in history]}
    known = replace(inputs(entries, nights, **terms), last_good=last_good)
    return judge(runs, of or spec(), known, commit=commit)


@pytest.mark.parametrize(
    ("values", "options", "verdict", "reruns"),
    [
        ([95.5], {}, Verdict.PASSED, 0),
        ([94.0], {}, Verdict.INCONCLUSIVE, 2),
        ([95.5], {"history": QUIET}, Verdict.PASSED, 0),
        ([94.0], {"history": NOISY}, Verdict.PASSED, 0),
        ([80.0], {"reruns_broken": 2}, Verdict.INCONCLUSIVE, 2),
        ([80.0], {"reruns_allowed": 1}, Verdict.INCONCLUSIVE, 1),
        ([90.0, 90.0, 99.9, 90.0, 90.0], {}, Verdict.REGRESSED, 0),
        ([90.0, 99.0, 99.0], {}, Verdict.PASSED, 0),
        ([80.0], {"reruns_allowed": 0}, Verdict.REGRESSED, 0),
        ([120.0], {}, Verdict.IMPROVED, 0),
    ],
    ids=[
        "inside the entry's tolerance it passes",
        "beyond the tolerance two re-runs are asked for first",
        "quiet records do not make less matter",
        "a noisy history widens the fence",
        "re-runs that broke are made again",
        "only the re-runs that are left are asked for",
        "drops of three of four re-runs make a regression",
        "two re-runs inside end the matter",
        "without re-runs a single bad number still fails",
        "a better value passes",
    ],
)  # fmt: skip
def test_a_figure_is_judged(values, options, verdict, reruns):
    judgement = judged(*values, **options)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)


def test_a_noisy_history_widens_the_fence_to_three_robust_sigma():
    assert judged(94.0, history=NOISY).metrics[0].width == pytest.approx(3 * 1.4826 * 0.025, rel=1e-6)


def test_re_runs_are_kept_in_order_and_those_inside_explain_that_they_did_not_confirm():
    assert judged(90.0, 90.0, 99.9, 90.0, 90.0).metrics[0].reruns == (90.0, 99.9, 90.0, 90.0)
    assert judged(90.0, 99.0, 99.0).explanation[0].endswith(": 10 % below 100 (2 re-runs did not agree)")


def test_a_regression_names_metric_distance_re_runs_and_the_accept_command():
    judgement = judged(85.0, 85.1, 84.9, 85.2)
    text = "\n".join(judgement.explanation)
    assert text.startswith("rate 85 samples/s: 15 % below 100 (3 of 3 re-runs agree)\n")
    assert "  regressed: the fence is 5.0%; re-runs: 85.1, 84.9, 85.2 samples/s" in text
    test = "'suites/test_a.py::test_a[cirrus:standard]'"
    assert judgement.accept_command.startswith(f"mlhpc baseline accept {test}")
    assert (failure_of(judgement).outcome, failure_of(judgement).infrastructure) == ("regressed", False)


def test_a_better_value_passes_and_names_the_accept_command():
    judgement = judged(120.0)
    assert judgement.accept_command
    assert failure_of(judgement) is None


@pytest.mark.parametrize(
    ("judgement", "outcome", "infrastructure", "text"),
    [
        (judged(80.0, reruns_allowed=0), "regressed", False, "no re-runs were possible"),
        (judged(80.0, 80.0, reruns_allowed=0), "reruns_incomplete", True, ""),
        (judged(80.0, reruns_broken=6, reruns_allowed=12), "reruns_incomplete", True, "0 of 6 ended well"),
        (judged(100.0, baseline=entry(unit="items/s"), mode="record"), "no_baseline", False, "items/s"),
        (judged(100.0, of=spec(("other",)), book={"other": entry()}, local=True, reruns_allowed=0), "metric_missing", False, ""),
        (judged(100.0, book={}), "no_baseline", False, ""),
    ],
    ids=[
        "a bad number alone", "too few re-runs", "re-runs that keep breaking", "another unit", "not reported",
        "no baseline",
    ],
)  # fmt: skip
def test_a_failure_has_a_name_and_a_text(judgement, outcome, infrastructure, text):
    failure = failure_of(judgement)
    assert (failure.outcome, failure.infrastructure) == (outcome, infrastructure)
    assert text in failure.text
    assert judgement.reruns_wanted == 0
    assert judgement.verdict is not Verdict.NEW


@pytest.mark.parametrize(
    ("contention", "reason"), [({}, ""), ({"steal": 0.3}, "it may be too low, the machine was busy")]
)
@pytest.mark.parametrize("local", [True, False])
def test_a_missing_baseline_is_new_and_says_so_if_the_machine_was_busy(contention, reason, local):
    judgement = judged(measurement(contention=contention), book={}, local=local, mode="record")
    assert (judgement.verdict, failure_of(judgement)) == (Verdict.NEW, None)
    assert reason in judgement.metrics[0].reason


def local_run(value, rate, **contention):
    """Return a measurement on this machine, which calibrates at *rate*."""
    return measurement(value, calibration_before=rate, calibration_after=rate, contention=contention)


@pytest.mark.parametrize(
    ("runs", "verdict", "reruns", "words"),
    [
        pytest.param(
            [local_run(80.0, 40.0)],
            Verdict.INCONCLUSIVE,
            0,
            "this machine is 20.0% slower today",
            id="a machine that is slower by as much makes it inconclusive",
        ),
        pytest.param(
            [local_run(60.0, 40.0)],
            Verdict.INCONCLUSIVE,
            2,
            "",
            id="code that is slower than the machine explains is run again",
        ),
        pytest.param([local_run(60.0, 40.0)] * 4, Verdict.REGRESSED, 0, "", id="and is found"),
        pytest.param(
            [local_run(120.0, 60.0)], Verdict.PASSED, 0, "", id="a faster machine excuses no improvement"
        ),
        pytest.param(
            [local_run(120.0, 50.0)], Verdict.IMPROVED, 0, "", id="faster code on the same machine is one"
        ),
        pytest.param(
            [local_run(60.0, 50.0, steal=0.3)],
            Verdict.INCONCLUSIVE,
            0,
            "the hypervisor gave 30.0%",
            id="a gate opened on a busy machine",
        ),
        pytest.param(
            [local_run(60.0, 50.0, busy_cores=2.0, other_cores=0.5)],
            Verdict.INCONCLUSIVE,
            0,
            "other programs used 0.5 cores beside the run's 1.5",
            id="other programs beside the run make it busy",
        ),
        pytest.param(
            [local_run(60.0, 50.0, busy_cores=2.0, other_cores=0.1, load1_before=9.0)],
            Verdict.INCONCLUSIVE,
            2,
            "",
            id="a load that was over when the run began does not",
        ),
        pytest.param(
            [local_run(60.0, 50.0), *[local_run(60.0, 50.0, steal=0.3)] * 4],
            Verdict.INCONCLUSIVE,
            0,
            "busy during 4 of 4 re-runs",
            id="slow re-runs on a busy machine confirm nothing",
        ),
    ],
)
def test_on_local_the_machine_counts(runs, verdict, reruns, words):
    judgement = judged(*runs, baseline=entry(tolerance=0.10, calibration=50.0), local=True)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)
    assert words in "\n".join([*judgement.explanation, judgement.metrics[0].reason])
    assert (failure_of(judgement) is None) == (verdict is not Verdict.REGRESSED)


def local_run(value, rate, **changes):
    return measurement(value, calibration_before=rate, calibration_after=rate, **changes)


@pytest.mark.parametrize(
    ("value", "verdict", "accepted"),
    [(99.0, Verdict.PASSED, {}), (80.0, Verdict.NEW, {"rate": (80.0, "new", 0.07, "1970-01-01T00:00:00Z")})],
)
def test_accepting_by_update_touches_only_what_lies_outside(value, verdict, accepted):
    judgement, book = judged(value, mode="update"), {"rate": entry(tolerance=0.07)}
    arguments = {"local": False, "accepted_by": "me", "reason": "why", "now_ns": 0, "definition": "new"}
    put = entries_to_put([measurement(value)], judgement, book, **arguments)
    assert judgement.verdict is verdict
    assert {
        name: (one.value, one.definition, one.tolerance, one.date) for name, one in put.items()
    } == accepted


CHANGED = {"definition": "resnet50 devices=1 nodes=1 preset=smoke steps=20"}


@pytest.mark.parametrize(
    ("options", "verdict", "reason"),
    [
        (
            {"mode": "record"},
            Verdict.NEW,
            "recorded: a new epoch begins, as since its baseline steps 20 -> 10",
        ),
        ({"mode": "update"}, Verdict.NEW, "accepted (--mlhpc-baseline=update)"),
        (
            {"mode": "fail"},
            Verdict.UNJUDGED,
            "no_baseline: its baseline is of an earlier epoch (steps 20 -> 10)",
        ),
    ],
    ids=["record", "update", "fail"],
)
def test_a_figure_is_not_judged_by_the_baseline_of_another_definition(options, verdict, reason):
    judgement = judged(50.0, baseline=entry(**CHANGED), history=QUIET[:3], **options)
    (metric,) = judgement.metrics
    assert (metric.verdict, metric.reason, metric.change, judgement.reruns_wanted) == (
        verdict,
        reason,
        None,
        0,
    )
    assert judgement.epoch == "steps 20 -> 10"


def test_nor_by_that_of_another_device_but_by_one_that_names_none():
    judgement = judged(50.0, baseline=entry(device_model="EPYC 2"), mode="record")
    assert (judgement.verdict, judgement.epoch) == (Verdict.NEW, "device model EPYC 2 -> EPYC")
    assert judged(100.0, baseline=entry(device_model="")).verdict is Verdict.PASSED


def phased(value, io, compute, **changes):
    more = (MetricValue("io_time", io, "s", "lower"), MetricValue("compute_time", compute, "s", "lower"))
    return measurement(value, more=more, **changes)


@pytest.mark.parametrize(
    ("good", "now", "words"),
    [
        pytest.param(
            phased(100.0, 0.1, 0.9, environment={"torch": "2.12"}),
            phased(80.0, 0.35, 0.9, environment={"torch": "2.13"}, nodes=("n7",)),
            [
                "I/O is what grew: per step I/O +25 ms, compute +0 ms, of 100 ms before",
                "nodes: n7; last good run on n1",
                "torch 2.12 -> 2.13",
            ],
            id="what grew, on which node and in which environment",
        ),
        pytest.param(
            measurement(environment={"image": "sha256:1"}),
            measurement(80.0, environment={"image": "sha256:1"}),
            ["Suspect the system, not the code"],
            id="the same commit and environment blame the system",
        ),
        pytest.param(
            measurement(environment={"host": "n1", "commit_changed": "no"}),
            measurement(80.0, environment={"host": "n2", "commit_changed": "yes"}),
            ["\n  perhaps the code: the checkout has changes that are not committed"],
            id="a changed checkout is no reason to blame the system",
        ),
    ],
)
def test_a_regression_is_explained_by_what_changed(good, now, words):
    last_good = record(measurement=good, commit="abc")
    judgement = judged(now, reruns_allowed=0, last_good=last_good, commit="abc")
    text = "\n".join(judgement.explanation)
    assert [word for word in words if word not in text] == []
    assert ("Suspect the system" in text) == ("Suspect the system" in words[0])


def test_another_node_and_another_commit_are_the_same_software():
    one = environment_digest({"torch": "2.13", "host": "n1", "commit": "abc"})
    assert one == environment_digest({"torch": "2.13", "host": "n2", "commit": "def"})
    assert one != environment_digest({"torch": "2.12", "host": "n1", "commit": "abc"})


def test_a_test_that_judges_nothing_is_unjudged_and_fails_nothing():
    judgement = judged(100.0, of=spec(()), book={})
    assert (judgement.verdict, failure_of(judgement)) == (Verdict.UNJUDGED, None)


@pytest.mark.parametrize(
    ("values", "options", "verdict", "reruns"),
    [
        ([100.0], {}, Verdict.PASSED, 0),
        ([99.0], {}, Verdict.INCONCLUSIVE, 2),
        ([99.0, 99.0, 98.9, 101.0, 99.1], {}, Verdict.BELOW_REFERENCE, 0),
        ([99.0, 101.0, 100.5], {}, Verdict.PASSED, 0),
        ([99.0], {"reruns_allowed": 0}, Verdict.BELOW_REFERENCE, 0),
        ([99.0], {"book": {}, "mode": "record", "reruns_allowed": 0}, Verdict.BELOW_REFERENCE, 0),
        ([101.0], {"book": {}, "mode": "record"}, Verdict.NEW, 0),
        ([80.0, 80.0, 80.0, 80.0], {}, Verdict.BELOW_REFERENCE, 0),
    ],
    ids=[
        "what is promised passes",
        "less is run again first",
        "three of four re-runs confirm it, although the baseline's fence holds",
        "two re-runs that keep the promise end the matter",
        "without re-runs one run decides",
        "a promise needs no baseline",
        "a new series keeps it and is new",
        "a figure below both fences is below the reference, which is worse",
    ],
)
def test_a_figure_that_is_worse_than_promised_fails_whatever_was_measured_before(
    values, options, verdict, reruns
):
    judgement = judged(*values, of=spec(references={"rate": 100.0}), **options)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)


def test_the_failure_names_the_reference_and_no_command_that_accepts_less():
    judgement = judged(95.0, 95.0, 95.1, 95.2, of=spec(references={"rate": 100.0}))
    failure = failure_of(judgement)
    assert failure.outcome == "below_reference"
    assert failure.text == "rate 95 samples/s: 5 % below 100 (the reference; 3 of 3 re-runs agree)"
    assert judgement.accept_command == ""
    assert "  below_reference: re-runs: 95, 95.1, 95.2 samples/s" in judgement.explanation


def test_a_promise_of_a_time_is_broken_by_more():
    run = measurement(2.0, unit="s", better="lower")
    promise = {"reruns_allowed": 0, "mode": "record", "book": {}}
    assert judged(run, of=spec(references={"rate": 1.5}), **promise).verdict is Verdict.BELOW_REFERENCE
    assert judged(run, of=spec(references={"rate": 2.5}), **promise).verdict is Verdict.NEW


@pytest.mark.parametrize(
    ("values", "options", "verdict"),
    [
        ([99.0], {}, Verdict.PASSED),
        ([99.0], {"of": spec(references={"rate": 90.0})}, Verdict.PASSED),
        ([80.0], {"of": spec(references={"rate": 90.0}), "reruns_allowed": 0}, Verdict.BELOW_REFERENCE),
        ([120.0], {}, Verdict.IMPROVED),
    ],
)
def test_a_metric_has_been_compared_with_its_accepted_value_also_where_a_reference_decided(
    values, options, verdict
):
    judgement = judged(*values, **options)
    assert judgement.verdict is verdict
    assert fences_of(judgement) == {"rate": RecordedFence(100.0, 0.05)}


@pytest.mark.parametrize(
    "options",
    [
        {"book": {}, "mode": "record", "local": True},
        {"book": {}},
        {"book": {}, "of": spec(references={"rate": 150.0}), "reruns_allowed": 0, "mode": "record"},
    ],
    ids=["a new series", "no baseline", "a reference alone"],
)
def test_a_metric_without_baseline_was_compared_with_no_accepted_value(options):
    assert fences_of(judged(100.0, **options)) == {}
