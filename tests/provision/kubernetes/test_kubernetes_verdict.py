"""Causes from events: workloads without pods, pods that do not start, queues; events are as servers write them."""

from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest
from pod_worlds import ID, World, pod_of, source

from pytest_mlhpc.provision.kubernetes.causes import FailureCause, PodView, Stage, pod_view
from pytest_mlhpc.provision.kubernetes.client import Listing
from pytest_mlhpc.provision.kubernetes.errors import ApiCall, Forbidden, NotFound
from pytest_mlhpc.provision.kubernetes.objects import JOB, ObjectRef
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, kind_of
from pytest_mlhpc.provision.kubernetes.verdict import read_events, why_no_pods, why_no_start
from pytest_mlhpc.provision.kubernetes.watch import ObjectChanged

JOB_X = ObjectRef(JOB, "mine", "x", "u")
PREPARING = PodView("p", Stage.PREPARING, node="n1")
LATER = "2026-01-01T00:09:00Z"


def event(reason, message, when="2026-01-01T00:00:00Z"):
    return {"reason": reason, "message": message, "lastTimestamp": when}


@pytest.mark.parametrize(
    ("message", "outcome", "patience"),
    [
        ('Error creating: pods "x" is forbidden: exceeded quota: small, used: pods=1', "quota_exceeded", "quota"),
        ('Error creating: pods "x" is forbidden: status unknown for quota: small, resources: pods', "quota_exceeded", "quota"),
        ('Error creating: pods "x" is forbidden: failed quota: q: must specify limits.cpu', "quota_exceeded", "config"),
        ('Error creating: admission webhook "w" denied the request: no', "admission_denied", "config"),
        ('Error creating: pods "x" is forbidden: violates PodSecurity "restricted"', "admission_denied", "config"),
        ('Error creating: pods "x" is forbidden: maximum cpu usage per Container is 1', "admission_denied", "config"),
        ("Error creating: Pod is invalid: spec.x: Required value", "rejected", "config"),
    ],
)  # fmt: skip
def test_why_a_controller_makes_no_pods(message, outcome, patience):
    found = why_no_pods([event("SuccessfulDelete", "other"), event("FailedCreate", message)], JOB_X)
    assert (found.outcome, found.patience, found.text) == (outcome, patience, f"FailedCreate: {message}")


def test_a_workload_without_pods_or_words_may_lack_its_controller():
    found = why_no_pods([], JOB_X)
    assert (found.outcome, found.patience) == ("never_scheduled", "unknown")
    assert found.text.startswith("jobs.batch mine/x lacks pods, and no event says why")


MOUNT = event("FailedMount", "timed out")


@pytest.mark.parametrize(
    ("events", "view", "cause"),
    [
        pytest.param(
            [event("Scheduled", "assigned"), event("FailedMount", 'hostPath "/a" missing')], PREPARING,
            ("container_config", "volume", "n1", 'FailedMount: hostPath "/a" missing'), id="a mount that failed",
        ),
        pytest.param(
            [event("Pulled", "x"), event("FailedMount", "timed out", LATER)], PREPARING,
            ("container_config", "volume", "n1", "FailedMount: timed out"), id="a mount that failed after an image came",
        ),
        pytest.param([MOUNT, event("Pulling", "Pulling image")], PREPARING, None, id="a pod that went on is only slow"),
        pytest.param([MOUNT, event("Pulling", "image", LATER)], PREPARING, None, id="a pod that went on late is only slow"),
        pytest.param(
            [event("Scheduled", "assigned")], PREPARING, ("node_failure", "unknown", "n1", ANY),
            id="a pod of which its kubelet says nothing",
        ),
        pytest.param(None, PREPARING, None, id="a pod whose events cannot be read is waited for"),
        pytest.param(
            None, PodView("p", Stage.UNSCHEDULED),
            ("never_scheduled", "unknown", "", "p: no scheduler has tried to place it yet"), id="a pod at which no scheduler looks",
        ),
    ],
)  # fmt: skip
def test_why_a_pod_does_not_start(events, view, cause):
    found = why_no_start(events, view)
    assert (found and (found.outcome, found.patience, found.node, found.text)) == cause


@pytest.fixture
def ask():
    """Ask a queue of Kueue, at these times, why a suspended workload waits; return the allocation, and what was asked."""

    def go(answer, *times):
        listed = Mock(side_effect=answer)
        allocation = SimpleNamespace(
            pods={}, plan=SimpleNamespace(nodes=1), status_text="", suspended=True, events_at=1.0, event_cause=None,
            api=SimpleNamespace(list=listed), kind=kind_of(KubernetesSettings(kind="kueue")), workloads={"x": JOB_X},
        )  # fmt: skip
        for now in times:
            read_events(allocation, now)
        return allocation, listed.mock_calls

    return go


def test_a_suspended_workload_waits_for_what_its_queue_says(ask):
    reason = {"reason": "Pending", "message": "no quota for 8 GPUs"}
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", **reason}]}
    workload = {"metadata": {"name": "job-x-1"}, "status": status}
    allocation, ((_, (resource,), named),) = ask([Listing((workload,), "1")], 2.0)
    assert str(resource) == "workloads.kueue.x-k8s.io"
    assert named == {"labels": "kueue.x-k8s.io/job-uid=u", "namespace": "mine"}
    expected = FailureCause("never_scheduled", "Workload job-x-1: Pending: no quota for 8 GPUs", "admission")
    assert allocation.event_cause == expected


def test_a_queue_that_may_not_be_asked_is_asked_no_sooner_than_after_half_a_minute(ask):
    call = ApiCall("list", "workloads.kueue.x-k8s.io", "", "mine", "https://s")
    allocation, asked = ask(Forbidden(call, "no", status=403), 2.0, 20.0, 31.9, 32.0)
    assert (allocation.event_cause, len(asked)) == (None, 2)


# --- preemption by a queue


SUSPENDED = {"type": "Suspended", "status": "True", "reason": "JobSuspended", "message": "Job suspended"}
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to make room for team-b"}
NO_QUOTA = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "4 more GPUs needed"}


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """A world whose Jobs wait in a queue of Kueue."""
    return World(tmp_path, monkeypatch, kind="kueue", labels={"kueue.x-k8s.io/queue-name": "q"})


def tell_job(world, *conditions):
    meta = pod_of("uid-2", f"mlhpc-{ID}")["metadata"]
    world.put(ObjectChanged(JOB, {"metadata": meta, "status": {"conditions": list(conditions)}}, source(JOB)))


def serve_workloads(world, served, *conditions):
    """Let the server have Kueue's Workloads in one version of its API."""

    def listed(resource, **_words):
        if resource.version != served:
            raise NotFound(
                ApiCall("list", "workloads", "", "ns", "https://s"), "no such resource", status=404
            )
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
    cause = pod_view(pod).cause
    assert (cause.outcome, cause.node, cause.text) == (outcome, node, f"{reason}: m")
