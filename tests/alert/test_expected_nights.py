"""Nights that the schedule expects, runs that broke, nodes that were left out."""

import pytest
from alert_bads import night

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import Subject
from pytest_mlhpc.alert.observe import broken, nightly, stale, unfit
from pytest_mlhpc.history.series import Night

HOUR = 1 / 24


def of(number, benchmark="a", **changes):
    """Return a nightly record."""
    where = {"system": "cirrus", "partition": "standard", "environment": "default", "device_model": "EPYC"}
    of_run = {"session": "s", "node_id": "t", "fingerprint": "", "attempt": 0, "verdict": "passed"}
    own = {
        "id": f"{number}{benchmark}",
        "benchmark": benchmark,
        "definition": "w a=1",
        "created_ns": night(number),
    }
    return Night(**{**where, **of_run, "purpose": "nightly", "branch": "main", **own, **changes})


def late(nights, at):
    return stale(nightly(nights, "main"), night(at))


def node(name):
    return Subject(Kind.NODES, "cirrus", "standard", node=name)


def names(found):
    return sorted(subject.benchmark for subject in found)


def reasons(missing):
    return [one.reason for one in missing.bad.values()]


TWO = [of(0), of(1)]
WAITING = of(2, verdict="never_scheduled", failure="never_scheduled: Resources")
BUSY = of(2, verdict="machine_busy")
UNWATCHED = [of(2, attempt=1), of(2, purpose="manual"), of(2, purpose="change"), of(2, branch="topic")]
SILENT = "nothing recorded since 2027-01-02 01:00 UTC"


@pytest.mark.parametrize(
    ("nights", "at", "why"),
    [
        pytest.param(TWO, 2, [], id="what was recorded last night"),
        pytest.param(TWO, 1 + 27 * HOUR, [SILENT], id="what was not recorded for 26 hours"),
        pytest.param([of(0), of(0.1)], 5, [], id="one night is no schedule"),
        pytest.param([*TWO, of(0, "b"), of(1, "b"), of(2, "b")], 2.5, [SILENT], id="one benchmark that is missing"),
        pytest.param([*TWO, *UNWATCHED], 2.5, [SILENT], id="re-runs, changes and manual runs are no nights"),
        pytest.param([*TWO, WAITING], 2.2, ["did not run: never_scheduled: Resources"],
                     id="a run that the scheduler never started did not run"),
        pytest.param([*TWO, of(2, verdict="unfit_nodes")], 2.2, [],
                     id="a run without fit nodes is told by the message about nodes"),
        pytest.param([*TWO, BUSY], 2.2, [], id="a machine that was busy for a night says nothing"),
        pytest.param([*TWO, BUSY, of(3, verdict="machine_busy")], 3.2, ["did not run: machine_busy"],
                     id="a machine that is busy night after night keeps it from being measured"),
        pytest.param(TWO, 30, [SILENT], id="a system that is silent for weeks"),
    ],
)  # fmt: skip
def test_what_is_stale(nights, at, why):
    missing = late(nights, at)
    assert reasons(missing) == why
    assert names(missing.bad) == ["a"] * len(why)


def test_a_benchmark_that_others_outlived_by_two_weeks_is_no_longer_expected():
    missing = late([of(0), of(1), *(of(number, "b") for number in range(20))], 19.5)
    assert (names(missing.bad), names(missing.gone)) == ([], ["a"])


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


def test_a_node_that_was_left_out_is_unfit_with_its_reason():
    missing = unfit([of(0, nodes=("n1", "n2")), of(1, nodes=("n1",), unfit={"n2": "clock"})], night(1.2))
    assert {subject.node: bad.reason for subject, bad in missing.bad.items()} == {"n2": "clock"}


def test_a_node_on_which_something_ran_again_is_good():
    missing = unfit([of(1, unfit={"n2": "clock"}), of(2, nodes=("n2",))], night(2.2))
    assert (missing.bad, node("n2") in missing.known) == ({}, True)


def test_a_node_that_nobody_mentions_stays_unfit_for_a_week_and_is_then_forgotten():
    nights = [of(1, unfit={"n2": "clock"})]
    assert unfit(nights, night(7)).bad
    assert node("n2") in unfit(nights, night(9)).gone
