"""A queue takes back the nodes that it gave: that is a preemption, after which the run is made again."""

import pytest
from pod_worlds import ID, World, pod_of, source

from pytest_mlhpc.provision.kubernetes.api import Listing
from pytest_mlhpc.provision.kubernetes.causes import view
from pytest_mlhpc.provision.kubernetes.errors import Call, NotFound
from pytest_mlhpc.provision.kubernetes.resources import JOB
from pytest_mlhpc.provision.kubernetes.watch import Seen

SUSPENDED = {"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to make room for team-b"}
NO_QUOTA = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "4 more GPUs needed"}


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """A world whose Jobs wait in a queue of Kueue."""
    return World(tmp_path, monkeypatch, kind="kueue", labels={"kueue.x-k8s.io/queue-name": "q"})


def tell_job(world, *conditions):
    meta = pod_of("uid-2", f"mlhpc-{ID}")["metadata"]
    world.put(Seen(JOB, {"metadata": meta, "status": {"conditions": list(conditions)}}, source(JOB)))


def serve_workloads(world, served, *conditions):
    """Let the server have Kueue's Workloads in one version of its API."""

    def listed(resource, **_words):
        if resource.version != served:
            raise NotFound(Call("list", "workloads", "", "ns", "https://s"), "no such resource", status=404)
        return Listing(({"metadata": {"name": "job-x"}, "status": {"conditions": list(conditions)}},), "1")

    world.api.list = listed
    world.api.versions = lambda group: (served,) if group == "kueue.x-k8s.io" else ()


def test_a_job_that_its_queue_suspends_again_was_preempted(queued):
    serve_workloads(queued, "v1beta1", EVICTED)
    queued.submitted()
    tell_job(queued)
    queued.pod(running=True)
    queued.print("started")
    queued.follow(3)
    tell_job(queued, SUSPENDED)
    queued.follow(10)
    queued.vanish(exit=143, deleting=True)
    queued.log_over()

    error = queued.end(200).error
    assert error.outcome == "preempted"
    assert (
        "as by a queue that takes its nodes back: Workload job-x: Preempted: to make room for team-b"
        in str(error)
    )


@pytest.mark.parametrize("served", ["v1beta1", "v1beta2", "v1"])
def test_why_a_queue_lets_nothing_begin_is_known_in_whichever_version_its_api_has(queued, served):
    serve_workloads(queued, served, NO_QUOTA)
    queued.submitted()
    tell_job(queued, SUSPENDED)
    queued.follow(10)
    assert queued.reasons(ID)[-1] == "Workload job-x: Pending: 4 more GPUs needed"


def test_without_its_queues_words_a_suspended_job_says_that_it_is(queued):
    queued.submitted()
    queued.api.versions = lambda _group: ()
    tell_job(queued, SUSPENDED)
    queued.follow(10)
    assert queued.reasons(ID)[-1] == "JobSuspended: Job suspended"


@pytest.mark.parametrize(
    ("kind", "reason", "outcome", "node"),
    [
        ("TerminationTarget", "StoppedByKueue", "preempted", ""),
        ("TerminationTarget", "WorkloadEvictedDueToPreempted", "preempted", ""),
        ("DisruptionTarget", "DeletionByTaintManager", "node_failure", "n1"),
        ("DisruptionTarget", "AReasonOfTomorrow", "evicted", "n1"),
    ],
)
def test_a_pod_that_the_cluster_ends_names_why(kind, reason, outcome, node):
    pod = pod_of("pod-1", "p", running=True)
    pod["status"]["conditions"] = [{"type": kind, "status": "True", "reason": reason, "message": "m"}]
    cause = view(pod).cause
    assert (cause.outcome, cause.node, cause.text) == (outcome, node, f"{reason}: m")
