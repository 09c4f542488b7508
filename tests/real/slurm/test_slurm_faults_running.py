"""Jobs that go wrong while they run, end to end on the real cluster."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_suites import wait_for

ENDLESS = """\
@script("touch {folder}/begun-one; exec sleep 600", time_limit={limit})
def test_one(run): pass
"""


def endless(suite, limit: float = 100) -> None:
    suite.tests(ENDLESS.format(folder=suite.folder, limit=limit))


def test_a_run_that_hangs_ends_at_its_time_limit(suite):
    endless(suite, limit=3)
    result = suite.run()
    result.expect(1, "time_limit:", "3 s", failed=1)
    assert result.verdicts() == ["time_limit"]


@pytest.mark.slow
def test_a_job_at_the_allocations_time_limit_says_so(suite):
    endless(suite)
    session = suite.start()
    session.begun("one")
    suite.slurm.run("scontrol", "update", f"JobId={session.job('RUNNING').id}", "TimeLimit=1")
    result = session.end()
    result.expect(1, "time_limit:", "TIMEOUT", "the allocation reached its time limit", failed=1)
    assert result.verdicts() == ["time_limit"]


def test_a_running_job_that_somebody_cancels_is_not_the_tests_fault(suite):
    endless(suite)
    session = suite.start()
    session.begun("one")
    job = session.job("RUNNING")
    suite.slurm.run("scancel", job.id)
    result = session.end()
    result.expect(
        1, f"cancelled_outside: Slurm job {job.id} CANCELLED", "somebody else cancelled it", error=1
    )
    assert result.verdicts() == ["cancelled_outside"]


def test_a_rank_that_dies_ends_the_others_and_is_named(suite):
    suite.tests("""\
        @script("if [ $SLURM_PROCID = 1 ]; then exit 7; fi; exec sleep 600", nodes=2, devices=2, launcher="srun")
        def test_one(run): pass
    """)
    result = suite.run()
    result.expect(1, "worker_exit: rank 1 on node", "ended with exit code 7", failed=1)
    assert result.verdicts() == ["worker_exit"]


def test_a_job_that_others_preempt_is_run_again(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.partition("low", exclusive=True)
    suite.gated("one")
    session = suite.start()
    session.begun("one")
    first = session.job("RUNNING")
    taker = own_slurm.run(
        "sbatch", "--parsable", "-p", "cpu", "-w", first.nodes, "--exclusive", "-o", "/dev/null", "-D", "/tmp",
        "--wrap", "sleep 600",
    )  # fmt: skip
    session.until("its end", lambda: suite.jobs()[0].state == "PREEMPTED")
    suite.go()
    result = session.end()
    own_slurm.run("scancel", taker.stdout.strip())
    result.expect(0, passed=1)
    assert result.verdicts() == ["preempted", "unjudged"]
    assert result.records[0]["failure"].startswith(f"preempted: Slurm job {first.id} PREEMPTED")


def test_a_job_that_an_administrator_requeues_is_run_again_as_another_and_reported_once(
    own_slurm, make_suite
):
    suite = make_suite(own_slurm)
    suite.gated("one")
    session = suite.start()
    session.begun("one")
    first = session.job("RUNNING")
    own_slurm.run("scontrol", "update", f"JobId={first.id}", "Requeue=1")
    assert own_slurm.run("scontrol", "requeue", first.id).returncode == 0
    session.until("a second job", lambda: len(suite.jobs()) == 2)
    suite.go()
    result = session.end()
    result.expect(0, passed=1)
    assert result.verdicts() == ["preempted", "unjudged"]
    assert f"Slurm job {first.id}" in result.records[0]["failure"]
    assert "requeued" in result.records[0]["failure"]


def test_a_node_that_dies_under_a_run_is_named_and_the_run_made_elsewhere(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.gated("one")
    session = suite.start()
    session.begun("one")
    first = session.job("RUNNING")
    own_slurm.kill_node(first.nodes)
    session.until("a second job", lambda: len(suite.jobs()) == 2)
    suite.go()
    result = session.end()
    result.expect(0, passed=1)
    lost, made = result.records
    assert (lost["verdict"], made["verdict"]) == ("node_failure", "unjudged")
    assert f"node {first.nodes} is down" in lost["failure"]
    assert first.nodes not in made["nodes"]


@pytest.mark.slow
def test_a_node_that_dies_under_the_second_of_three_packed_runs_costs_only_what_had_not_ended(
    own_slurm, make_suite
):
    suite = make_suite(own_slurm)
    suite.tests(f"""\
        @script("echo rate: 4")
        def test_first(run): pass

        @script("touch {suite.folder}/begun-one; while [ ! -e {suite.folder}/go ]; do sleep 0.2; done; echo rate: 4")
        def test_second(run): pass

        @script("echo rate: 4")
        def test_third(run): pass
    """)
    session = suite.start("--pack")
    session.begun("one")
    first = session.job("RUNNING")
    own_slurm.kill_node(first.nodes)
    session.until("a second job", lambda: len(suite.jobs()) > 1)
    suite.go()
    result = session.end()
    result.expect(0, passed=3)
    assert sorted(result.verdicts()) == ["node_failure", "node_failure", "unjudged", "unjudged", "unjudged"]


def test_a_step_that_uses_more_memory_than_it_may_is_out_of_memory_and_the_next_one_runs(
    start_own_slurm, make_suite
):
    if not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip(
            "this kernel has no memory controller of cgroup v1, by which the test cluster limits memory"
        )
    suite = make_suite(start_own_slurm("--accounting", "none", "--cgroup", "v1"))
    suite.partition(memory="300MiB")
    suite.tests("""\
        def python(text):
            return pytest.mark.job(
                "command", argv=[sys.executable, "-c", text], metrics=RATE, judge=False, launcher="srun"
            )

        @python("x = b'x' * (1 << 30); print('rate: 4')")
        def test_greedy(run): pass

        @python("print('rate: 4')")
        def test_modest(run): pass
    """)
    result = suite.run("--pack")
    result.expect(1, "out_of_memory:", passed=1, failed=1)
    assert sorted(result.verdicts()) == ["out_of_memory", "unjudged"]
    assert len(suite.jobs()) == 1


def test_workers_of_xdist_tell_the_same_of_good_broken_and_refused_runs(suite):
    suite.tests("""\
        @script("echo rate: 4")
        def test_good(run): pass

        @script("exit 3")
        def test_bad(run): pass

        @script("echo rate: 4", nodes=4, devices=4, launcher="srun", time_limit=86400)
        def test_too_long(run): pass
    """)
    result = suite.run("-n", "2")
    result.expect(
        1,
        "worker_exit:",
        "exit code 3",
        "but MaxTime of Slurm's partition cpu is 3600 s",
        passed=1,
        failed=1,
        error=1,
    )
    assert sorted(result.verdicts()) == ["unjudged", "worker_exit"]
    assert len(suite.jobs()) == 2


def test_under_xdist_a_cancelled_job_and_a_dead_rank_are_told_as_without_it(suite):
    suite.tests(f"""\
        @script("touch {suite.folder}/begun-one; exec sleep 600")
        def test_cancelled(run): pass

        @script("if [ $SLURM_PROCID = 1 ]; then exit 7; fi; exec sleep 600", nodes=2, devices=2, launcher="srun")
        def test_dead(run): pass
    """)
    session = suite.start("-n", "2")
    session.begun("one")
    (single,) = [job for job in suite.jobs() if job.nodes and "[" not in job.nodes and job.state == "RUNNING"]
    suite.slurm.run("scancel", single.id)
    session.end().expect(
        1, f"cancelled_outside: Slurm job {single.id}", "worker_exit: rank 1 on", failed=1, error=1
    )


def test_a_job_requeued_while_nobody_looks_does_nothing_twice_and_is_run_again_by_the_next_session(suite):
    suite.tests(f"""\
        @script("echo begun >>{suite.folder}/begun-one; while [ ! -e {suite.folder}/go ]; do sleep 0.2; done; echo rate: 4")
        def test_one(run): pass
    """)
    session = suite.start()
    session.begun("one")
    first = session.job("RUNNING")
    session.signal(signal.SIGTERM)
    session.end().expect(75)
    suite.slurm.run("scontrol", "update", f"JobId={first.id}", "Requeue=1")
    suite.slurm.run("scontrol", "requeue", first.id)
    wait_for(lambda: suite.jobs()[0].state == "PENDING")
    suite.slurm.run("scontrol", "update", f"JobId={first.id}", "StartTime=now")
    wait_for(lambda: suite.jobs()[0].ended)
    assert (suite.folder / "begun-one").read_text() == "begun\n"
    suite.go()
    result = suite.run()
    result.expect(0, passed=1)
    assert result.verdicts() == ["preempted", "unjudged"]
    assert f"Slurm job {first.id} was requeued after it had begun" in result.records[0]["failure"]
