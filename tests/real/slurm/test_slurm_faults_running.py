"""Jobs that go wrong while they run, end to end on the real cluster."""

import signal
from pathlib import Path

import pytest
from faults import XDIST, Fault, check_faults, gate, reports_of, verdicts_of
from running_suites import text_of, wait_for


@pytest.mark.parametrize("options", [(), XDIST], ids=["alone", "xdist"])
def test_what_ends_badly_is_named_and_what_others_cancel_is_not_the_tests_fault(suite, options):
    suite.partition(also={"held": {"sbatch": ["--hold"]}})
    suite.tests(text_of(__file__, "bad_ends.py.txt", FOLDER=str(suite.folder)))
    tests = suite.ids("good", "bad", "endless", "dead", "cancelled", "held", "too_long")
    session = suite.begin("cancelled", options=[*options, *tests])
    session.until("six jobs", lambda: len(suite.jobs()) == 6)
    cancelled, held = suite.job_of("cancelled"), suite.job_of("held")
    suite.slurm.run("scancel", cancelled.id, held.id)
    result = session.end()
    result.expect(1, passed=1, failed=3, error=3)
    (bad,) = [record for record in result.records if "::test_bad[" in record["node_id"]]
    outside = "it was cancelled from outside"
    check_faults(result, [
        Fault("bad", "worker_exit", ["exit code 3", f"ran on: {bad['nodes'][0]} (job {bad['job_id']}"]),
        Fault("endless", "time_limit", ["3 s"]),
        Fault("dead", "worker_exit", ["rank 1 on node", "ended with exit code 7"]),
        Fault("cancelled", "cancelled_outside", [f"Slurm job {cancelled.id} CANCELLED", outside]),
        Fault("held", "cancelled_outside", [f"Slurm job {held.id} CANCELLED", outside]),
        Fault("too_long", "rejected", ["but MaxTime of Slurm's partition cpu is 3600 s"]),
    ])  # fmt: skip
    assert verdicts_of(result)["good"] == "unjudged"
    assert len(suite.jobs()) == 6


@pytest.mark.slow
def test_a_job_at_the_allocations_time_limit_says_so(suite):
    session = suite.begin_gated("one")
    suite.slurm.run("scontrol", "update", f"JobId={suite.job('RUNNING').id}", "TimeLimit=1")
    result = session.end()
    result.expect(1, "time_limit:", "TIMEOUT", "the allocation reached its time limit", failed=1)
    assert result.verdicts() == ["time_limit"]


def test_a_job_that_others_preempt_is_run_again(own_slurm, make_suite):
    suite = make_suite(own_slurm)
    suite.partition("low", exclusive=True)
    session = suite.begin_gated("one")
    first = suite.job("RUNNING")
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


def test_a_job_that_is_requeued_and_one_whose_node_dies_are_run_again_as_others_and_reported_once(
    own_slurm, make_suite
):
    suite = make_suite(own_slurm)
    suite.partition(exclusive=True)
    names = ("requeued", "lost")
    session = suite.begin_gated(*names)
    first = {name: suite.job_of(name) for name in names}
    own_slurm.run("scontrol", "update", f"JobId={first['requeued'].id}", "Requeue=1")
    assert own_slurm.run("scontrol", "requeue", first["requeued"].id).returncode == 0
    own_slurm.kill_node(first["lost"].nodes)
    session.until("second jobs", lambda: all(suite.job_of(name).id != first[name].id for name in names))
    suite.go()
    result = session.end()
    result.expect(0, passed=2)
    records = {name: [one for one in result.records if f"::test_{name}[" in one["node_id"]] for name in names}
    verdicts = {name: [record["verdict"] for record in found] for name, found in records.items()}
    assert verdicts == {"requeued": ["preempted", "unjudged"], "lost": ["node_failure", "unjudged"]}
    assert f"Slurm job {first['requeued'].id}" in records["requeued"][0]["failure"]
    assert "requeued" in records["requeued"][0]["failure"]
    assert f"node {first['lost'].nodes} is down" in records["lost"][0]["failure"]
    assert first["lost"].nodes not in records["lost"][1]["nodes"]


@pytest.mark.slow
def test_a_node_that_dies_under_the_second_of_three_packed_runs_costs_only_what_had_not_ended(
    own_slurm, make_suite
):
    suite = make_suite(own_slurm)
    suite.tests(f"""\
        @script("echo rate: 4")
        def test_first(run): pass

        @script({gate(suite.folder, "one")!r})
        def test_second(run): pass

        @script("echo rate: 4")
        def test_third(run): pass
    """)
    session = suite.begin("one", options=["--mlhpc-pack"])
    first = suite.job("RUNNING")
    own_slurm.kill_node(first.nodes)
    session.until("a second job", lambda: len(suite.jobs()) > 1)
    suite.go()
    result = session.end()
    result.expect(0, passed=3)
    assert sorted(result.verdicts()) == ["node_failure", "node_failure", "unjudged", "unjudged", "unjudged"]


def test_what_uses_more_memory_than_it_may_is_out_of_memory_and_the_next_program_runs(
    start_own_slurm, make_suite
):
    if not Path("/sys/fs/cgroup/memory").is_dir():
        pytest.skip(
            "this kernel has no memory controller of cgroup v1, by which the test cluster limits memory"
        )
    suite = make_suite(start_own_slurm("--accounting", "none", "--cgroup", "v1"))
    suite.partition(memory="300MiB")
    suite.tests("""\
        def python(text, **ranks):
            return program([sys.executable, "-c", text], RATE, judge=False, **ranks)

        @python("x = b'x' * (1 << 30); print('rate: 4')", ranks_per_node=1)
        def test_greedy(run): pass

        @python("x = b'x' * (1 << 30); print('rate: 4')")
        def test_greedy_in_the_batch(run): pass

        @python("print('rate: 4')")
        def test_modest(run): pass
    """)
    result = suite.run("--mlhpc-pack")
    result.expect(1, passed=1, failed=2)
    logs = "\n".join(log.read_text() for log in suite.state.rglob("launcher.log"))
    greedy = {"greedy": "out_of_memory", "greedy_in_the_batch": "out_of_memory"}
    assert verdicts_of(result) == {**greedy, "modest": "unjudged"}, logs
    assert all("out_of_memory:" in reports_of(result)[name] for name in greedy), logs
    assert len(suite.jobs()) == 1


def test_a_job_requeued_between_sessions_does_nothing_twice_and_is_run_again_by_the_next_one(suite):
    suite.tests(f"""\
        @script("echo begun >>{suite.folder}/begun-one; while [ ! -e {suite.folder}/go ]; do sleep 0.2; done; echo rate: 4")
        def test_one(run): pass
    """)
    session = suite.begin("one")
    first = suite.job("RUNNING")
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


def test_a_step_that_somebody_cancels_is_an_error_and_a_launchers_message_alone_is_none(suite):
    words = "slurmstepd: error: *** STEP 1.0 ON n CANCELLED AT 2026-01-01T00:00:00 ***"
    suite.tests(f"""\
        @script("touch {suite.folder}/begun-taken; exec sleep 600", ranks_per_node=1)
        def test_taken(run): pass

        @script("echo '{words}' >&2; echo rate: 4", ranks_per_node=1)
        def test_talks(run): pass
    """)
    session = suite.begin("taken")
    job = suite.job_of("taken")
    steps = suite.slurm.run(
        "squeue", "--steps", "--noheader", "--format=%i", f"--jobs={job.id}"
    ).stdout.split()
    suite.slurm.run("scancel", *(step for step in steps if step.rpartition(".")[2].isdigit()))
    result = session.end()
    result.expect(
        1, "cancelled_outside: ", "the run's job step was cancelled from outside", passed=1, error=1
    )
    assert sorted(result.verdicts()) == ["cancelled_outside", "unjudged"]
