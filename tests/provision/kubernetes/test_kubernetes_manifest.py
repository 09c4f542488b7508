"""The objects of a plan: what pods request, where they may run, and what they may do."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import manifest_schemas
import pytest
import yaml
from manifests import (
    ENVIRONMENT,
    IDENTITY,
    part,
    partition,
    parts,
    pod,
    rendered,
    variables,
    worker,
    workload,
)

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.plan import Plan, VetSettings
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.provision.kubernetes.manifest import preview, preview_plan, render
from pytest_mlhpc.provision.kubernetes.objects import label_safe, label_selector
from pytest_mlhpc.provision.kubernetes.settings import settings_of

OURS = {
    "app.kubernetes.io/managed-by": "pytest-mlhpc",
    "pytest-mlhpc/session": "session-1",
    "pytest-mlhpc/allocation": "0-a",
    "pytest-mlhpc/run": "00000000-0000-7000-8000-000000000000",
    "pytest-mlhpc/owner": "Ada-Lovelace",
}
POD = "spec template spec"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_all_that_is_made_is_what_its_published_schema_says(kind, nodes):
    made = rendered(partition("cuda", 4, kind=kind, service=True), nodes, 4 * nodes)
    for one in (made.secret, *([made.service] if made.service else []), *made.workloads):
        assert manifest_schemas.complaints(one) == []


def test_every_object_and_pod_carries_our_labels():
    made = rendered(partition(service=True, labels={"team": "a"}, annotations={"note": "b"}), 2)
    assert made.service is not None
    for meta in (made.secret["metadata"], made.service["metadata"], made.workloads[0]["metadata"]):
        assert (meta["labels"], meta["name"]) == ({**OURS, "team": "a"}, "mlhpc-0-a")
    template = part(made.workloads[0], "spec template metadata")
    assert template == {"labels": {**OURS, "team": "a"}, "annotations": {"note": "b"}}


def test_objects_made_again_without_unfit_nodes_have_names_of_their_own():
    where = partition()
    made = render(settings_of(where), where, ENVIRONMENT, preview_plan(where, 1, 1), b"", IDENTITY, 2)
    name = "mlhpc-00000000-0000-7000-8000-000000000000-r2"
    assert made.secret["metadata"]["name"] == made.workloads[0]["metadata"]["name"] == name
    assert part(made.workloads[0], f"{POD} volumes 0 secret secretName") == name


@pytest.mark.parametrize(
    ("payload", "data", "path"),
    [
        pytest.param(b"content", b"content", "/mlhpc/config/abc.zip", id="and the payload"),
        pytest.param(None, b"", None, id="but no payload for an image that has this package"),
    ],
)
def test_the_secret_holds_the_plan_as_pods_see_it(payload, data, path):
    made = rendered(partition(), payload=payload, scheduler_options={"image": "x"})
    plan = from_json(Plan, json.loads(base64.b64decode(made.secret["data"]["plan.json"])))
    assert (plan.directory, plan.allocation_id, plan.scheduler_options) == ("/mlhpc/work", "0-a", {})
    assert base64.b64decode(made.secret["data"].get("abc.zip", "")) == data
    assert made.secret["immutable"] is True
    assert variables(part(made.workloads[0], f"{POD} containers 0")).get("PYTHONPATH") == path


def test_variables_and_nonces_of_runs_are_in_the_secret_alone():
    where = partition(service=True)
    (run,) = preview_plan(where, 2, 2).runs
    made = rendered(where, 2, runs=(replace(run, nonce="confidential-1", variables={"T": "confidential-2"}),))
    assert "confidential" not in json.dumps([made.service, *made.workloads])
    plan = base64.b64decode(made.secret["data"]["plan.json"]).decode()
    assert [text in plan for text in ("confidential-1", "confidential-2")] == [True, True]


@pytest.mark.parametrize(
    ("where", "payload", "nodes", "text"),
    [
        pytest.param(
            partition(), b"x" * 2**20, 1, r"site:part: plan and payload have \d+ bytes, a Secret takes 1048576",
            id="more than a Secret holds",
        ),
        pytest.param(
            partition("ipu", 4, kind="ipujob"), b"", 2, "site:part: IPUJob has at most 1 pod here, not 2",
            id="more pods than the kind has",
        ),
    ],
)  # fmt: skip
def test_what_is_too_much_is_refused(where, payload, nodes, text):
    with pytest.raises(UsageError, match=text):
        rendered(where, nodes, payload=payload)


def test_agent_and_probe_are_started_without_a_shell():
    spec = pod(partition())["spec"]
    (container,), (probe,) = spec["containers"], spec["initContainers"]
    python = ["/opt/python", "-m"]
    assert container["command"] == [*python, "pytest_mlhpc.node.batch.pod", "/mlhpc/config/plan.json"]
    assert probe["command"] == [*python, "pytest_mlhpc.node.batch.probe", "/mlhpc/config/plan.json"]
    for key in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert probe[key] == container[key]
    assert "initContainers" not in pod(partition(probe=False))["spec"]


WHOLE = {"cpu": "16", "memory": "65536Mi"}
QUARTER = {"cpu": "4", "memory": "16384Mi"}


@pytest.mark.parametrize(
    ("where", "ranks", "requests", "more_limits"),
    [
        pytest.param(partition(), 4, WHOLE, {}, id="a pod on CPUs asks for its whole node"),
        pytest.param(partition("cuda", 4), 1, QUARTER, {"nvidia.com/gpu": "1"}, id="one with a device for its share"),
        pytest.param(partition("cuda", 4), 4, WHOLE, {"nvidia.com/gpu": "4"}, id="one with all devices for all"),
        pytest.param(
            partition(resources={"limits": {"memory": "8GiB", "site.org/disk": 1}, "requests": {"cpu": "500m"}}), 1,
            {"cpu": "500m", "memory": "8589934592"}, {"cpu": "16", "site.org/disk": "1"},
            id="what the partition says is put over its nodes",
        ),
    ],
)  # fmt: skip
def test_a_pod_asks_for_resources(where, ranks, requests, more_limits):  # fmt: skip
    expected = {"requests": requests, "limits": {**requests, **more_limits}}
    assert worker(where, 1, ranks)["resources"] == expected


@pytest.mark.parametrize(
    ("accelerator", "options", "resource"),
    [
        ("rocm", {}, "amd.com/gpu"),
        ("xpu", {}, "gpu.intel.com/i915"),
        ("cuda", {"device_resource": "nvidia.com/mig-1g.5gb"}, "nvidia.com/mig-1g.5gb"),
        ("cpu", {"device_resource": "nvidia.com/gpu"}, "nvidia.com/gpu"),
    ],
)
def test_devices_are_asked_for_by_the_resource_of_their_plug_in(accelerator, options, resource):
    assert worker(partition(accelerator, 2, **options), 1, 2)["resources"]["limits"][resource] == "2"


@pytest.mark.parametrize(("options", "size"), [({}, "32768Mi"), ({"shared_memory": "1GiB"}, "1024Mi")])
def test_shared_memory_is_half_of_the_pods_by_default(options, size):
    volumes = {one["name"]: one for one in pod(partition(**options))["spec"]["volumes"]}
    assert volumes["mlhpc-shm"]["emptyDir"]["sizeLimit"] == size


QUEUE = "kueue.x-k8s.io/queue-name"
QUEUED = {"kind": "kueue", "labels": {QUEUE: "q", "team": "a"}, "patience": {"image": 10}, "grace": 5}
TIMED = {"patience": {"image": 60, "unschedulable": 100, "quota": 10}, "grace": 5}
TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("options", "plan", "expected"),
    [
        pytest.param(
            TIMED, {"time_limit_s": 600.5},
            {
                f"{POD} activeDeadlineSeconds": 666,  # its image, its runs, its end
                "spec activeDeadlineSeconds": 776,  # the wait for a node too
                "spec ttlSecondsAfterFinished": 604800, "spec backoffLimit": 0,
            },
            id="time limits of pod and job cover what each counts",
        ),
        pytest.param(
            {"patience": {"image": 60}, "grace": 5}, {"time_limit_s": 600.5, "vetting": VetSettings(budget_s=30)},
            {f"{POD} activeDeadlineSeconds": 666 + 30 + 60}, id="the time that a probe may vet is the pod's too",
        ),
        pytest.param(
            {"patience": {"image": 60}, "grace": 5, "probe": False}, {"time_limit_s": 600.5, "vetting": VetSettings(budget_s=30)},
            {f"{POD} activeDeadlineSeconds": 666}, id="without a probe nothing is vetted",
        ),
        pytest.param(
            {}, {"nodes": 3}, {"spec completions": 3, "spec parallelism": 3, "spec completionMode": "Indexed"},
            id="several pods are numbered by the job",
        ),
        pytest.param(
            {}, {}, {"spec completionMode": None, "spec template metadata labels pytest-mlhpc/rank": "0"},
            id="one pod needs no number of a server",
        ),
        pytest.param({}, {"nodes": 2, "spares": 1}, {"spec completions": 3}, id="spares are more pods"),
        pytest.param(
            QUEUED, {"time_limit_s": 85.0},
            {
                "spec suspend": True, f"metadata labels {QUEUE}": "q",
                "metadata labels kueue.x-k8s.io/max-exec-time-seconds": "100", "spec template metadata labels team": "a",
                f"spec template metadata labels {QUEUE}": None,
                "spec template metadata labels kueue.x-k8s.io/max-exec-time-seconds": None,
            },
            id="a job in Kueue's queue waits for it, and its pods are no matter of it",
        ),
        pytest.param(
            {"generate_name": True}, {}, {"metadata generateName": "mlhpc-0-a-", "metadata name": None},
            id="the server completes names where a site wants that",
        ),
        pytest.param({}, {}, {f"{POD} affinity": None}, id="one pod may run anywhere"),
        pytest.param({"spread": "none"}, {"nodes": 2}, {f"{POD} affinity": None}, id="pods may be together"),
        pytest.param(
            {"run_as_user": 1000, "run_as_group": 100, "fs_group": 10}, {},
            {
                f"{POD} securityContext": {
                    "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 1000, "runAsGroup": 100,
                    "fsGroup": 10,
                },
                f"{POD} automountServiceAccountToken": False, f"{POD} enableServiceLinks": False,
                f"{POD} containers 0 securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            },
            id="pods are restricted and hold no token",
        ),
        pytest.param(
            {"security": "as_manifest", "run_as_user": 0}, {},
            {
                f"{POD} securityContext": {"runAsUser": 0}, f"{POD} automountServiceAccountToken": None,
                f"{POD} containers 0 securityContext": None,
            },
            id="security can be left to the manifest",
        ),
        pytest.param(
            {
                "node_selector": {"gpu": "a100"}, "tolerations": [TOLERATION], "priority_class": "high",
                "service_account": "runner", "runtime_class": "nvidia", "image_pull_secrets": ["pull"],
                "image_pull_policy": "Always", "grace": "12s",
            },
            {},
            {
                f"{POD} nodeSelector": {"gpu": "a100"}, f"{POD} tolerations": [TOLERATION], f"{POD} priorityClassName": "high",
                f"{POD} serviceAccountName": "runner", f"{POD} runtimeClassName": "nvidia",
                f"{POD} imagePullSecrets": [{"name": "pull"}], f"{POD} containers 0 imagePullPolicy": "Always",
                f"{POD} terminationGracePeriodSeconds": 12,
            },
            id="what a partition says of its pods is there",
        ),
    ],
)  # fmt: skip
def test_a_job_has(options, plan, expected):
    assert parts(workload(partition(**options), **plan), expected) == expected


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@pytest.mark.parametrize(
    ("options", "plan", "expected"),
    [
        ({}, {"nodes": 3}, {"MLHPC_PODS": "3", "MLHPC_POD_RANK": INDEX, "MLHPC_LEADER": None}),
        ({}, {}, {"MLHPC_PODS": "1", "MLHPC_POD_RANK": "0"}),
        ({}, {"nodes": 2, "spares": 1}, {"MLHPC_PODS": "3"}),
    ],
)
def test_a_pod_knows_its_place(options, plan, expected):
    found = variables(worker(partition(**options), **plan))
    assert {name: found.get(name) for name in expected} == expected


def test_a_group_of_pods_has_explicit_ranks():
    for rank, one in enumerate(rendered(partition(kind="pods"), 2).workloads):
        found = variables(part(one, "spec containers 0"))["MLHPC_POD_RANK"]
        assert (part(one, "metadata name"), found) == (f"mlhpc-0-a-{rank}", str(rank))
        assert part(one, "metadata labels pytest-mlhpc/rank") == str(rank)


@pytest.mark.parametrize(
    ("kind", "ours", "leader"),
    [
        ("job", True, "mlhpc-0-a-0.mlhpc-0-a"), ("pods", True, "mlhpc-0-a-0.mlhpc-0-a"),
        ("pytorchjob", False, "mlhpc-0-a-master-0"), ("jobset", False, "mlhpc-0-a-pods-0-0.mlhpc-0-a"),
    ],
)  # fmt: skip
def test_a_service_is_there_where_asked_unless_an_operator_makes_it(kind, ours, leader):
    made = rendered(partition(kind=kind, service=True), 2)
    selector = {"pytest-mlhpc/allocation": "0-a"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    assert part(made.service, "spec") == (spec if ours else None)
    text = json.dumps(made.workloads)
    assert f'{{"name": "MLHPC_LEADER", "value": "{leader}"}}' in text
    assert ('"subdomain": "mlhpc-0-a"' in text) == ours


@pytest.mark.parametrize(("service", "nodes"), [(False, 2), (True, 1)])
def test_without_a_service_or_others_there_is_none(service, nodes):
    assert rendered(partition(service=service), nodes).service is None


def test_a_pytorchjob_of_one_pod_has_no_workers():
    where = partition(kind="pytorchjob")
    one, three = (part(workload(where, nodes), "spec pytorchReplicaSpecs") for nodes in (1, 3))
    assert list(one) == ["Master"]
    assert (three["Master"]["replicas"], three["Worker"]["replicas"]) == (1, 2)
    spec = three["Worker"]["template"]["spec"]
    (container,), (probe,) = spec["containers"], spec["initContainers"]
    assert (container["name"], variables(container)["MLHPC_POD_RANK"]) == ("pytorch", "$(RANK)")
    assert variables(probe)["MLHPC_POD_RANK"] == "0"  # operators tell init containers nothing


def test_nodes_are_chosen_and_left_out_one_by_one():
    spec = pod(partition(), nodelist=("n1", "n2"), excluded_nodes=("bad", "worse"))["spec"]
    names = (("In", "n1"), ("In", "n2"), ("NotIn", "bad"), ("NotIn", "worse"))
    one, two, *off = [{"key": "metadata.name", "operator": how, "values": [name]} for how, name in names]
    terms = [{"matchFields": [one, *off]}, {"matchFields": [two, *off]}]
    assert part(spec, f"affinity nodeAffinity {REQUIRED}") == {"nodeSelectorTerms": terms}


def test_excluded_nodes_count_in_each_of_the_manifests_own_terms():
    zones = [[{"key": "zone", "operator": "In", "values": [name]}] for name in ("a", "b")]
    theirs = {"nodeSelectorTerms": [{"matchExpressions": zone} for zone in zones]}
    affinity = {"nodeAffinity": {REQUIRED: theirs}}
    where = partition(manifest={"spec": {"template": {"spec": {"affinity": affinity}}}})
    found = pod(where, excluded_nodes=("bad",))
    terms = part(found, f"spec affinity nodeAffinity {REQUIRED} nodeSelectorTerms")
    assert [term["matchExpressions"] for term in terms] == zones
    assert [part(term, "matchFields 0 values") for term in terms] == [["bad"], ["bad"]]


@pytest.mark.parametrize("spread", ["required", "preferred"])
def test_pods_of_one_allocation_keep_apart(spread):
    apart = part(pod(partition(spread=spread), 2), "spec affinity podAntiAffinity")
    assert list(apart) == [f"{spread}DuringSchedulingIgnoredDuringExecution"]
    for words in ('"pytest-mlhpc/allocation": "0-a"', "kubernetes.io/hostname"):
        assert words in json.dumps(apart)
    assert "affinity" not in pod(partition(spread=spread), 1)["spec"]


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"claim": "set-1"}, {"persistentVolumeClaim": {"claimName": "set-1"}}),
        (
            {"template": {"size": "5Gi", "storage_class": "nvme"}},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}},
                            "storageClassName": "nvme",
                        }
                    }
                }
            },
        ),
        ({"host_path": "/srv"}, {"hostPath": {"path": "/srv"}}),
        ({"empty_dir": {"size": "1GiB", "medium": "memory"}}, {"emptyDir": {"medium": "Memory", "sizeLimit": "1073741824"}}),
        ({"config_map": "c"}, {"configMap": {"name": "c"}}),
        ({"secret": "s"}, {"secret": {"secretName": "s"}}),
    ],
)  # fmt: skip
def test_a_volume_has_its_source(volume, source):
    option = {"name": "data", "mount": "/data", "read_only": True, "sub_path": "a/b", **volume}
    where = partition(volumes=[option])
    spec = pod(where)["spec"]
    assert [one for one in spec["volumes"] if one["name"] == "data"] == [{"name": "data", **source}]
    mounts = {one["name"]: one for one in spec["containers"][0]["volumeMounts"]}
    assert mounts["data"] == {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "a/b"}
    assert manifest_schemas.complaints(workload(where)) == []


def test_an_ipujob_asks_for_all_ipus_of_its_ranks():
    where = partition("ipu", 64, kind="ipujob")
    run = replace(preview_plan(where, 1, 2).runs[0], parameters={"ipus_per_replica": 4, "ipu_replicas": 2})
    made = workload(where, 1, 2, runs=(run,))
    assert made["spec"]["ipusPerJobInstance"] == "16"
    assert workload(where, 1, 2)["spec"]["ipusPerJobInstance"] == "2"
    assert manifest_schemas.complaints(made) == []


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("ada", "ada"),
        ("Ada L.", "Ada-L"),
        ("_x_", "x"),
        ("é" * 70, ""),
        ("a" * 70, "a" * 63),
        ("u@site.org", "u-site.org"),
    ],
)
def test_names_of_users_become_values_of_labels(text, safe):
    assert label_safe(text) == safe


def test_objects_are_found_by_their_labels():
    assert label_selector(allocation="0-a", owner="Ada L") == (
        "app.kubernetes.io/managed-by=pytest-mlhpc,pytest-mlhpc/allocation=0-a,pytest-mlhpc/owner=Ada-L"
    )


# --- reviewed manifests of systems.yaml, which ../test_reviewed_previews.py writes


OBJECTS = {
    path.stem: list(yaml.safe_load_all(path.read_text()))
    for path in sorted((Path(__file__).parent / "golden").glob("*.yaml"))
}


@pytest.mark.parametrize("name", OBJECTS)
def test_each_manifest_is_what_the_published_schema_of_its_kind_says(name):
    assert [manifest_schemas.complaints(one) for one in OBJECTS[name]] == [[]] * len(OBJECTS[name]) != []


@pytest.mark.parametrize(
    ("kind", "spec", "complaint"),
    [
        ("batch/v1 Job", {"parallelism": "2"}, "spec.parallelism"),
        ("batch/v1 Job", {"paralelism": 2}, "spec.paralelism"),
        (
            "batch/v1 Job",
            {"template": {"spec": {"containers": [{"name": "w", "imag": "x"}]}}},
            "containers.0.imag",
        ),
        ("kubeflow.org/v1 PyTorchJob", {"runPolicy": {"backofLimit": 1}}, "backofLimit"),
        (
            "kubeflow.org/v1 PyTorchJob",
            {"pytorchReplicaSpecs": {"Master": {"template": {"spce": {}}}}},
            "spce",
        ),
    ],
)
def test_the_check_of_manifests_sees_mistakes(kind, spec, complaint):
    version, kind = kind.split()
    found = manifest_schemas.complaints({"apiVersion": version, "kind": kind, "metadata": {}, "spec": spec})
    assert any(complaint in text for text in found)


@pytest.mark.parametrize("name", [name for name in OBJECTS if name.startswith("eidf-gpu.")])
def test_what_eidf_is_given_follows_its_rules(name):
    (job,) = OBJECTS[name]
    meta, spec = job["metadata"], job["spec"]["template"]["spec"]
    assert job["kind"] == "Job"  # no bare pods
    assert (meta["generateName"][-1], "name" in meta) == ("-", False)
    assert meta["labels"]["kueue.x-k8s.io/queue-name"].endswith("-user-queue")
    assert int(meta["labels"]["kueue.x-k8s.io/max-exec-time-seconds"]) > 0
    assert spec["nodeSelector"]["nvidia.com/gpu.product"].startswith("NVIDIA-")
    for container in (*spec["containers"], *spec["initContainers"]):
        asked, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= asked.keys() & limits.keys()
        assert int(limits["nvidia.com/gpu"]) <= 8
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert any("persistentVolumeClaim" in volume for volume in volumes.values())
    assert volumes["mlhpc-shm"]["emptyDir"]["medium"] == "Memory"


# --- previews


def test_a_preview_is_what_could_be_created():
    head, _, rest = preview(partition(service=True), ENVIRONMENT).partition("\n")
    assert head.startswith("# Created before these: Secret mlhpc-00000000-0000-7000-8000-000000000000")
    service, job = yaml.safe_load_all(rest)
    assert (service["kind"], job["kind"], job["spec"]["completions"]) == ("Service", "Job", 2)


def test_a_preview_that_cannot_be_made_names_its_place():
    with pytest.raises(UsageError, match=r"^environment default: .*spec\.backoffLimit"):
        preview(partition(manifest={"spec": {"backoffLimit": 3}}), ENVIRONMENT)
