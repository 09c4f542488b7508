"""What events tell of a workload without pods, and of a pod that does not start; events are as servers write them."""

from __future__ import annotations

from types import SimpleNamespace

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


def event(reason: str, message: str, when: str = "2026-01-01T00:00:00Z") -> dict[str, str]:
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


def test_why_a_pod_does_not_start_names_its_node():
    found = why_no_start(
        [event("Scheduled", "assigned"), event("FailedMount", 'hostPath "/a" missing')], PREPARING
    )
    assert (found.outcome, found.patience, found.node) == ("container_config", "volume", "n1")
    assert found.text == 'FailedMount: hostPath "/a" missing'


@pytest.mark.parametrize("when", ["2026-01-01T00:00:00Z", "2026-01-01T00:09:00Z"])
def test_a_pod_that_goes_on_after_a_failed_mount_is_only_slow(when):
    events = [event("FailedMount", "timed out"), event("Pulling", "Pulling image", when)]
    assert why_no_start(events, PREPARING) is None


def test_a_mount_that_fails_after_an_image_came_counts():
    events = [event("Pulled", "x"), event("FailedMount", "timed out", "2026-01-01T00:09:00Z")]
    assert why_no_start(events, PREPARING).outcome == "container_config"


def test_a_pod_of_which_its_kubelet_says_nothing_is_told_after_a_while():
    found = why_no_start([event("Scheduled", "assigned")], PREPARING)
    assert (found.outcome, found.patience, found.node) == ("node_failure", "unknown", "n1")


def test_a_pod_of_which_nothing_may_be_told_is_waited_for():
    assert why_no_start(None, PREPARING) is None


def test_a_pod_at_which_no_scheduler_looks_is_told_after_a_while():
    found = why_no_start(None, PodView("p", "u", Stage.UNSCHEDULED))
    assert (found.outcome, found.patience, found.text) == (
        "never_scheduled", "unknown", "p: no scheduler has looked at it yet",
    )  # fmt: skip


class Queue:
    """A server that knows one Workload of Kueue, or refuses to tell."""

    def __init__(self, conditions: list[dict[str, str]], error: Exception | None = None) -> None:
        self.conditions, self.error, self.asked = conditions, error, []

    def list(self, resource, *, labels="", namespace=""):
        self.asked.append((str(resource), labels, namespace))
        if self.error is not None:
            raise self.error
        return Listing(({"metadata": {"name": "job-x-1"}, "status": {"conditions": self.conditions}},), "1")


def waiting_in(queue: Queue) -> SimpleNamespace:
    return SimpleNamespace(
        pods={}, plan=SimpleNamespace(nodes=1), status_words="", suspended=True, ask_at=1.0, said=None, api=queue,
        kind=kind_of(KubernetesSettings(kind="kueue")), workloads={"x": JOB_X},
    )  # fmt: skip


def test_a_suspended_workload_waits_for_what_its_queue_says():
    condition = {
        "type": "QuotaReserved",
        "status": "False",
        "reason": "Pending",
        "message": "no quota for 8 GPUs",
    }
    queue = Queue([condition])
    allocation = waiting_in(queue)
    Inquirer(lambda: 2.0).ask(allocation)
    assert queue.asked == [("workloads.kueue.x-k8s.io", "kueue.x-k8s.io/job-uid=u", "mine")]
    expected = Cause("never_scheduled", "Workload job-x-1: Pending: no quota for 8 GPUs", "admission")
    assert allocation.said == expected


def test_a_queue_that_may_not_be_asked_is_asked_no_sooner_than_after_half_a_minute():
    refused = Forbidden(Call("list", "workloads.kueue.x-k8s.io", "", "mine", "https://s"), "no", status=403)
    queue = Queue([], refused)
    allocation = waiting_in(queue)
    now = [2.0]
    inquirer = Inquirer(lambda: now[0])
    for now[0] in (2.0, 20.0, 31.9, 32.0):
        inquirer.ask(allocation)
    assert (allocation.said, len(queue.asked)) == (None, 2)
