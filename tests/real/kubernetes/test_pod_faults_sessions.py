"""Sessions that end before their pods do, and what later ones make of that: each result once, nothing left behind."""

import os
import signal

import pytest
from faults import XDIST, gate, killed_at_every_step_of_the_ledger
from running_suites import LIMIT_S, text_of, wait_for

GOING_ON = "going on with 1 run of an earlier session"


def jobs(suite) -> list[str]:
    """Return the names of our Jobs that nobody has asked to delete."""
    return [
        job["metadata"]["name"] for job in suite.objects("jobs") if "deletionTimestamp" not in job["metadata"]
    ]


def once(suite) -> None:
    """Assert that one record was made in all, and that no ledger waits for anything."""
    (record,) = suite.records()
    assert (record["verdict"], suite.ledgers()) == ("unjudged", [])


def killed_at(suite, how: str, when: str, what: str) -> None:
    """Run a session that is killed at this moment."""
    suite.tests(text_of(__file__, "killing_conftest.py.txt", PLACES=repr((when, what, how))), "conftest.py")
    session = suite.start()
    assert session.process.wait(LIMIT_S) == -signal.SIGKILL, session.text
    (suite.folder / "conftest.py").unlink()


MOMENTS = [
    pytest.param("create", "before", "Secret", marks=pytest.mark.slow),
    pytest.param("create", "after", "Secret", marks=pytest.mark.slow),
    ("create", "after", "Job"),
    pytest.param("patch", "before", "Secret", marks=pytest.mark.slow),
    pytest.param("patch", "after", "Secret", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("how", "when", "what"), MOMENTS)
def test_a_session_killed_while_it_creates_leaves_one_job_that_the_next_one_goes_on_with(
    pod_suite, how, when, what
):
    pod_suite.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    killed_at(pod_suite, how, when, what)
    pod_suite.run().expect(0, GOING_ON, passed=1)
    once(pod_suite)


@pytest.mark.parametrize(
    ("how", "when", "what"),
    [("create", "after", "Secret"), pytest.param(*MOMENTS[2], marks=pytest.mark.slow), MOMENTS[3]],
)
def test_what_a_killed_session_has_half_created_is_reaped(pod_suite, how, when, what):
    pod_suite.gated("one")
    killed_at(pod_suite, how, when, what)
    said = pod_suite.reap()
    assert "ended without detaching: deleted " in said
    assert "secrets" in said
    assert (jobs(pod_suite), pod_suite.objects("secrets"), pod_suite.ledgers()) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_session_killed_while_it_clears_up_gives_its_result_once(pod_suite, when):
    pod_suite.tests('@script("echo rate: 4")\ndef test_one(run): pass\n')
    killed_at(pod_suite, "delete", when, "Job")
    result = pod_suite.run("--mlhpc-resume")
    result.expect(0, passed=1)
    assert set(result.records[0]["nodes"]) < {"127.0.0.1", "127.0.0.2"}
    once(pod_suite)
    assert jobs(pod_suite) == []


@pytest.mark.slow
def test_sessions_killed_at_every_change_of_claim_and_close_lose_no_pod_and_give_its_result_once(pod_suite):
    killed_at_every_step_of_the_ledger(pod_suite)
    assert jobs(pod_suite) == []


def test_a_session_killed_while_its_pod_waits_or_runs_is_gone_on_with_by_the_next(pod_suite):
    pod_suite.tests(f"""\
        @script("echo rate: 4", kubernetes={{"resources": {{"limits": {{"example.com/late": "1"}}}}}})
        def test_pending(run): pass

        @script({gate(pod_suite.folder, "one")!r})
        def test_running(run): pass

        @script("touch {pod_suite.folder}/begun-two; while [ ! -e {pod_suite.folder}/gone ]; do sleep 0.2; done; echo rate: 4")
        def test_over(run): pass
    """)
    first = pod_suite.begin("one", "two")
    first.until("Jobs", lambda: len(jobs(pod_suite)) == 3)
    before = set(jobs(pod_suite))
    first.kill()
    (pod_suite.folder / "gone").touch()
    wait_for(lambda: [job for job in pod_suite.objects("jobs") if job["status"].get("succeeded")])
    second = pod_suite.start("-k", "running or over")
    second.until("going on", lambda: "going on with 2 runs of an earlier session" in second.text)
    pod_suite.go()
    result = second.end()
    result.expect(0, passed=2)
    assert len(result.records) == 2
    assert {record["job_id"].rpartition("/")[2] for record in result.records} < before
    assert "reaped mlhpc-" in result.text  # what waited: nobody wants it any more
    assert (jobs(pod_suite), pod_suite.ledgers()) == ([], [])


def test_what_waits_is_left_detached_and_gone_on_with_by_later_sessions(pod_suite):
    pod_suite.gated("one", "two")
    first = pod_suite.run("--mlhpc-pack", "--mlhpc-wait=0")
    first.expect(75, "a later session", skipped=2)
    wait_for((pod_suite.folder / "begun-one").exists)
    (job,) = jobs(pod_suite)
    pod_suite.run("--mlhpc-resume", "--mlhpc-wait", "2s").expect(75, "going on with 2 runs", skipped=2)
    third = pod_suite.start("--mlhpc-resume", *XDIST)
    third.until("going on", lambda: "going on with 2 runs" in third.text)
    third.signal(signal.SIGTERM)
    third.end().expect(75, "SIGTERM")
    assert jobs(pod_suite) == [job]
    pod_suite.go()
    result = pod_suite.run("--mlhpc-pack")
    result.expect(0, passed=2)
    assert {record["job_id"].rpartition("/")[2] for record in result.records} == {job}
    assert len(result.records) == 2
    assert pod_suite.ledgers() == []


@pytest.mark.parametrize("options", [(), pytest.param(XDIST, marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_ctrl_c_ends_what_runs_and_what_waits(pod_suite, options):
    pod_suite.tests("""\
        @script("echo rate: 4", kubernetes={"resources": {"limits": {"example.com/none": "1"}}})
        def test_pending(run): pass
    """, "test_pending.py")  # fmt: skip
    session = pod_suite.begin_gated("one", options=options)
    session.until("two Jobs", lambda: len(jobs(pod_suite)) == 2)
    # A kubelet of 1.20 takes a minute to end a pod that is deleted before it has said that it runs.
    pod_suite.pod("Running")
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    assert (jobs(pod_suite), pod_suite.ledgers()) == ([], [])
    # One that is being deleted has its grace.
    pods = [pod for pod in pod_suite.objects("pods") if "deletionTimestamp" not in pod["metadata"]]
    assert not [pod for pod in pods if pod["status"]["phase"] == "Running"]


def test_a_kubeconfig_that_leads_elsewhere_by_now_ends_nothing_and_forgets_nothing(
    pod_suite, tmp_path, monkeypatch
):
    pod_suite.gated("one")
    pod_suite.run("--mlhpc-wait=0", "-o", "mlhpc_lease=1s").expect(75, skipped=1)
    (job,) = jobs(pod_suite)
    real = os.environ["KUBECONFIG"]
    text = pod_suite.cluster.kubeconfig.read_text()
    (tmp_path / "other").write_text(text.replace("https://127.0.0.1:", "https://localhost:"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    pod_suite.tests('@pytest.mark.skip\n@script("echo")\ndef test_other(run): pass\n', "test_other.py")
    left = "left, as it is a job of another cluster; run `mlhpc reap` there"
    wait_for(lambda: left in pod_suite.reap(code=None))  # once its lease is over
    pod_suite.run("--mlhpc-resume").expect(5, "no earlier session left anything of it", skipped=2)
    assert jobs(pod_suite) == [job]
    monkeypatch.setenv("KUBECONFIG", real)
    assert f"jobs.batch {pod_suite.namespace}/{job}" in pod_suite.reap()
    assert (jobs(pod_suite), pod_suite.ledgers()) == ([], [])


@pytest.mark.slow
def test_no_clock_of_another_host_is_compared_with_ours(pod_suite):
    """The session's clock is a day ahead of the cluster's: its plans, patience and ledgers go by their own."""
    (pod_suite.folder / "conftest.py").write_text(
        "import time\nreal, real_ns = time.time, time.time_ns\n"
        "time.time = lambda: real() + 86400\ntime.time_ns = lambda: real_ns() + 86400 * 10**9\n"
    )
    pod_suite.partition(patience={"unschedulable": "1h"})
    pod_suite.tests('@script("echo rate: 4; date")\ndef test_one(run): assert run["rate"].value == 4\n')
    result = pod_suite.run()
    result.expect(0, passed=1)
    assert set(result.records[0]["nodes"]) < {"127.0.0.1", "127.0.0.2"}
    once(pod_suite)
