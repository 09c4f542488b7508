"""Kinds of workload that sites add, on the real cluster, with small controllers in place of the real ones."""

from dataclasses import replace

import pytest
from faults import ONE, read_faults, run_faults
from operators import IPU, JOBSET, PYTORCH, operator, pytorch_pods

#: Two pods, one rank each.
TWO = """\
@script("echo rate: 4", nodes=2, ranks_per_node=1)
def test_two(run):
    assert run["rate"].value == 4
"""


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        pytest.param("pytorchjob", PYTORCH, id="pytorchjob"),
        pytest.param("jobset", JOBSET, id="jobset", marks=pytest.mark.slow),
        pytest.param("ipujob", IPU, id="ipujob", marks=pytest.mark.slow),
    ],
)
def test_a_suite_runs_through_the_kind(pod_suite, kubernetes, kind, rules):
    pod_suite.partition({"nodes": {"max": 1 if kind == "ipujob" else 2}}, kind=kind)
    pod_suite.tests(ONE if kind == "ipujob" else ONE + TWO)
    with operator(kubernetes, pod_suite.namespace, rules):
        result = pod_suite.run()
    result.expect(0, passed=1 if kind == "ipujob" else 2)
    assert {record["job_id"].split("/")[1] for record in result.records} == {rules.plural}


def test_a_suspended_workload_waits_for_its_queue(pod_suite, kubernetes):
    pod_suite.partition(kind="pytorchjob", manifest={"spec": {"runPolicy": {"suspend": True}}})
    pod_suite.tests(ONE)
    with operator(kubernetes, pod_suite.namespace, PYTORCH):
        session = pod_suite.start()
        (found,) = session.until("suspension", lambda: suspensions(pod_suite))
        assert pod_suite.objects("pods") == []
        patch = '{"spec": {"runPolicy": {"suspend": false}}}'
        pod_suite.kubectl("patch", "pytorchjob", found, "--type", "merge", "--patch", patch)
        session.end().expect(0, passed=1)


def suspensions(suite):
    """Return the names of PyTorchJobs whose operator has said that they wait."""
    jobs = suite.objects("pytorchjobs")
    return [job["metadata"]["name"] for job in jobs if "Suspended" in str(job.get("status"))]


def test_what_an_operator_makes_of_a_workload_is_reported_where_it_does_not_end(pod_suite, kubernetes):
    pod_suite.partition(kind="pytorchjob")
    with operator(kubernetes, pod_suite.namespace, PYTORCH):
        run_faults(pod_suite, read_faults(__file__, "operator"))


@pytest.mark.slow
def test_an_operator_that_restarts_what_failed_is_given_the_patience_for_a_crash(pod_suite, kubernetes):
    stubborn = replace(
        PYTORCH, pods=lambda found: [replace(one, restart="OnFailure") for one in pytorch_pods(found)]
    )
    pod_suite.partition(kind="pytorchjob")
    with operator(kubernetes, pod_suite.namespace, stubborn):
        run_faults(pod_suite, read_faults(__file__, "restarting"))


@pytest.mark.slow
def test_a_kind_whose_operator_does_not_run_is_reported_after_a_while(pod_suite, kubernetes):
    pod_suite.partition(kind="pytorchjob")
    with operator(kubernetes, pod_suite.namespace, replace(PYTORCH, pods=lambda _: [])):
        run_faults(pod_suite, read_faults(__file__, "unattended"))
