"""What a cluster refuses, end to end on the real one: what a user reads, the exit code, the record, nothing left."""

import contextlib
import json
import threading

import pytest
import yaml
from admission_webhook import admission_webhook
from faults import ONE, read_faults, run_faults
from kubernetes_service import ApiError


def limits(kubernetes, namespace):
    limit = {"type": "Container", "max": {"cpu": "1"}}
    body = {"metadata": {"name": "small"}, "spec": {"limits": [limit]}}
    kubernetes.ask("POST", f"/api/v1/namespaces/{namespace}/limitranges", body)


def stranger(kubernetes, path):
    """Write a kubeconfig of somebody whom the server does not know."""
    config = yaml.safe_load(kubernetes.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": "nobodys"}
    path.write_text(json.dumps(config))
    return str(path)


def test_what_the_cluster_refuses_has_its_message(pod_suite, kubernetes, more_namespaces, tmp_path):
    full, narrow, strict = more_namespaces(), more_namespaces(), more_namespaces()
    kubernetes.quota(full, pods="0")
    kubernetes.quota(strict, **{"requests.cpu": "100"})
    limits(kubernetes, narrow)
    users = {"LIMITED": str(kubernetes.user("limited")), "NOBODY": stranger(kubernetes, tmp_path / "nobody")}
    faults = read_faults(__file__, "refused", FULL=full, NARROW=narrow, STRICT=strict, **users)
    run_faults(pod_suite, faults)


@pytest.mark.slow
def test_a_place_in_a_quota_is_waited_for(pod_suite, kubernetes, more_namespaces):
    full, full_too = more_namespaces(), more_namespaces()
    quotas = [kubernetes.quota(name, pods="0") for name in (full, full_too)]
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
    path = kubernetes.quota(pod_suite.namespace, pods="1")
    pod_suite.partition(kind="pods")
    pod_suite.tests(
        '@script("echo rate: 4", nodes=2, ranks_per_node=1)\n'
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


def test_fields_that_an_old_server_drops_are_reported(pod_suite, kubernetes):
    if "v1.20." not in kubernetes.version():
        pytest.skip(f"Kubernetes {kubernetes.version()} knows these fields")
    run_faults(pod_suite, read_faults(__file__, "dropped"))


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
            with contextlib.suppress(ApiError):  # it is there: the server has asked again after a while
                kubernetes.ask("POST", jobs, body)
        return ""

    with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
        run_faults(pod_suite, read_faults(__file__, "denied"))
    assert [one["metadata"]["labels"]["foreign"] for one in kubernetes.items(jobs)] == ["yes"]


def test_a_webhook_that_does_not_answer_is_waited_for_and_then_named(pod_suite, kubernetes, tmp_path):
    pod_suite.partition(patience={"unknown": "3s"})
    silent = threading.Event()

    def verdict(_):
        silent.wait(600)
        return ""

    try:
        with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
            run_faults(pod_suite, read_faults(__file__, "silent"))
    finally:
        silent.set()


@pytest.mark.slow
def test_a_webhook_that_answers_again_delays_a_job_only(pod_suite, kubernetes, tmp_path):
    answers, questions = threading.Event(), []

    def verdict(asked):
        questions.append(asked)
        answers.wait(600)
        return ""

    with admission_webhook(kubernetes, pod_suite.namespace, tmp_path, verdict):
        pod_suite.tests(ONE)
        session = pod_suite.start()
        session.until("second try", lambda: len(questions) > 1)
        answers.set()
        session.end().expect(0, passed=1)
