"""What events tell of a workload without pods, and of a pod that does not start; events are as servers write them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import ANY, Mock

import pytest

from pytest_mlhpc.provision.kubernetes.api import Listing
from pytest_mlhpc.provision.kubernetes.causes import Cause, PodView, Stage
from pytest_mlhpc.provision.kubernetes.errors import Call, Forbidden
from pytest_mlhpc.provision.kubernetes.inquiry import Inquirer, why_no_pods, why_no_start
from pytest_mlhpc.provision.kubernetes.kinds import kind_of
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.resources import JOB, ObjectRef

JOB_X = ObjectRef(JOB, "mine", "x", "u")
PREPARING = PodView("p", "u", Stage.PREPARING, node="n1")
LATER = "2026-01-01T00:09:00Z"


def event(reason, message, when="2026-01-01T00:00:00Z"):
    return {"reason": reason, "message": message, "lastTimestamp": when}


@pytest.mark.parametrize(
    ("message", "outcome", "patience"),
    [
        ('Error creating: pods "x" is forbidden: exceeded quota: small, used: pods=1', "quota_exceeded", "quota"),
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
        pytest.param(None, PREPARING, None, id="a pod of which nothing may be told is waited for"),
        pytest.param(
            None, PodView("p", "u", Stage.UNSCHEDULED),
            ("never_scheduled", "unknown", "", "p: no scheduler has looked at it yet"), id="a pod at which no scheduler looks",
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
            pods={}, plan=SimpleNamespace(nodes=1), status_words="", suspended=True, ask_at=1.0, said=None,
            api=SimpleNamespace(list=listed), kind=kind_of(KubernetesSettings(kind="kueue")), workloads={"x": JOB_X},
        )  # fmt: skip
        now = [0.0]
        inquirer = Inquirer(lambda: now[0])
        for now[0] in times:
            inquirer.ask(allocation)
        return allocation, listed.mock_calls

    return go


def test_a_suspended_workload_waits_for_what_its_queue_says(ask):
    reason = {"reason": "Pending", "message": "no quota for 8 GPUs"}
    status = {"conditions": [{"type": "QuotaReserved", "status": "False", **reason}]}
    workload = {"metadata": {"name": "job-x-1"}, "status": status}
    allocation, ((_, (resource,), named),) = ask([Listing((workload,), "1")], 2.0)
    assert str(resource) == "workloads.kueue.x-k8s.io"
    assert named == {"labels": "kueue.x-k8s.io/job-uid=u", "namespace": "mine"}
    expected = Cause("never_scheduled", "Workload job-x-1: Pending: no quota for 8 GPUs", "admission")
    assert allocation.said == expected


def test_a_queue_that_may_not_be_asked_is_asked_no_sooner_than_after_half_a_minute(ask):
    call = Call("list", "workloads.kueue.x-k8s.io", "", "mine", "https://s")
    allocation, asked = ask(Forbidden(call, "no", status=403), 2.0, 20.0, 31.9, 32.0)
    assert (allocation.said, len(asked)) == (None, 2)
