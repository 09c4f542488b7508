"""An ended job is checked and judged by pure functions: what they are given stays as it is, and what they return says all."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import worlds
from worlds import entry, inputs, spec

from pytest_mlhpc.config.overrides import Against
from pytest_mlhpc.jobs.job import Attempt, Job, Opponent
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.session.against import Comparison
from pytest_mlhpc.session.check_measurement import check_job
from pytest_mlhpc.session.outcome import SessionTerms, judge_job
from pytest_mlhpc.store.record import Epoch, Failure, Provenance, Verdict

KILLED = Failure("worker_killed", "a process was killed by signal 9")
NODE = Failure("node_failure", "n1 is down")


def attempt_of(job, number=0, value=100.0, failures=(), **changes):
    """Return an ended attempt of *job* that measured *value*; ``changes`` are those of its measurement."""
    run = plan_of([(job.spec_of(number), number)], Path("x"), "").runs[0]
    attempt = Attempt(run, number, over=True, failures=list(failures))
    own = {"run_id": run.run_id, "nonce": run.nonce, "attempt": number, "workload": run.workload}
    if value is not None:
        attempt.measurement = worlds.measurement(value, **{**own, **changes})
    return attempt


def ended(*attempts, **fields):
    """Return a job with attempts of these values, or of these arguments of :func:`attempt_of`."""
    job = Job(spec(workload="command", argv=("x",), **fields))
    for number, given in enumerate(attempts):
        changes = given if isinstance(given, dict) else {"value": given}
        job.attempts.append(attempt_of(job, number, **changes))
    return job


def terms(comparison=None):
    settings = SimpleNamespace(each_node=None, overrides={})
    return SessionTerms(settings, "s", Provenance(commit="abc"), ("--state-dir=/s",), comparison=comparison)


def judged(job, *, history=(), entries=None, **more):
    """Judge *job* against an entry of 100; of :class:`JudgeInputs`, *more* sets explanation."""
    known = inputs({"rate": entry()} if entries is None else entries, {"rate": history})
    return judge_job(check_job(job), replace(known, **more), terms())


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ({}, None),
        ({"run_id": "other"}, "foreign_result"),
        ({"failures": (KILLED,)}, "worker_killed"),
        ({"failures": (KILLED, NODE)}, "node_failure"),
        ({"failures": (KILLED,), "run_id": "other"}, "worker_killed"),
        ({"value": None, "failures": (NODE,)}, "node_failure"),
    ],
    ids=[
        "what was asked for", "another run's result", "a reported failure", "the infrastructure's failure first",
        "a reported failure before that of the result", "no measurement",
    ],
)  # fmt: skip
def test_an_attempt_has_the_failure_that_it_reported_or_that_its_measurement_shows(attempt, outcome):
    checked = check_job(ended(attempt)).first
    assert (checked.failure and checked.failure.outcome) == outcome
    assert (checked.measurement is None) == (outcome is not None)


def test_checking_leaves_the_job_as_it_is():
    job = ended({"run_id": "other"}, 100.0)
    first = check_job(job)
    assert [attempt.failures for attempt in job.attempts] == [[], []]
    assert check_job(job) == first


def test_only_sound_measurements_are_judged():
    checked = check_job(ended(100.0, {"nonce": "other"}, 98.0))
    assert [one.metrics[0].value for one in checked.measurements] == [100.0, 98.0]
    assert checked.is_judged


@pytest.mark.parametrize(
    ("attempt", "fields", "verdict"),
    [
        (100.0, {"judged": (), "expected_metrics": ()}, "unjudged"),
        ({"failures": (KILLED,)}, {}, "worker_killed"),
        ({"value": None}, {}, "no_result"),
    ],
    ids=["a test that judges nothing", "a run that broke", "a run without any result"],
)
def test_without_anything_to_compare_the_verdict_follows_from_the_check(attempt, fields, verdict):
    checked = check_job(ended(attempt, **fields))
    assert not checked.is_judged
    found = judge_job(checked, None, terms())
    assert (found.verdict, found.more, found.inputs) == (verdict, None, None)


def test_a_bad_figure_asks_for_re_runs_before_it_is_a_loss():
    assert judged(ended(80.0)).more == 2
    final = judged(ended(80.0, 80.0, 80.0, 80.0))
    assert (final.verdict, final.more, final.failure.outcome) == ("regressed", None, "regressed")
    assert "--state-dir=/s" in final.judgement.accept_command


def test_equal_inputs_give_equal_verdicts():
    job, history = ended(99.0), [Attempts(100.0)] * 12
    assert judged(job, history=history) == judged(job, history=history)


def test_what_people_noted_ends_the_explanation_of_a_verdict():
    job = ended(80.0, 80.0, 80.0, 80.0)
    noted = judged(job, noted=("noted on Monday: a new driver",)).judgement.explanation
    assert noted == (*judged(job).judgement.explanation, "noted on Monday: a new driver")


def test_the_newest_epoch_says_why_a_series_begins_anew():
    job, other = ended(100.0), Epoch(worlds.DEFINITION.replace("steps=10", "steps=20"), "EPYC")
    found = judged(job, entries={}, newest=other).judgement
    assert found.epoch == "steps 20 -> 10"
    assert found.explanation[-1] == "a new epoch begins: steps 20 -> 10"
    assert judged(job, entries={}, newest=Epoch(worlds.DEFINITION, "EPYC")).judgement.epoch == ""


AGAINST = Comparison(Against(variables={"X": "2"}), 1)


def compared(*values, planned=12, pending=0, refused=None):
    """Return a comparison with ended runs of these values, in the order A B B A."""
    job = Job(spec(workload="command", argv=("x",)), planned=planned, pending=pending, refused=refused)
    job.opponent = Opponent(replace(job.spec, env={"X": "2"}), planned, 8)
    for number, given in enumerate(values, start=1):
        changes = given if isinstance(given, dict) else {"value": given}
        job.attempts.append(attempt_of(job, number, **changes))
    return judge_job(check_job(job), None, terms(AGAINST))


def test_a_comparison_waits_for_the_runs_that_are_on_their_way():
    found = compared(100.0, 90.0, pending=10)
    assert (found.more, found.verdict, found.failure) == (0, "no_result", None)


@pytest.mark.parametrize(
    ("values", "more", "outcome"),
    [
        ((100.0,), {}, "no_result"),
        ((100.0,), {"pending": 11, "refused": NODE}, "node_failure"),
        ((100.0, {"failures": (KILLED,)}), {"pending": 10}, "worker_killed"),
        ((90.0, 100.0, 100.0, 90.0) * 3, {}, "regressed"),
    ],
    ids=["no pair ended", "its runs were refused", "a run broke", "A is worse"],
)
def test_a_comparison_ends_with_a_failure(values, more, outcome):
    found = compared(*values, **more)
    assert (found.more, found.failure.outcome) == (None, outcome)
    assert bool(found.comparison) == (outcome == "regressed")


def test_equal_sides_pass():
    found = compared(*(100.0, 100.1, 100.0, 100.1) * 3)
    assert (found.failure, found.judgement.verdict) == (None, Verdict.PASSED)
