"""Jobs of a real Grid Engine that are refused, killed, or outlive their session: what a user reads, the record, nothing left."""

import os
import signal

import pytest
from faults import ONE, gate
from running_suites import wait_for
from sshd_service import all_pids, command_line

from pytest_mlhpc.node.processes import descendants


def test_a_waiting_job_that_others_delete_was_cancelled_from_outside(suite):
    suite.partition({"arguments": [["-h"]]})
    suite.tests(ONE)
    session = suite.start()
    session.until("held job", lambda: list(suite.jobs().values()) == ["hqw"])
    (job,) = suite.jobs()
    assert suite.cluster.run("qdel", job).returncode == 0
    result = session.end()
    result.expect(1, job, error=1)
    assert result.verdicts() == ["cancelled_outside"]
    suite.ended_alone()


def test_a_held_job_is_given_up_after_the_pending_limit_and_cancelled(suite):
    suite.partition({"arguments": [["-h"]], "pending_limit": "3s"})
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "never_scheduled:", "the pending limit is 3 s", error=1)
    suite.ended_alone()


def test_a_job_in_error_is_cancelled_as_waiting_does_not_help(suite):
    suite.partition({"arguments": [["-o", "/etc/passwd/none"]]})
    suite.tests(ONE)
    result = suite.run()
    result.expect(1, "never_scheduled:", "Eqw", error=1)
    suite.ended_alone()


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
    suite.ended_alone()


def test_a_killed_sessions_job_goes_on_and_is_judged_by_the_next_once(suite):
    first = suite.begin_gated("one")
    job = suite.running()
    first.until("the id in the ledger", suite.job_ids)
    first.kill()
    assert suite.cluster.state(job) == "r"
    suite.go()

    result = suite.run()

    result.expect(0, "going on with 1 run of an earlier session", passed=1)
    assert [record["job_id"] for record in result.records] == [job]
    suite.ended_alone()


def test_ctrl_c_cancels_the_job_on_both_hosts(suite):
    suite.tests(f"""\
        @script({gate(suite.folder, "one")!r}, nodes=2, ranks_per_node=1)
        def test_one(run): pass
    """)
    session = suite.begin("one")
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    suite.ended_alone()


def test_a_run_goes_on_while_the_master_is_away(own_gridengine, make_suite):
    suite = make_suite(own_gridengine)
    session = suite.begin_gated("one")
    own_gridengine.service.kill("qmaster")
    suite.go()
    session.until("lines of the run", lambda: list(suite.state.glob("runs/*/lines/*.over")))
    own_gridengine.service.start()
    result = session.end()
    result.expect(0, passed=1)
    suite.ended_alone()


@pytest.mark.slow
def test_a_job_whose_host_dies_is_given_up_and_run_again_on_another(own_gridengine, make_suite):
    """Grid Engine calls it running for ever, and its host takes minutes to be lost: see LOST_BATCH_S."""
    suite = make_suite(own_gridengine)
    session = suite.begin_gated("one")
    job = suite.running()
    host = own_gridengine.host(job)
    own_gridengine.service.kill(host)
    suite.go()

    result = session.end(limit_s=900.0)

    result.expect(1, f"these jobs may still be running: {job}", passed=1)
    assert result.verdicts() == ["node_failure", "unjudged"]
    assert f"Grid Engine job {job} runs" in result.records[0]["failure"]
    assert host not in result.records[1]["nodes"]
    own_gridengine.service.start()  # the master learns that the host has no such job any more
    wait_for(lambda: suite.reap(code=None) and suite.ledgers() == [])
    suite.ended_alone()


def test_a_killed_first_process_of_a_job_on_two_hosts_leaves_nothing_on_them(suite):
    """It starts the agents; its child is the batch."""
    text = '@script("touch {folder}/begun-$RANK; exec sleep 601", nodes=2, ranks_per_node=1)\ndef test_it(run): pass\n'
    suite.tests(text.replace("{folder}", str(suite.folder)))
    session = suite.start()
    session.until("both ranks", lambda: all((suite.folder / f"begun-{rank}").exists() for rank in (0, 1)))

    def first() -> list[int]:
        mine = processes(str(suite.state))
        return [pid for pid, words in mine.items() if "pytest_mlhpc.node.batch.job_nodes" in words]

    wait_for(lambda: len(first()) == 2)  # a process that starts another one is two for a moment
    (parent,) = [pid for pid in first() if set(descendants(pid)) & set(first())]
    os.kill(parent, signal.SIGKILL)
    result = session.end()
    result.expect(1, "cancelled_outside: Grid Engine job", error=1)
    wait_for(lambda: not processes(str(suite.state)))
    suite.ended_alone()


def processes(text):
    """Return pid -> arguments of all processes with *text* in these."""
    found = {pid: command_line(pid) for pid in all_pids()}
    return {pid: words for pid, words in found.items() if any(text in word for word in words)}
