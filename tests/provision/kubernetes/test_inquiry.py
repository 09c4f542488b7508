"""What events tell of a workload without pods, and of a pod that does not start; events are as servers write them."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.kubernetes.inquiry import why_no_pods, why_no_start


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
    found = why_no_pods([event("SuccessfulDelete", "other"), event("FailedCreate", message)])
    assert (found.outcome, found.patience, found.text) == (outcome, patience, f"FailedCreate: {message}")


def test_a_controller_without_an_event_says_nothing():
    assert why_no_pods([event("SuccessfulCreate", "Created pod: x")]) is None


def test_why_a_pod_does_not_start_names_its_node():
    found = why_no_start(
        [event("Scheduled", "assigned"), event("FailedMount", 'hostPath "/a" missing')], "n1"
    )
    assert (found.outcome, found.patience, found.node) == ("container_config", "volume", "n1")
    assert found.text == 'FailedMount: hostPath "/a" missing'


def test_a_pod_that_is_only_slow_says_nothing():
    assert why_no_start([event("Pulling", "Pulling image")], "n1") is None
