"""Calls of the API against a real server: what they do, and what its refusals become."""

import pytest
from api_parts import CONFIG_MAP, config_map
from running_suites import LIMIT_S

from pytest_mlhpc.provision.kubernetes import errors
from pytest_mlhpc.provision.kubernetes.objects import JOB, POD, ObjectRef, Resource, object_ref


def test_an_object_is_made_found_changed_and_deleted(parts):
    made = parts.api.create(CONFIG_MAP, config_map(labels={"of": "this"}))
    ref = object_ref(CONFIG_MAP, made)
    assert ref.namespace == parts.namespace
    assert parts.api.get(ref)["data"] == {"k": "v"}
    assert parts.api.patch(ref, {"data": {"k": None, "n": "w"}})["data"] == {"n": "w"}
    listing = parts.api.list(CONFIG_MAP, labels="of=this")
    assert [(item["kind"], item["metadata"]["name"]) for item in listing.items] == [("ConfigMap", "c")]
    parts.api.delete(ref)
    parts.api.delete(ref)
    with pytest.raises(errors.NotFound) as error:
        parts.api.get(ref)
    assert not error.value.unknown_kind


def test_a_deletion_leaves_another_object_of_the_same_name_alone(parts):
    old = object_ref(CONFIG_MAP, parts.api.create(CONFIG_MAP, config_map()))
    parts.api.delete(old)
    parts.api.create(CONFIG_MAP, config_map())
    parts.api.delete(old)
    assert parts.api.get(ObjectRef(CONFIG_MAP, parts.namespace, "c"))["metadata"]["uid"] != old.uid


def test_deleting_a_job_takes_its_pods_along(parts):
    container = {"name": "main", "image": "mlhpc.test/busybox:1", "command": ["sleep", "600"]}
    template = {
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    }
    job = object_ref(JOB, parts.api.create(JOB, {"metadata": {"name": "j"}, "spec": {"template": template}}))
    version = parts.api.list(POD).resource_version
    for event in parts.api.watch(POD, labels="job-name=j", resource_version="0", timeout_s=LIMIT_S):
        if event.type == "ADDED":
            break
    parts.api.delete(job, propagation="Background")
    for event in parts.api.watch(POD, labels="job-name=j", resource_version=version, timeout_s=LIMIT_S):
        if event.type == "DELETED":
            break
    assert parts.api.list(POD, labels="job-name=j").items == ()


def test_refusals_name_the_missing_right(parts, kubernetes):
    kubernetes.grant(
        parts.namespace, "limited", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    )
    limited = parts.reach(kubernetes.user("limited"))
    try:
        with pytest.raises(errors.Forbidden, match="needs the verb `create` on configmaps"):
            limited.create(CONFIG_MAP, config_map())
        with pytest.raises(errors.Forbidden, match="needs the verb `watch` on pods"):
            limited.watch(POD, resource_version="0", timeout_s=60)
        with pytest.raises(errors.Forbidden, match="needs the verb `get` on pods/log"):
            limited.logs(ObjectRef(POD, "", "p"), "main", follow=True)
    finally:
        limited.close()


def test_events_of_an_object_are_found_by_its_uid(parts):
    container = {"name": "main", "image": "mlhpc.test/busybox:1"}
    spec = {"containers": [container], "nodeSelector": {"no": "where"}}
    ref = object_ref(POD, parts.api.create(POD, {"metadata": {"name": "p"}, "spec": spec}))
    events = Resource("", "v1", "Event", "events")
    for event in parts.api.watch(events, resource_version="0", timeout_s=LIMIT_S):
        if event.object["reason"] == "FailedScheduling":
            break
    assert {event["reason"] for event in parts.api.events(ref.uid)} == {"FailedScheduling"}
    assert parts.api.events("another") == []
    parts.api.delete(ref, grace_s=0)


def test_a_token_that_expires_is_renewed_in_the_middle(parts, kubernetes, tmp_path):
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    account = kubernetes.account(parts.namespace, tmp_path, [rule])
    api = parts.reach(account.kubeconfig)
    try:
        api.list(POD)
        account.expire()
        with pytest.raises(errors.Unauthorized, match="Log in to the cluster again"):
            api.list(POD)
        account.renew()
        assert api.list(POD).items == ()
    finally:
        api.close()
