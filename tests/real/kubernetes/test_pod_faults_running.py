"""Pods that go wrong while they run, end to end on the real cluster: outcome, words, exit code, record, nothing left."""

import base64

import pytest
from admission_webhook import admission_webhook
from faults import XDIST, verdicts_of
from running_suites import text_of


def failure(result, name: str) -> str:
    """Return what the record of a test says of its failure, in one line."""
    (found,) = [one for one in result.records if f"::test_{name}[" in one["node_id"]]
    return " ".join(str(found.get("failure")).split())


def test_what_ends_badly_within_a_pod_is_reported_by_name_and_harms_nobody_else(pod_suite):
    python = pod_suite.cluster.environment["MLHPC_TEST_PYTHON"]
    pod_suite.tests(text_of(__file__, "bad_ends.py.txt", PYTHON=python))
    result = pod_suite.run()
    result.expect(1, "exit code 3", passed=1, failed=5)
    assert verdicts_of(result) == {
        "good": "unjudged", "exit": "worker_exit", "endless": "time_limit", "greedy": "out_of_memory",
        "flood": "out_of_memory", "missing": "worker_exit",
    }  # fmt: skip
    assert "3 s" in failure(result, "endless")
    assert "OOMKilled" in failure(result, "flood")


def test_what_others_do_to_pods_that_run_is_not_the_tests_fault(pod_suite):
    names = ("pod", "job", "deadline")
    session = pod_suite.begin_gated(*names, options=["-o", "mlhpc_infra_exit_code=75"])
    jobs = {name: job_of(pod_suite, name) for name in names}
    pod_suite.kubectl("delete", "pod", "--wait=false", "--selector", f"job-name={jobs['pod']}")
    pod_suite.kubectl("delete", "job", "--wait=false", jobs["job"])
    pod_suite.kubectl("patch", "job", jobs["deadline"], "--patch", '{"spec": {"activeDeadlineSeconds": 1}}')
    result = session.end()
    result.expect(1, failed=1, error=2)
    assert verdicts_of(result) == {
        "pod": "cancelled_outside",
        "job": "cancelled_outside",
        "deadline": "time_limit",
    }
    for name in ("pod", "job"):
        assert f"{jobs[name]}" in failure(result, name)
        assert "was deleted while it ran, though not by this session; it was on 127.0.0." in failure(
            result, name
        )
    assert "DeadlineExceeded: Job was active longer than specified deadline" in failure(result, "deadline")


@pytest.mark.parametrize(
    "injected",
    [
        {"image": "mlhpc.test/busybox:1", "command": ["sleep", "600"]},
        {"image": "mlhpc.test/busybox:1", "command": ["sh", "-c", "sleep 1; exit 3"]},
        {"image": "nowhere.invalid/none:1"},
    ],
    ids=["runs on", "fails", "cannot be pulled"],
)
def test_a_container_that_a_webhook_injects_decides_nothing(pod_suite, kubernetes, tmp_path, injected):
    pod_suite.tests(
        '@script("sleep 4; echo rate: 4")\ndef test_one(run):\n    assert run["rate"].value == 4\n'
    )
    patch = [{"op": "add", "path": "/spec/containers/-", "value": {"name": "proxy", **injected}}]
    with admission_webhook(
        kubernetes, pod_suite.namespace, tmp_path, lambda _: patch, resources=("pods",), kind="mutating"
    ):
        pod_suite.run().expect(0, passed=1)


def job_of(suite, name: str) -> str:
    """Return the Job that runs a gated test: its plan says so."""
    for item in suite.objects("secrets"):
        if f"begun-{name};" in base64.b64decode(item["data"]["plan.json"]).decode():
            return str(item["metadata"]["name"])
    raise AssertionError(f"no plan of {name}")


@pytest.mark.slow
def test_a_single_pod_that_somebody_deletes_is_reported_likewise(pod_suite):
    pod_suite.partition(kind="pods")
    session = pod_suite.begin_gated("one", options=["-o", "mlhpc_infra_exit_code=75"])
    pod_suite.kubectl("delete", "pod", "--wait=false", "--all")
    session.end().expect(75, "cancelled_outside: Pod mlhpc-", "though not by this session", error=1)


@pytest.mark.slow
def test_one_of_two_pods_that_somebody_deletes_is_reported_and_ends_the_other(pod_suite):
    pod_suite.partition(kind="pods")
    pod_suite.tests(f"""\
        @script("touch {pod_suite.folder}/begun-$RANK; exec sleep 600", nodes=2, ranks_per_node=1)
        def test_one(run): pass
    """)
    session = pod_suite.begin("0", "1", options=["-o", "mlhpc_infra_exit_code=75"])
    (second,) = [
        one["metadata"]["name"] for one in pod_suite.objects("pods") if one["metadata"]["name"][-2:] == "-1"
    ]
    pod_suite.kubectl("delete", "pod", "--wait=false", second)
    session.end().expect(75, "cancelled_outside:", second, "127.0.0.", error=1)


def test_of_several_runs_in_one_pod_one_that_fails_costs_no_other(pod_suite):
    pod_suite.tests("""\
        @script("echo rate: 4")
        def test_first(run): pass

        @script("echo rate: 4; exit 3")
        def test_second(run): pass

        @script("yes 0123456789012345678901234567890123456789012345678 | head -c 50000000; echo; echo rate: 4")
        def test_loud(run): pass

        @script("echo rate: 4")
        def test_last(run): pass
    """)
    result = pod_suite.run("--mlhpc-pack", *XDIST)
    assert verdicts_of(result) == {
        "first": "unjudged", "second": "worker_exit", "loud": "output_limit", "last": "unjudged"
    }  # fmt: skip
    result.expect(1, "exit code 3", passed=2, failed=2)
    assert len({record["job_id"] for record in result.records}) == 1
