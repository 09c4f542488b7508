"""Jobs of a real Grid Engine that are refused, killed, or outlive their session: what a user reads, the record, nothing left."""

import os
import shutil
import signal

import pytest
from faults import ONE, gate
from running_suites import wait_for


def ended_alone(suite):
    """Assert that no job and no entry of the ledger is left."""
    wait_for(lambda: suite.jobs() == {})
    assert suite.ledgers() == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"queue": "nowhere.q"}, 'Job was rejected because job requests unknown queue "nowhere.q"'),
        ({"parallel_environment": "nowhere"}, 'the requested parallel environment "nowhere" does not exist'),
        ({"slots": 3}, "no suitable queues"),
    ],
    ids=["queue", "parallel environment", "more hosts than there are"],
)
def test_what_grid_engine_refuses_is_rejected_with_its_own_message(suite, values, reason):
    suite.partition(values=values)
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "rejected:", reason, error=1)
    assert result.verdicts() == ["rejected"]
    ended_alone(suite)


def test_a_job_that_others_delete_was_cancelled_from_outside(suite):
    session = suite.begin_gated("one")
    job = suite.running()
    assert suite.cluster.run("qdel", job).returncode == 0
    result = session.end()
    result.expect(1, f"job {job} CANCELLED", "it was cancelled from outside", error=1)
    assert result.verdicts() == ["cancelled_outside"]
    ended_alone(suite)


def test_a_waiting_job_that_others_delete_was_cancelled_from_outside(suite):
    suite.partition(arguments=[["-h"]])
    suite.tests(ONE)
    session = suite.start()
    session.until("held job", lambda: list(suite.jobs().values()) == ["hqw"])
    (job,) = suite.jobs()
    assert suite.cluster.run("qdel", job).returncode == 0
    result = session.end()
    result.expect(1, job, error=1)
    assert result.verdicts() == ["cancelled_outside"]
    ended_alone(suite)


def test_a_held_job_is_given_up_after_the_pending_limit_and_cancelled(suite):
    suite.partition(arguments=[["-h"]], pending_limit="3s")
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "never_scheduled:", "the pending limit is 3 s", error=1)
    ended_alone(suite)


def test_a_job_in_error_is_cancelled_as_waiting_does_not_help(suite):
    suite.partition(arguments=[["-o", "/etc/passwd/none"]])
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "never_scheduled:", "Eqw", error=1)
    ended_alone(suite)


def test_a_run_at_its_time_limit_and_one_that_fails_are_the_tests_own(suite):
    suite.tests("""\
        @script("echo rate: 4; exec sleep 600", time_limit=3)
        def test_endless(run): pass

        @script("echo rate: 4; exit 3")
        def test_bad(run): pass
    """)
    result = suite.run()
    result.expect(1, "time_limit: ", "worker_exit: ", "exit code 3", failed=2)
    assert sorted(result.verdicts()) == ["time_limit", "worker_exit"]
    ended_alone(suite)


def test_a_job_at_grid_engines_own_time_limit_says_so(suite):
    suite.partition(arguments=[["-l", "h_rt=5"]])
    suite.tests(f"""\
        @script({gate(suite.folder, "one")!r})
        def test_one(run): pass
    """)
    result = suite.run()
    result.expect(1, "time_limit:", "the allocation reached its time limit", failed=1)
    assert result.verdicts() == ["time_limit"]
    ended_alone(suite)


def test_a_killed_sessions_job_goes_on_and_is_judged_by_the_next_once(suite):
    first = suite.begin_gated("one")
    job = suite.running()
    first.until("the id in the ledger", lambda: any(job in path.read_text() for path in suite.ledgers()))
    first.kill()
    assert suite.cluster.state(job) == "r"
    suite.go()

    result = suite.run()

    result.expect(0, "going on with 1 run of an earlier session", passed=1)
    assert [record["job_id"] for record in result.records] == [job]
    ended_alone(suite)


def test_ctrl_c_cancels_the_job_on_both_hosts(suite):
    suite.tests(f"""\
        @script({gate(suite.folder, "one")!r}, nodes=2, ranks_per_node=1)
        def test_one(run): pass
    """)
    session = suite.begin("one")
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    ended_alone(suite)


def test_the_job_of_a_killed_session_is_ended_by_reap(suite):
    session = suite.begin_gated("one")
    job = suite.running()
    session.until("the id in the ledger", lambda: any(job in path.read_text() for path in suite.ledgers()))
    session.kill()

    suite.reap()

    ended_alone(suite)


def test_a_submission_whose_answer_was_lost_is_neither_lost_nor_made_twice(suite):
    # The real qsub submits, and its answer is lost the first time, as when the master is too busy to give it.
    folder, qsub = suite.folder / "bin", shutil.which("qsub")
    folder.mkdir()
    (folder / "qsub").write_text(
        "#!/bin/sh\n"
        f'[ -e {folder}/lost ] && exec {qsub} "$@"\n'
        f'touch {folder}/lost\n{qsub} "$@" >/dev/null\n'
        'echo "Unable to run job: unable to send message to qmaster using port 6444 on host \\"head\\": got send error" >&2\n'
        "exit 1\n"
    )
    (folder / "qsub").chmod(0o755)
    suite.tests(ONE)
    result = suite.run(environment={"PATH": f"{folder}:{os.environ['PATH']}"})
    result.expect(0, passed=1)
    assert suite.cluster.account(str(int(result.records[0]["job_id"]) + 1)).get(
        "jobname"
    ) != suite.cluster.account(result.records[0]["job_id"]).get("jobname")
    ended_alone(suite)


def test_a_run_goes_on_while_the_master_is_away(own_gridengine, make_suite):
    suite = make_suite(own_gridengine)
    session = suite.begin_gated("one")
    own_gridengine.service.kill("qmaster")
    suite.go()
    session.until("lines of the run", lambda: list(suite.state.glob("runs/*/lines/*.over")))
    own_gridengine.service.start()
    result = session.end()
    result.expect(0, passed=1)
    ended_alone(suite)
