"""Nights that the schedule expects, runs that broke, nodes that were left out."""

import pytest
from alert_bads import night

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.expect import broken, nightly, stale
from pytest_mlhpc.alert.model import Subject
from pytest_mlhpc.alert.unfit import unfit
from pytest_mlhpc.history.series import Night

HOUR = 1 / 24


def of(number, benchmark="a", verdict="passed", **changes):
    """Return a nightly record."""
    fields = {
        "id": f"{number}{benchmark}", "session": "s", "node_id": "t", "system": "cirrus", "partition": "standard",
        "environment": "default", "device_model": "EPYC", "fingerprint": "", "benchmark": benchmark, "attempt": 0,
        "created_ns": night(number), "verdict": verdict, "purpose": "nightly", "branch": "main",
    }  # fmt: skip
    return Night(**{**fields, **changes})


def late(nights, at):
    return stale(nightly(nights, "main"), night(at))


def names(found):
    return sorted(subject.benchmark for subject in found)


def reasons(missing):
    return [one.reason for one in missing.bad.values()]


def test_what_was_recorded_last_night_is_not_stale():
    assert not late([of(0), of(1)], 2).bad


def test_what_was_not_recorded_for_26_hours_is_stale_and_says_since_when():
    why = "nothing recorded since 2027-01-02 01:00 UTC"
    assert reasons(late([of(0), of(1)], 1 + 27 * HOUR)) == [why]


def test_one_night_is_no_schedule():
    assert not late([of(0), of(0.1)], 5).bad


def test_one_benchmark_that_is_missing_is_stale_alone():
    missing = late([of(0), of(1), of(0, "b"), of(1, "b"), of(2, "b")], 2.5)
    assert names(missing.bad) == ["a"]


def test_re_runs_changes_and_manual_runs_are_no_nights():
    others = [of(2, attempt=1), of(2, purpose="manual"), of(2, purpose="change"), of(2, branch="topic")]
    assert names(late([of(0), of(1), *others], 2.5).bad) == ["a"]


def test_a_run_that_the_scheduler_never_started_did_not_run():
    waiting = of(2, verdict="never_scheduled", failure="never_scheduled: Resources")
    assert reasons(late([of(0), of(1), waiting], 2.2)) == ["did not run: never_scheduled: Resources"]


def test_a_run_without_fit_nodes_is_told_by_the_message_about_nodes():
    assert not late([of(0), of(1), of(2, verdict="unfit_nodes")], 2.2).bad


def test_a_benchmark_that_others_outlived_by_two_weeks_is_no_longer_expected():
    others = [of(number, "b") for number in range(20)]
    missing = late([of(0), of(1), *others], 19.5)
    assert not missing.bad
    assert names(missing.gone) == ["a"]


def test_a_system_that_is_silent_for_weeks_stays_stale():
    assert names(late([of(0), of(1)], 30).bad) == ["a"]


@pytest.mark.parametrize("verdict", ["worker_exit", "loss_nan", "too_few_ranks"])
def test_a_run_that_broke_is_a_failure_with_its_words(verdict):
    missing = broken(nightly([of(0), of(1, verdict=verdict, failure=f"{verdict}: rank 3\nmore")], "main"))
    assert reasons(missing) == [f"{verdict}: rank 3"]


@pytest.mark.parametrize("verdict", ["regressed", "drifted", "passed", "inconclusive", "no_baseline"])
def test_a_run_that_measured_is_no_failure(verdict):
    assert not broken(nightly([of(0), of(1, verdict=verdict)], "main")).bad


def test_a_run_that_did_not_begin_leaves_a_failure_as_it_was():
    nights = [of(0), of(1, verdict="worker_exit"), of(2, verdict="never_scheduled")]
    assert names(broken(nightly(nights, "main")).bad) == ["a"]


def test_a_failure_began_with_the_first_of_its_nights():
    nights = [of(0), of(1, verdict="worker_exit"), of(2, verdict="time_limit")]
    (bad,) = broken(nightly(nights, "main")).bad.values()
    assert (bad.first_ns, bad.last_ns) == (night(0), night(1))


def node(name):
    return Subject(Kind.NODES, "cirrus", "standard", node=name)


def test_a_node_that_was_left_out_is_unfit_with_its_reason():
    missing = unfit([of(0, nodes=("n1", "n2")), of(1, nodes=("n1",), unfit={"n2": "clock"})], night(1.2))
    assert {subject.node: bad.reason for subject, bad in missing.bad.items()} == {"n2": "clock"}


def test_a_node_on_which_something_ran_again_is_good():
    nights = [of(1, unfit={"n2": "clock"}), of(2, nodes=("n2",))]
    missing = unfit(nights, night(2.2))
    assert not missing.bad
    assert node("n2") in missing.known


def test_a_node_that_nobody_mentions_stays_unfit_for_a_week_and_is_then_forgotten():
    nights = [of(1, unfit={"n2": "clock"})]
    assert unfit(nights, night(7)).bad
    assert node("n2") in unfit(nights, night(9)).gone
