"""Kinds of workload: the status of their objects, the ranks of their pods, and a site's own kinds."""

from importlib import resources
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from manifests import partition, rendered, variables, workload

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.causes import FailureCause
from pytest_mlhpc.provision.kubernetes.objects import value_at
from pytest_mlhpc.provision.kubernetes.schema import CustomKind
from pytest_mlhpc.provision.kubernetes.settings import (
    KubernetesSettings,
    builtin_kind,
    builtin_kinds,
    kind_of,
)


def condition(kind, reason="", message="", status="True"):
    return {
        "status": {"conditions": [{"type": kind, "status": status, "reason": reason, "message": message}]}
    }


@pytest.mark.parametrize("name", builtin_kinds())
def test_what_is_shipped_has_the_form_that_a_site_uses(name):
    file = resources.files("pytest_mlhpc.provision.kubernetes").joinpath(f"kinds/{name}.yaml")
    CustomKind.model_validate(yaml.safe_load(file.read_text("utf-8")))
    assert builtin_kind(name).name == name


def test_the_kinds_are_those_that_were_promised():
    assert builtin_kinds() == ("ipujob", "job", "jobset", "kueue", "pods", "pytorchjob")


def test_an_unknown_kind_has_the_nearest_word():
    with pytest.raises(UsageError, match=r"kind 'pod' is not one of .* \(did you mean 'pods'\?\)"):
        kind_of(KubernetesSettings(kind="pod"))


@pytest.mark.parametrize(
    ("name", "found", "state", "words"),
    [
        ("job", {}, "waiting", ""),
        ("job", {"status": {"conditions": None}}, "waiting", ""),
        ("job", condition("Complete"), "succeeded", "Complete"),
        ("job", condition("Complete", status="False"), "waiting", ""),
        ("job", condition("Failed", "BackoffLimitExceeded", "too many"), "failed", "BackoffLimitExceeded: too many"),
        ("job", condition("Suspended", "JobSuspended", "Job suspended"), "suspended", "JobSuspended: Job suspended"),
        ("job", {"spec": {"suspend": True}}, "suspended", "Job is suspended: its queue has not let it begin"),
        ("job", {"spec": {"suspend": True}, **condition("Failed", "DeadlineExceeded")}, "failed", "DeadlineExceeded"),
        ("pods", {"status": {"phase": "Pending"}}, "waiting", ""),
        ("pods", {"status": {"phase": "Running"}}, "running", "Running"),
        ("pods", {"status": {"phase": "Succeeded"}}, "succeeded", "Succeeded"),
        ("pods", {"status": {"phase": "Failed", "reason": "Evicted", "message": "disk"}}, "failed", "Evicted: disk"),
        ("pytorchjob", condition("Created", "PyTorchJobCreated"), "waiting", ""),
        ("pytorchjob", condition("Running", "PyTorchJobRunning", "is running"), "running", "PyTorchJobRunning: is running"),
        ("pytorchjob", condition("Succeeded"), "succeeded", "Succeeded"),
        ("pytorchjob", condition("Failed", "PyTorchJobFailed", "1 failed"), "failed", "PyTorchJobFailed: 1 failed"),
        ("pytorchjob", {"spec": {"runPolicy": {"suspend": True}}}, "suspended", "PyTorchJob is suspended: its queue has not let it begin"),
        ("jobset", condition("Completed", "AllJobsCompleted"), "succeeded", "AllJobsCompleted"),
        ("jobset", condition("Failed", "FailedJobs", "a job failed"), "failed", "FailedJobs: a job failed"),
        ("ipujob", {"status": {"phase": "Completed"}}, "succeeded", "Completed"),
    ],
)  # fmt: skip
def test_a_workload_says_where_it_stands(name, found, state, words):
    status = builtin_kind(name).status_of(found)
    assert (status.state, status.text) == (state, words)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (condition("Failed", "DeadlineExceeded", "x"), FailureCause("time_limit", "DeadlineExceeded: x")),
        (condition("Failed", "BackoffLimitExceeded", "x"), None),  # the failed pod says more
        (condition("Failed", "Odd", "x"), FailureCause("rejected", "Odd: x")),
        (
            condition("Suspended", "JobSuspended"),
            FailureCause("never_scheduled", "JobSuspended", "admission"),
        ),
        (condition("Complete"), None),
    ],
)
def test_a_workload_has_a_cause_if_its_pods_cannot_tell(found, cause):
    assert builtin_kind("job").status_of(found).cause == cause


@pytest.mark.parametrize(
    ("name", "pod", "rank"),
    [
        ("job", {"metadata": {"labels": {"pytest-mlhpc/rank": "0"}}}, 0),
        ("job", {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "2"}}}, 2),
        ("job", {"metadata": {}}, None),
        ("job", {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "²"}}}, None),
        (
            "pytorchjob",
            {"metadata": {}, "spec": {"containers": [{"env": [{"name": "RANK", "value": "3"}]}]}},
            3,
        ),
        (
            "pytorchjob",
            {"metadata": {}, "spec": {"containers": [{"env": [{"name": "RANK", "valueFrom": {}}]}]}},
            None,
        ),
        ("jobset", {"metadata": {"annotations": {"batch.kubernetes.io/job-completion-index": "1"}}}, 1),
        ("pods", {}, None),
    ],
)
def test_a_pod_has_its_rank_from_our_label_or_as_its_kind_tells(name, pod, rank):
    assert builtin_kind(name).rank_of(pod) == rank


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            condition("QuotaReserved", "Pending", "couldn't assign flavors: insufficient quota", "False"),
            "Pending: couldn't assign flavors: insufficient quota",
        ),
        (condition("QuotaReserved", "QuotaReserved"), ""),
        ({}, ""),
    ],
)
def test_kueues_workload_says_why_its_job_waits(found, reason):
    queue = builtin_kind("kueue").queue
    assert (str(queue.resource), queue.waiting_reason(found)) == ("workloads.kueue.x-k8s.io", reason)


CUSTOM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "gang.yaml").read_text())
GANG = partition(kind="gang", custom=CUSTOM)


def test_a_kind_of_a_sites_own_is_described_and_rendered():
    made = rendered(GANG, 3)
    (gang,) = made.workloads
    assert (gang["apiVersion"], gang["kind"], gang["spec"]["limit"] > 0) == ("site.org/v2", "Gang", True)
    head, rest = gang["spec"]["groups"]
    assert (head["name"], head["size"], head["retries"], rest["size"]) == ("head", 1, 0, 2)
    ranks = [variables(one["pod"]["spec"]["containers"][0])["MLHPC_POD_RANK"] for one in (head, rest)]
    assert ranks == ["0", "$(GANG_RANK)"]
    assert [group["name"] for group in workload(GANG, 1)["spec"]["groups"]] == ["head"]
    assert made.kind.container == "main"
    assert made.kind.status_of({"status": {"state": "Lost"}}).state == "failed"


def test_a_manifest_of_a_sites_own_kind_is_merged_at_its_paths():
    manifest = {"spec": {"groups": [{"name": "rest", "colour": "red"}], "share": 3}}
    spec = workload(partition(kind="gang", custom=CUSTOM, manifest=manifest), 2)["spec"]
    colours = {group["name"]: group.get("colour") for group in spec["groups"]}
    assert (spec["share"], colours) == (3, {"rest": "red", "head": None})
    assert all(group["pod"]["spec"]["containers"] for group in spec["groups"])


def changed(**changes):
    return {key: value for key, value in {**CUSTOM, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("custom", "text"),
    [
        (changed(rank=None), "`rank` is missing: what holds the number of a pod?"),
        (changed(rank={"label": "a", "variable": "b"}), "give one of annotation, label, variable"),
        (changed(rank={"label": "a"}), "with several templates, `rank` must name a variable"),
        (changed(each_pod=True), "with each_pod there is one template"),
        (changed(templates=[]), "at least 1 item"),
        (
            changed(templates=[{"path": "spec.a"}, {"path": "spec.b"}]),
            "several templates make all other pods",
        ),
        (changed(templates=[{"path": "spec..a"}]), "is not a path such as spec.template"),
        (
            changed(status={"succeeded": ["Done"]}),
            "say which conditions (or phases) mean succeeded, and which failed",
        ),
        (changed(statsu={}), "Extra inputs are not permitted"),
    ],
)
def test_a_description_that_cannot_be_used_is_refused(custom, text):
    with pytest.raises(pydantic.ValidationError) as caught:
        CustomKind.model_validate(custom)
    assert text in str(caught.value)


def test_templates_for_too_few_pods_are_refused():
    custom = changed(templates=[{"path": "spec.pod", "pods": 1}], must={})
    with pytest.raises(UsageError, match="kind 'gang' has templates for 1 pods, not for 3"):
        workload(partition(kind="gang", custom=custom), 3)


FOUND = {"a": [{"name": "x", "b": 1}, {"name": "0", "b": 2}, {"b": 3}]}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("a", "x", "b"), 1),
        pytest.param(("a", "0", "b"), 2, id="a name comes first"),
        (("a", "2", "b"), 3),
        (("a", "y", "b"), None),
        (("a", "9"), None),
        (("a", "x", "b", "c"), None),
    ],
)
def test_a_path_leads_through_lists_by_name_or_number(path, expected):
    assert value_at(FOUND, path) == expected
