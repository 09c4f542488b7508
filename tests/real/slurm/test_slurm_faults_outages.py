"""Slurm's own daemons go and come back under a session: no result is lost, nothing is submitted twice."""

import signal
import time

import pytest
from faults import ONE
from running_suites import wait_for


@pytest.fixture
def own(own_slurm, make_suite):
    """A suite on a cluster that the test may break."""
    return make_suite(own_slurm)


@pytest.mark.slow
def test_while_the_controller_is_down_submitting_is_tried_again(own):
    own.tests(ONE)
    own.slurm.stop_controller()
    session = own.start()
    session.until("a word about it", lambda: "not submitted yet" in session.text)
    own.slurm.start_controller()
    session.end().expect(0, "Unable to contact slurm controller", passed=1)
    own.once()


@pytest.mark.parametrize("down_s", [0, pytest.param(60, marks=pytest.mark.slow)], ids=["restarted", "down"])
def test_a_controller_that_goes_away_under_waiting_and_running_jobs_is_not_noticed(own, down_s):
    own.partition(sbatch=["--hold"])
    own.gated("one")
    session = own.start()
    job = own.job("PENDING")
    restart(own.slurm, down_s)
    own.slurm.run("scontrol", "release", job.id)
    session.begun("one")
    restart(own.slurm, down_s)
    own.go()
    session.end().expect(0, passed=1)
    own.once()


def restart(slurm, down_s):
    slurm.stop_controller()
    time.sleep(down_s)  # the length of the outage is the fault
    slurm.start_controller()


@pytest.mark.slow
def test_a_result_needs_no_controller(own):
    session = own.begin_gated("one")
    own.slurm.stop_controller()
    own.go()
    session.end().expect(0, passed=1)
    own.slurm.start_controller()
    wait_for(lambda: all(job.ended for job in own.jobs()))  # its node tells the end again until it is heard
    assert [record["verdict"] for record in own.records()] == ["unjudged"]


@pytest.mark.slow
def test_jobs_that_cannot_be_cancelled_stay_in_the_ledger_for_the_next_session(own):
    session = own.begin_gated("one")
    own.slurm.stop_controller()
    session.signal(signal.SIGINT)
    result = session.end()
    own.slurm.start_controller()
    result.expect(2, "these jobs may still be running:", "the next session or `mlhpc reap` ends them")
    own.tests(ONE, "test_other.py")
    own.run("test_other.py").expect(0, "cancelled job", passed=1)
    assert own.jobs()[0].state == "CANCELLED"


def test_without_the_accounting_database_results_and_failures_are_reported_all_the_same(
    start_own_slurm, make_suite
):
    slurm = start_own_slurm("--accounting", "dbd")
    suite = make_suite(slurm)
    suite.partition(account="bench", qos="normal")
    suite.tests("""\
        @script("echo rate: 4")
        def test_good(run): pass

        @script("exit 3")
        def test_bad(run): pass
    """)
    slurm.stop_database()
    suite.run().expect(1, "worker_exit:", "exit code 3", passed=1, failed=1)
    assert sorted(record["verdict"] for record in suite.records()) == ["unjudged", "worker_exit"]
