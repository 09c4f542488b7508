"""Sessions that end before their jobs do, and what later ones make of that: each result once, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from fault_suites import wait_for


def ledgers(suite) -> list[str]:
    """Return the open ledgers' names."""
    return [path.name for path in suite.state.glob("ledger/*.jsonl")]


def once(suite) -> None:
    """Assert that one job was submitted in all, and one record was made of it."""
    (job,) = suite.jobs()
    (record,) = suite.records()
    assert (record["verdict"], record["job_id"]) == ("unjudged", job.id)
    assert ledgers(suite) == []


def test_a_session_killed_while_its_job_waits_is_gone_on_with_by_the_next(suite):
    suite.partition(sbatch=["--hold"])
    suite.gated("one")
    suite.go()
    first = suite.start()
    job = first.job("PENDING")
    first.until(
        "the job's id in the ledger", lambda: job.id in next(suite.state.glob("ledger/*.jsonl")).read_text()
    )
    first.kill()
    second = suite.start()
    second.until("going on", lambda: "going on with 1 runs of an earlier session" in second.text)
    suite.slurm.run("scontrol", "release", job.id)
    second.end().expect(0, passed=1)
    once(suite)


def test_a_session_killed_while_its_job_runs_is_gone_on_with_by_the_next(suite):
    suite.gated("one")
    first = suite.start()
    first.begun("one")
    first.kill()
    second = suite.start()
    second.until("going on", lambda: "going on with 1 runs of an earlier session" in second.text)
    suite.go()
    second.end().expect(0, passed=1)
    once(suite)


def test_what_ended_while_nobody_looked_is_judged_by_the_next_dated_by_the_run(suite):
    suite.gated("one")
    first = suite.start()
    first.begun("one")
    first.kill()
    suite.go()
    wait_for(lambda: all(job.ended for job in suite.jobs()))
    (over,) = suite.lines("over")
    suite.run("--resume").expect(0, passed=1)
    once(suite)
    assert suite.records()[0]["created_ns"] <= json.loads(over.read_text())["ended_ns"]
    suite.run("--resume").expect(5, "no earlier session left anything of it", skipped=1)
    once(suite)


def test_another_selection_reaps_what_a_killed_session_left(suite):
    suite.gated("one")
    first = suite.start()
    first.begun("one")
    first.kill()
    suite.tests('@script("echo rate: 4")\ndef test_other(run): pass\n', "test_other.py")
    result = suite.run("test_other.py")
    left, made = suite.jobs()
    result.expect(
        0, f"(job {left.id}) on cluster:part:", f"ended without detaching: cancelled job {left.id}", passed=1
    )
    assert left.state == "CANCELLED"
    assert [record["job_id"] for record in result.records] == [made.id]
    assert ledgers(suite) == []


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_ctrl_c_cancels_all_jobs(suite, options):
    suite.gated("one", "two")
    session = suite.start(*options)
    session.begun("one")
    session.begun("two")
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    assert {job.state for job in suite.jobs()} == {"CANCELLED"}
    assert ledgers(suite) == []


def test_ctrl_c_twice_leaves_nothing_that_the_next_session_does_not_end(suite):
    # This one hears no SIGTERM, so that cancelling takes KillWait, within which the second Ctrl-C comes.
    suite.tests(f"""\
        @script("trap '' TERM; touch {suite.folder}/begun-one; while :; do sleep 1; done")
        def test_one(run): pass
    """)
    session = suite.start()
    session.begun("one")
    session.signal(signal.SIGINT)
    session.until("the first Ctrl-C", lambda: suite.jobs()[0].state != "RUNNING")
    session.signal(signal.SIGINT)
    assert session.end().code in {2, 130, -signal.SIGINT}
    suite.tests('@script("echo rate: 4")\ndef test_other(run): pass\n', "test_other.py")
    suite.run("test_other.py").expect(0, passed=1)
    assert suite.jobs()[0].state == "CANCELLED"
    assert ledgers(suite) == []


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_sigterm_leaves_jobs_to_a_later_session(suite, options):
    suite.gated("one")
    session = suite.start(*options)
    session.begun("one")
    session.signal(signal.SIGTERM)
    session.end().expect(75, "SIGTERM")
    assert [job.state for job in suite.jobs()] == ["RUNNING"]
    suite.run("--wait", "1s").expect(75, skipped=1)
    suite.go()
    suite.run("--resume").expect(0, passed=1)
    once(suite)


def test_two_sessions_of_one_user_keep_their_jobs_apart(suite):
    suite.partition("gpu")  # where nothing that waits for all nodes keeps the last job waiting
    suite.gated("one", "two")
    first, second = suite.start(), suite.start()
    first.until("four jobs", lambda: len([job for job in suite.jobs() if job.state == "RUNNING"]) == 4)
    suite.go()
    first.end().expect(0, passed=2)
    result = second.end()
    result.expect(0, passed=2)
    assert len(result.records) == 4
    assert {record["job_id"] for record in result.records} == {job.id for job in suite.jobs()}
    assert {job.state for job in suite.jobs()} == {"COMPLETED"}


def test_sessions_of_other_tests_start_and_end_without_a_word_about_those_that_run(suite):
    suite.partition("gpu")  # where nothing that waits for all nodes keeps the other's job waiting
    suite.gated("one")
    first = suite.start()
    first.begun("one")
    suite.tests('@script("echo rate: 4")\ndef test_other(run): pass\n', "test_other.py")
    other = suite.run("test_other.py")
    other.expect(0, passed=1)
    assert "reaped" not in other.text
    assert suite.jobs()[0].state == "RUNNING"
    suite.go()
    first.end().expect(0, passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("delay", range(5))
def test_a_session_killed_while_it_finishes_gives_each_result_once(suite, delay):
    suite.gated("one")
    first = suite.start()
    first.begun("one")
    suite.go()
    marks = [
        lambda: list(suite.lines("over")),
        suite.records,
        lambda: "passed" in first.text or "PASSED" in first.text or "100%" in first.text,
        lambda: not ledgers(suite),
        lambda: suite.jobs()[0].ended,
    ]
    wait_for(lambda: first.process.poll() is not None or marks[delay]())
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(60)
    recorded = bool(suite.records())
    if ledgers(suite):  # maybe without an open entry
        result = suite.run("--resume")
        assert (result.code, recorded) in {(0, True), (0, False), (5, True)}, result.text
    once(suite)


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
    assert first.process.wait(120) == -signal.SIGKILL
    if moment != "after":
        suite.go()
    if moment.endswith("ended"):
        wait_for(lambda: all(job.ended for job in suite.jobs()))
    second = suite.start()
    if moment == "after":
        second.until("going on", lambda: "going on with 1 runs of an earlier session" in second.text)
        suite.go()
    second.end().expect(0, passed=1)
    once(suite)
