"""The rights that an account needs: the Role of the documentation is enough, each part of it is used, and what is missing is told."""

import copy
import json

import pytest
import yaml
from faults import Fault, run_faults
from running_suites import text_of, wait_for
from services import ROOT

RULES = yaml.safe_load((ROOT / "docs/kubernetes-role.yaml").read_text())["rules"]


def rights(rules):
    """Return (group, resource, verb) of all that rules allow."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(cluster, namespaces):
    """Return what the user was allowed to do in *namespaces*, as the server's audit log has it."""
    found = set()
    for entry in cluster.requests():
        what = entry.get("objectRef", {})
        allowed = entry.get("responseStatus", {}).get("code") != 403
        if entry["user"].get("username") == "mlhpc" and what.get("namespace") in namespaces and allowed:
            resource = "/".join(filter(None, [what["resource"], what.get("subresource")]))
            found.add((what.get("apiGroup", ""), resource, entry["verb"]))
    return found


def test_the_role_is_enough_and_all_of_it_is_used(pod_suite, kubernetes, more_namespaces):
    full = more_namespaces()
    kubernetes.quota(full, pods="0")
    for name in (pod_suite.namespace, full):
        kubernetes.grant(name, "mlhpc", RULES)
    pod_suite.partition(
        kubeconfig=str(kubernetes.user("mlhpc")), patience={"quota": "1s", "image": "1s"}, keep_for="1s"
    )
    pod_suite.tests(text_of(__file__, "all_rights.py.txt", FULL=full))
    result = pod_suite.run()
    result.expect(1, "422 Invalid", "image_pull:", "quota_exceeded: FailedCreate", passed=2, error=3)
    wait_for(lambda: "deleted jobs.batch" in pod_suite.reap(code=None))  # once it was kept for a second
    # A pod is asked for by itself where its log ends long before its status tells why.
    assert used(kubernetes, {pod_suite.namespace, full}) | {("", "pods", "get")} == rights(RULES)


def without(resource, verb):
    """Return the rules without one right."""
    rules = copy.deepcopy(RULES)
    for rule in rules:
        if rule["resources"] == [resource]:
            rule["verbs"] = [one for one in rule["verbs"] if one != verb] or ["deletecollection"]
    assert json.dumps(rules) != json.dumps(RULES)
    return rules


@pytest.mark.slow
def test_rights_that_are_missing_are_named(pod_suite, kubernetes, more_namespaces):
    missing = [("secrets", "create"), ("jobs", "create"), ("pods", "list"), ("pods/log", "get")]
    pod_suite.partition(kubeconfig=str(kubernetes.user("mlhpc")))
    faults = [lacks(kubernetes, more_namespaces(), resource, verb) for resource, verb in missing]
    run_faults(pod_suite, faults)


@pytest.mark.slow  # a server that has just been started may refuse watches for a while, which is borne
def test_a_right_to_watch_that_is_missing_is_named_after_a_while(pod_suite, kubernetes, more_namespaces):
    pod_suite.partition(kubeconfig=str(kubernetes.user("mlhpc")))
    run_faults(pod_suite, [lacks(kubernetes, more_namespaces(), "pods", "watch")])


def lacks(kubernetes, namespace, resource, verb):
    """Give the user all rights in a namespace but one; return what becomes of a run there."""
    kubernetes.grant(namespace, "mlhpc", without(resource, verb))
    name = "jobs.batch" if resource == "jobs" else resource
    texts = [f"cannot {verb} {name}", "403 Forbidden", f"The account needs the verb `{verb}` on {name}"]
    return Fault(f"{verb}_{resource.replace('/', '_')}", "forbidden", texts, {"namespace": namespace})
