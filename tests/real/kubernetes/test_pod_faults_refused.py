"""What a cluster refuses, end to end on the real one: what a user reads, the exit code, the record, nothing left."""

from __future__ import annotations

import json
import threading

import pytest
import yaml
from admission_webhook import admission_webhook
from faults import ONE, Fault, run_faults

SHORT = {"unschedulable": "2s", "quota": "2s", "config": "2s", "admission": "2s", "unknown": "3s"}

#: A kind that no cluster has.
NOWHERE = {
    "resource": {"group": "nowhere.mlhpc.test", "version": "v1", "kind": "Nothing", "plural": "nothings"},
    "templates": [{"path": "spec.template", "pods": 1}],
    "status": {"succeeded": ["Done"], "failed": ["Failed"]},
    "most": 1,
}


def quota(kubernetes, namespace, **hard):
    body = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    kubernetes.ask("POST", path, body)
    return f"{path}/small"


def limits(kubernetes, namespace):
    limit = {"type": "Container", "max": {"cpu": "1"}}
    body = {"metadata": {"name": "small"}, "spec": {"limits": [limit]}}
    kubernetes.ask("POST", f"/api/v1/namespaces/{namespace}/limitranges", body)


def copy_of(kubernetes, path, server=None, token=None):
    """Write a kubeconfig for another server, or somebody that the server does not know."""
    config = yaml.safe_load(kubernetes.kubeconfig.read_text())
    if server:
        config["clusters"][0]["cluster"]["server"] = server
    if token:
        config["users"][0]["user"] = {"token": token}
    path.write_text(json.dumps(config))
    return str(path)


def test_what_the_cluster_refuses_is_told_in_its_words(pod_suite, kubernetes, more_namespaces, tmp_path):
    full, narrow, strict = more_namespaces(), more_namespaces(), more_namespaces()
    quota(kubernetes, full, pods="0")
    quota(kubernetes, strict, **{"requests.cpu": "100"})
    beside = {
        "spec": {"containers": [{"name": "worker"}, {"name": "beside", "image": "mlhpc.test/busybox:1"}]}
    }
    limits(kubernetes, narrow)
    pod_suite.partition(patience=SHORT)
    faults = [
        Fault(
            "quota_for_pods", "quota_exceeded", ["403 Forbidden", "exceeded quota: small", "given up after", "(kubernetes: patience: quota)"],
            {"namespace": full, "kind": "pods"},
        ),
        Fault(
            "quota_for_a_controller", "quota_exceeded", ["FailedCreate", "exceeded quota: small", "the limit is 2 s (kubernetes: patience: quota)"],
            {"namespace": full},
        ),
        Fault(
            "quota_for_what_is_not_said", "quota_exceeded", ["must specify requests.cpu"],
            {"namespace": strict, "kind": "pods", "manifest": beside},
        ),
        Fault(
            "quota_for_what_a_controller_does_not_say", "quota_exceeded",
            ["FailedCreate", "must specify requests.cpu", "(kubernetes: patience: config)"],
            {"namespace": strict, "manifest": {"spec": {"template": beside}}},
        ),
        Fault(
            "limits_for_pods", "admission_denied", ["maximum cpu usage per Container is 1, but limit is 2", "Change `kubernetes:`"],
            {"namespace": narrow, "kind": "pods"},
        ),
        Fault(
            "limits_for_a_controller", "admission_denied", ["FailedCreate", "maximum cpu usage per Container is 1, but limit is 2"],
            {"namespace": narrow},
        ),
        Fault(
            "no_such_namespace", "rejected", ['namespaces "mlhpc-test-nowhere" not found', "Set `namespace` to one that exists"],
            {"namespace": "mlhpc-test-nowhere"},
        ),
        Fault(
            "no_such_kind", "rejected", ["This server has no kind nothings.nowhere.mlhpc.test", "its CRD"],
            {"kind": "nothing", "custom": NOWHERE},
        ),
        Fault(
            "invalid", "rejected", ["422 Invalid", "spec.template.spec.containers[0].ports[0].containerPort"],
            {"manifest": {"spec": {"template": {"spec": {"containers": [{"name": "worker", "ports": [{"containerPort": 99999}]}]}}}}},
        ),
        Fault(
            "unknown_user", "unauthorized", ["401 Unauthorized", "Log in to the cluster again"],
            {"kubeconfig": copy_of(kubernetes, tmp_path / "nobody", token="nobodys")},  # noqa: S106 - it is no secret
        ),
        Fault(
            "no_right", "forbidden", ['User "limited" cannot create', "ask whoever runs the cluster for it", "docs/kubernetes.md has the Role"],
            {"kubeconfig": str(kubernetes.user("limited"))},
        ),
    ]  # fmt: skip
    run_faults(pod_suite, faults).expect(75, error=len(faults))


@pytest.mark.slow
def test_a_place_in_a_quota_is_waited_for(pod_suite, kubernetes, more_namespaces):
    full, full_too = more_namespaces(), more_namespaces()
    quotas = [quota(kubernetes, name, pods="0") for name in (full, full_too)]
    pod_suite.tests(
        f'@script("echo rate: 4", kubernetes={{"namespace": {full!r}, "kind": "pods"}})\n'
        'def test_pods(run):\n    assert run["rate"].value == 4\n\n'
        f'@script("echo rate: 4", kubernetes={{"namespace": {full_too!r}}})\n'
        'def test_job(run):\n    assert run["rate"].value == 4\n'
    )
    session = pod_suite.start()
    path = f"/api/v1/namespaces/{full_too}/events"
    session.until("event", lambda: "exceeded quota" in json.dumps(kubernetes.items(path)))
    for one in quotas:
        kubernetes.forget(one)
    session.end().expect(0, passed=2)


@pytest.mark.slow
def test_half_a_group_of_pods_holds_nothing_while_a_quota_is_full(pod_suite, kubernetes):
    path = quota(kubernetes, pod_suite.namespace, pods="1")
    pod_suite.partition(kind="pods")
    pod_suite.tests(
        '@script("echo rate: 4", nodes=2, devices=2, launcher="torchrun")\n'
        'def test_two(run):\n    assert run["rate"].value == 4\n'
    )
    session = pod_suite.start()

    def refused(entry):
        what, code = entry.get("objectRef", {}), entry.get("responseStatus", {}).get("code")
        return (what.get("namespace"), what.get("resource"), code) == (pod_suite.namespace, "pods", 403)

    session.until("refusal", lambda: any(map(refused, kubernetes.requests())))
    session.until("deletion", lambda: pod_suite.objects("pods") == [])
    kubernetes.forget(path)
    session.end().expect(0, passed=1)


def test_fields_that_an_old_server_drops_are_told(pod_suite, kubernetes):
    if "v1.20." not in kubernetes.version():
        pytest.skip(f"Kubernetes {kubernetes.version()} knows these fields")
    policy = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}]}
    faults = [
        Fault(
            "indexed", "rejected", ["(v1.20.2) has silently dropped spec.completionMode", "choose another kind"],
            {}, {"nodes": 2, "devices": 2, "launcher": "torchrun"},
        ),
        Fault(
            "suspend", "rejected", ["has silently dropped spec.suspend"],
            {"kind": "kueue", "labels": {"kueue.x-k8s.io/queue-name": "mine"}},
        ),
        Fault(
            "policy", "rejected", ["has silently dropped spec.podFailurePolicy"],
            {"manifest": {"spec": {"podFailurePolicy": policy}}},
        ),
    ]  # fmt: skip
    run_faults(pod_suite, faults).expect(75, error=len(faults))


def test_a_webhook_that_rejects_is_quoted_and_a_name_that_is_taken_is_named(pod_suite, kubernetes, tmp_path):
    """The webhook also makes the object of somebody else that has our name, in the moment before ours comes."""
    jobs = f"/apis/batch/v1/namespaces/{pod_suite.namespace}/jobs"
    foreign = {
        "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "mlhpc.test/busybox:1"}]}},
        "parallelism": 0,
    }  # fmt: skip

    def verdict(asked):
        if asked["kind"]["kind"] == "Pod":
            return "no pods on Fridays"
        if not (asked["object"]["metadata"].get("labels") or {}).get("foreign"):
            name = asked["object"]["metadata"]["name"]
            body = {"metadata": {"name": name, "labels": {"foreign": "yes"}}, "spec": foreign}
            kubernetes.ask("POST", jobs, body)
        return ""

    with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
        faults = [
            Fault(
                "rejected", "admission_denied",
                ['admission webhook "guard.mlhpc.test" denied the request: no pods on Fridays', "Change `kubernetes:`"],
                {"kind": "pods"},
            ),
            Fault("taken", "rejected", ["409 AlreadyExists", "is not ours: delete it and run again"]),
        ]  # fmt: skip
        run_faults(pod_suite, faults).expect(75, error=len(faults))
    assert [one["metadata"]["labels"]["foreign"] for one in kubernetes.items(jobs)] == ["yes"]


def test_a_webhook_that_does_not_answer_is_waited_for_and_then_named(pod_suite, kubernetes, tmp_path):
    pod_suite.partition(patience={"unknown": "3s"})
    silent = threading.Event()

    def verdict(_):
        silent.wait(600)
        return ""

    try:
        with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
            faults = [
                Fault(
                    "silent", "admission_denied",
                    ['failed calling webhook "guard.mlhpc.test"', "given up after", "(kubernetes: patience: unknown)"],
                )
            ]  # fmt: skip
            run_faults(pod_suite, faults).expect(75, error=1)
    finally:
        silent.set()


@pytest.mark.slow
def test_a_webhook_that_answers_again_delays_a_job_only(pod_suite, kubernetes, tmp_path):
    answers, asked = threading.Event(), threading.Event()

    def verdict(_):
        asked.set()
        answers.wait(600)
        return ""

    with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
        pod_suite.tests(ONE)
        session = pod_suite.start()
        session.until("question", asked.is_set)
        session.until("second try", lambda: "failed calling webhook" in session.text or asked.is_set())
        answers.set()
        session.end().expect(0, passed=1)
