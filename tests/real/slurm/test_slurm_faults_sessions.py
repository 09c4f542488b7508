"""Sessions that end before their jobs do, and what later ones make of that: each result once, nothing left behind."""

import json
import os
import shutil
import signal

import pytest
from faults import XDIST, gate, killed_at_every_step_of_the_ledger
from running_suites import LIMIT_S, wait_for

OTHER = '@script("echo rate: 4")\ndef test_other(run): pass\n'
ALONE_AND_XDIST = pytest.mark.parametrize("options", [(), XDIST], ids=["alone", "xdist"])


def test_what_waits_runs_or_has_ended_when_a_session_is_killed_is_judged_by_the_next(suite):
    folder = suite.folder
    suite.partition(also={"held": {"sbatch": ["--hold"]}})
    suite.tests(f"""\
        @script("touch {folder}/begun-held; echo rate: 4")
        def test_held(run): pass

        @script({gate(folder, "running")!r})
        def test_running(run): pass

        @script("touch {folder}/begun-over; while [ ! -e {folder}/end ]; do sleep 0.2; done; echo rate: 4")
        def test_over(run): pass

        @script("touch {folder}/begun-unwanted; exec sleep 600")
        def test_unwanted(run): pass
    """)
    wanted = suite.ids("held", "running", "over")
    first = suite.begin("running", "over", "unwanted", options=[*wanted, *suite.ids("unwanted")])
    suite.accepted(first)
    jobs = {name: suite.job_of(name).id for name in ("held", "running", "over", "unwanted")}
    first.kill()
    (folder / "end").touch()
    wait_for(lambda: suite.job_of("over").ended)

    second = suite.start(*wanted)
    second.until("going on", lambda: "going on with 3 runs of an earlier session" in second.text)
    suite.release()
    suite.go()
    result = second.end()
    left = jobs.pop("unwanted")
    result.expect(
        0, f"(job {left}) on cluster:part:", f"ended without detaching: cancelled job {left}", passed=3
    )
    records = {
        record["node_id"].partition("::test_")[2].partition("[")[0]: record for record in result.records
    }
    assert {name: record["job_id"] for name, record in records.items()} == jobs
    assert len(result.records) == 3
    ended = [json.loads(path.read_text())["ended_ns"] for path in suite.lines("over")]
    assert records["over"]["created_ns"] <= min(ended)
    assert {job.state for job in suite.jobs() if job.id == left} == {"CANCELLED"}
    assert suite.ledgers() == []


@ALONE_AND_XDIST
def test_ctrl_c_cancels_what_runs_and_what_waits(suite, options):
    suite.partition(also={"held": {"sbatch": ["--hold"]}})
    suite.tests(f"""\
        @script({gate(suite.folder, "one")!r})
        def test_running(run): pass

        @script("echo rate: 4")
        def test_held(run): pass
    """)
    session = suite.begin("one", options=[*options, *suite.ids("running", "held")])
    session.until("two jobs", lambda: len(suite.jobs()) == 2)
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    assert [job.state for job in suite.jobs()] == ["CANCELLED"] * 2
    assert suite.ledgers() == []


def test_ctrl_c_twice_leaves_nothing_that_the_next_session_does_not_end(suite):
    # This one ignores SIGTERM, so that cancelling takes KillWait, within which the second Ctrl-C comes.
    suite.tests(f"""\
        @script("trap '' TERM; touch {suite.folder}/begun-one; while :; do sleep 1; done")
        def test_one(run): pass
    """)
    session = suite.begin("one")
    session.signal(signal.SIGINT)
    session.until("the first Ctrl-C", lambda: suite.jobs()[0].state != "RUNNING")
    session.signal(signal.SIGINT)
    result = session.end()
    result.expect(
        2, f"these jobs may still be running: {suite.jobs()[0].id}; the next session or `mlhpc reap`"
    )
    assert "Traceback" not in result.text
    suite.tests(OTHER, "test_other.py")
    suite.run("test_other.py").expect(0, passed=1)
    wait_for(lambda: suite.jobs()[0].state != "COMPLETING")
    assert suite.jobs()[0].state == "CANCELLED"
    assert suite.ledgers() == []


def left_to_a_later_session(suite, number, *options):
    """Send *number* to a session while its job runs: the job goes on, and a later session judges it, once."""
    session = suite.begin_gated("one", options=options)
    session.signal(number)
    session.end().expect(75, signal.Signals(number).name)
    assert [job.state for job in suite.jobs()] == ["RUNNING"]
    suite.run("--mlhpc-wait", "1s").expect(75, skipped=1)
    suite.go()
    suite.run("--mlhpc-resume" if options else "-v").expect(0, passed=1)
    suite.once()


@ALONE_AND_XDIST
def test_sigterm_leaves_jobs_to_a_later_session(suite, options):
    left_to_a_later_session(suite, signal.SIGTERM, *options)


@ALONE_AND_XDIST
def test_a_dropped_connection_leaves_jobs_to_a_later_session(suite, options):
    left_to_a_later_session(suite, signal.SIGHUP, *options)


def test_sessions_of_one_user_keep_their_jobs_apart(suite):
    # Where nothing that waits for all nodes keeps the last job waiting, and no test drains a node.
    suite.partition("gpu", nodelist="gpu1")
    suite.gated("one", "two")
    first, second = suite.start(), suite.start()
    first.until("four jobs", lambda: [job.state for job in suite.jobs()] == ["RUNNING"] * 4)
    suite.tests(OTHER, "test_other.py")
    other = suite.run("test_other.py")
    other.expect(0, passed=1)
    assert "reaped" not in other.text
    assert [job.state for job in suite.jobs()[:4]] == ["RUNNING"] * 4
    suite.go()
    first.end().expect(0, passed=2)
    result = second.end()
    result.expect(0, passed=2)
    assert sorted(record["job_id"] for record in result.records) == sorted(job.id for job in suite.jobs())
    assert {job.state for job in suite.jobs()} == {"COMPLETED"}


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(5))
def test_a_session_killed_while_it_finishes_gives_each_result_once(suite, moment):
    first = suite.begin_gated("one")
    suite.go()
    marks = [
        lambda: list(suite.lines("over")),
        suite.records,
        lambda: "passed" in first.text or "PASSED" in first.text or "100%" in first.text,
        lambda: not suite.ledgers(),
        lambda: suite.jobs()[0].ended,
    ]
    wait_for(lambda: first.process.poll() is not None or marks[moment]())
    first.kill()
    recorded = bool(suite.records())
    if suite.ledgers():  # maybe without an open entry
        result = suite.run("--mlhpc-resume")
        assert (result.code, recorded) in {(0, True), (0, False), (5, True)}, result.text
    suite.once()


@pytest.mark.parametrize("moment", ["before", "after", "after, and the job has ended"])
def test_a_session_killed_while_it_submits_leaves_one_job_that_the_next_one_finds(suite, moment):
    """The ledger has the job's name, not its number."""
    folder, real = suite.folder / "bin", shutil.which("sbatch")
    folder.mkdir()
    lines = [f'{real} "$@" >/dev/null'] if moment != "before" else []
    (folder / "sbatch").write_text("\n".join(["#!/bin/sh", *lines, "kill -9 $PPID"]) + "\n")
    (folder / "sbatch").chmod(0o755)
    suite.gated("one")
    first = suite.start(environment={"PATH": f"{folder}:{os.environ['PATH']}"})
    assert first.process.wait(LIMIT_S) == -signal.SIGKILL
    if moment != "after":
        suite.go()
    if moment.endswith("ended"):
        wait_for(lambda: all(job.ended for job in suite.jobs()))
    second = suite.start()
    if moment == "after":
        second.until("going on", lambda: "going on with 1 run of an earlier session" in second.text)
        suite.go()
    second.end().expect(0, passed=1)
    suite.once()


@pytest.mark.slow
def test_sessions_killed_at_every_change_of_claim_and_close_lose_no_job_and_give_its_result_once(suite):
    killed_at_every_step_of_the_ledger(suite)
    jobs = {job.id: job.state for job in suite.jobs()}
    assert jobs == {record["job_id"]: "COMPLETED" for record in suite.records()}
