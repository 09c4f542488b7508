"""From a plan to its objects: what pods ask for, where they may run, who they are, what they may do."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import manifest_schemas
import pytest
from manifests import partition, pod, rendered, variables, worker, workload

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.labels import label_safe, selector
from pytest_mlhpc.provision.kubernetes.preview import plan_of
from pytest_mlhpc.results.schema import from_json
from pytest_mlhpc.vet.settings import Settings

OURS = {
    "app.kubernetes.io/managed-by": "pytest-mlhpc",
    "pytest-mlhpc/session": "session-1",
    "pytest-mlhpc/allocation": "0-a",
    "pytest-mlhpc/run": "00000000-0000-7000-8000-000000000000",
    "pytest-mlhpc/owner": "Ada-Lovelace",
}


@pytest.mark.parametrize("kind", ["job", "pods", "pytorchjob", "jobset"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_all_that_is_made_is_what_its_published_schema_says(kind: str, nodes: int):
    made = rendered(partition("cuda", 4, kind=kind, service=True), nodes, 4 * nodes)
    for one in (made.config_map, *([made.service] if made.service else []), *made.workloads):
        assert manifest_schemas.complaints(one) == []


def test_every_object_and_pod_carries_our_labels():
    made = rendered(partition(service=True, labels={"team": "a"}, annotations={"note": "b"}), 2)
    assert made.service is not None
    for meta in (made.config_map["metadata"], made.service["metadata"], made.workloads[0]["metadata"]):
        assert meta["labels"] == {**OURS, "team": "a"}
        assert meta["name"] == "mlhpc-0-a"
    template = made.workloads[0]["spec"]["template"]["metadata"]
    assert template == {"labels": {**OURS, "team": "a"}, "annotations": {"note": "b"}}


def test_objects_made_again_without_unfit_nodes_have_names_of_their_own():
    from manifests import ENVIRONMENT, IDENTITY

    from pytest_mlhpc.provision.kubernetes.options import settings_of
    from pytest_mlhpc.provision.kubernetes.preview import plan_of
    from pytest_mlhpc.provision.kubernetes.render import render

    where = partition()
    made = render(settings_of(where), where, ENVIRONMENT, plan_of(where, 1, 1), b"", IDENTITY, 2)
    name = "mlhpc-00000000-0000-7000-8000-000000000000-r2"
    assert made.config_map["metadata"]["name"] == made.workloads[0]["metadata"]["name"] == name
    assert made.workloads[0]["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == name


def test_the_config_map_holds_the_plan_as_pods_see_it_and_the_payload():
    made = rendered(partition(), payload=b"content", scheduler_options={"image": "x"})
    plan = from_json(Plan, json.loads(made.config_map["data"]["plan.json"]))
    assert (plan.directory, plan.allocation_id, plan.scheduler_options) == ("/mlhpc/work", "0-a", {})
    assert base64.b64decode(made.config_map["binaryData"]["abc.zip"]) == b"content"
    assert made.config_map["immutable"] is True
    assert variables(made.workloads[0]["spec"]["template"]["spec"]["containers"][0])["PYTHONPATH"] == (
        "/mlhpc/config/abc.zip"
    )


def test_an_image_with_this_package_gets_no_payload():
    made = rendered(partition(), payload=None)
    assert "binaryData" not in made.config_map
    assert "PYTHONPATH" not in variables(made.workloads[0]["spec"]["template"]["spec"]["containers"][0])


def test_what_a_config_map_cannot_hold_is_refused():
    with pytest.raises(
        UsageError, match=r"site:part: plan and payload have \d+ bytes, a ConfigMap takes 1048576"
    ):
        rendered(partition(), payload=b"x" * 2**20)


def test_agent_and_probe_are_started_without_a_shell():
    spec = pod(partition())["spec"]
    assert spec["containers"][0]["command"] == [
        "/opt/python", "-m", "pytest_mlhpc.batch.pod", "/mlhpc/config/plan.json",
    ]  # fmt: skip
    (probe,) = spec["initContainers"]
    assert probe["command"] == ["/opt/python", "-m", "pytest_mlhpc.batch.probe", "/mlhpc/config/plan.json"]
    for key in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert probe[key] == spec["containers"][0][key]
    assert "initContainers" not in pod(partition(probe=False))["spec"]


def test_a_pod_on_cpus_asks_for_its_whole_node_in_requests_and_limits():
    asked = worker(partition(), 1, 4)["resources"]
    assert asked == {
        "requests": {"cpu": "16", "memory": "65536Mi"},
        "limits": {"cpu": "16", "memory": "65536Mi"},
    }


@pytest.mark.parametrize(("ranks", "cpu", "memory"), [(1, "4", "16384Mi"), (4, "16", "65536Mi")])
def test_a_pod_with_devices_asks_for_their_share_of_the_node(ranks: int, cpu: str, memory: str):
    asked = worker(partition("cuda", 4), 1, ranks)["resources"]
    assert asked["limits"] == {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(ranks)}
    assert asked["requests"] == {"cpu": cpu, "memory": memory}


@pytest.mark.parametrize(
    ("accelerator", "options", "resource"),
    [
        ("rocm", {}, "amd.com/gpu"),
        ("xpu", {}, "gpu.intel.com/i915"),
        ("cuda", {"device_resource": "nvidia.com/mig-1g.5gb"}, "nvidia.com/mig-1g.5gb"),
        ("cpu", {"device_resource": "nvidia.com/gpu"}, "nvidia.com/gpu"),
    ],
)
def test_devices_are_asked_for_by_the_resource_of_their_plug_in(
    accelerator: str, options: dict[str, Any], resource: str
):
    assert worker(partition(accelerator, 2, **options), 1, 2)["resources"]["limits"][resource] == "2"


def test_resources_of_the_partition_are_put_over_its_nodes():
    where = partition(
        resources={"limits": {"memory": "8GiB", "site.org/disk": 1}, "requests": {"cpu": "500m"}}
    )
    asked = worker(where)["resources"]
    assert asked["limits"] == {"cpu": "16", "memory": "8589934592", "site.org/disk": "1"}
    assert asked["requests"] == {"cpu": "500m", "memory": "8589934592"}


def test_shared_memory_is_half_of_the_pods_unless_said():
    def size(where: Any) -> str:
        volumes = {one["name"]: one for one in pod(where)["spec"]["volumes"]}
        return str(volumes["mlhpc-shm"]["emptyDir"]["sizeLimit"])

    assert size(partition()) == "32768Mi"
    assert size(partition(shared_memory="1GiB")) == "1024Mi"


def test_time_limits_of_pod_and_job_cover_what_each_counts():
    job = workload(
        partition(patience={"image": 60, "unschedulable": 100, "quota": 10}, grace=5), time_limit_s=600.5
    )
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 666  # its image, its runs, its end
    assert job["spec"]["activeDeadlineSeconds"] == 776  # the wait for a node too
    assert job["spec"]["ttlSecondsAfterFinished"] == 604800
    assert job["spec"]["backoffLimit"] == 0


@pytest.mark.parametrize(("probe", "seconds"), [(True, 666 + 30 + 60), (False, 666)])
def test_the_time_that_a_probe_may_vet_is_the_pods_too(probe: bool, seconds: int):
    job = workload(
        partition(patience={"image": 60}, grace=5, probe=probe),
        time_limit_s=600.5,
        vetting=Settings(budget_s=30),
    )
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == seconds


def test_several_pods_are_numbered_by_the_job():
    job = workload(partition(), 3)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert job["spec"]["completionMode"] == "Indexed"
    told = variables(job["spec"]["template"]["spec"]["containers"][0])
    assert told["MLHPC_PODS"] == "3"
    assert told["MLHPC_POD_RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_one_pod_needs_no_number_of_a_server():
    job = workload(partition())
    assert "completionMode" not in job["spec"]
    assert variables(job["spec"]["template"]["spec"]["containers"][0])["MLHPC_POD_RANK"] == "0"
    assert job["spec"]["template"]["metadata"]["labels"]["pytest-mlhpc/rank"] == "0"


def test_spares_are_more_pods():
    job = workload(partition(), 2, spares=1)
    assert job["spec"]["completions"] == 3
    assert variables(job["spec"]["template"]["spec"]["containers"][0])["MLHPC_PODS"] == "3"


def test_a_group_of_pods_has_explicit_ranks():
    pods = rendered(partition(kind="pods"), 2).workloads
    assert [one["metadata"]["name"] for one in pods] == ["mlhpc-0-a-0", "mlhpc-0-a-1"]
    assert [one["metadata"]["labels"]["pytest-mlhpc/rank"] for one in pods] == ["0", "1"]
    assert [variables(one["spec"]["containers"][0])["MLHPC_POD_RANK"] for one in pods] == ["0", "1"]


@pytest.mark.parametrize(
    ("kind", "leader"),
    [
        ("job", "mlhpc-0-a-0.mlhpc-0-a"), ("pods", "mlhpc-0-a-0.mlhpc-0-a"),
        ("pytorchjob", "mlhpc-0-a-master-0"), ("jobset", "mlhpc-0-a-pods-0-0.mlhpc-0-a"),
    ],
)  # fmt: skip
def test_a_service_is_there_where_asked_unless_an_operator_makes_it(kind: str, leader: str):
    made = rendered(partition(kind=kind, service=True), 2)
    assert (made.service is not None) == (kind in {"job", "pods"})
    text = json.dumps(made.workloads)
    assert f'{{"name": "MLHPC_LEADER", "value": "{leader}"}}' in text
    assert ('"subdomain": "mlhpc-0-a"' in text) == (kind in {"job", "pods"})
    if made.service:
        assert made.service["spec"] == {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"pytest-mlhpc/allocation": "0-a"},
        }


def test_without_a_service_nobody_is_told_of_a_leader():
    made = rendered(partition(), 2)
    assert made.service is None
    assert "MLHPC_LEADER" not in variables(made.workloads[0]["spec"]["template"]["spec"]["containers"][0])
    assert rendered(partition(service=True), 1).service is None


def test_a_pytorchjob_of_one_pod_has_no_workers():
    one, three = (
        workload(partition(kind="pytorchjob"), nodes)["spec"]["pytorchReplicaSpecs"] for nodes in (1, 3)
    )
    assert list(one) == ["Master"]
    assert (three["Master"]["replicas"], three["Worker"]["replicas"]) == (1, 2)
    (container,) = three["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert variables(container)["MLHPC_POD_RANK"] == "$(RANK)"
    (probe,) = three["Worker"]["template"]["spec"]["initContainers"]
    assert variables(probe)["MLHPC_POD_RANK"] == "0"  # operators tell init containers nothing


def test_a_job_in_kueues_queue_waits_for_it_and_its_pods_are_no_matter_of_it():
    labels = {"kueue.x-k8s.io/queue-name": "q", "team": "a"}
    job = workload(partition(kind="kueue", labels=labels, patience={"image": 10}, grace=5), time_limit_s=85.0)
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "100"
    assert [key for key in job["spec"]["template"]["metadata"]["labels"] if "kueue" in key] == []
    assert job["spec"]["template"]["metadata"]["labels"]["team"] == "a"


def test_the_server_completes_names_where_a_site_wants_that():
    meta = workload(partition(generate_name=True))["metadata"]
    assert meta["generateName"] == "mlhpc-0-a-"
    assert "name" not in meta


def test_nodes_are_chosen_and_left_out_one_by_one():
    spec = pod(partition(), nodelist=("n1", "n2"), excluded_nodes=("bad", "worse"))["spec"]
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def field(operator: str, name: str) -> dict[str, Any]:
        return {"key": "metadata.name", "operator": operator, "values": [name]}

    off = [field("NotIn", "bad"), field("NotIn", "worse")]
    assert required == {
        "nodeSelectorTerms": [
            {"matchFields": [field("In", "n1"), *off]},
            {"matchFields": [field("In", "n2"), *off]},
        ]
    }
    assert "affinity" not in pod(partition())["spec"]


def test_excluded_nodes_count_in_each_of_the_manifests_own_terms():
    zones = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": [name]}]} for name in ("a", "b")
    ]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}
    }
    where = partition(manifest={"spec": {"template": {"spec": {"affinity": affinity}}}})
    found = pod(where, excluded_nodes=("bad",))["spec"]["affinity"]["nodeAffinity"]
    terms = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [zone["matchExpressions"] for zone in zones]
    assert all(term["matchFields"][0]["values"] == ["bad"] for term in terms)


@pytest.mark.parametrize(
    ("spread", "key"),
    [
        ("required", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("preferred", "preferredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_pods_of_one_allocation_keep_apart(spread: str, key: str):
    apart = pod(partition(spread=spread), 2)["spec"]["affinity"]["podAntiAffinity"]
    assert list(apart) == [key]
    assert '"pytest-mlhpc/allocation": "0-a"' in json.dumps(apart)
    assert "kubernetes.io/hostname" in json.dumps(apart)
    assert "affinity" not in pod(partition(spread="none"), 2)["spec"]
    assert "affinity" not in pod(partition(spread=spread), 1)["spec"]


def test_pods_are_restricted_and_hold_no_token():
    spec = pod(partition(run_as_user=1000, run_as_group=100, fs_group=10))["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 1000, "runAsGroup": 100,
        "fsGroup": 10,
    }  # fmt: skip
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_security_can_be_left_to_the_manifest():
    spec = pod(partition(security="as_manifest", run_as_user=0))["spec"]
    assert spec["securityContext"] == {"runAsUser": 0}
    assert "automountServiceAccountToken" not in spec
    assert "securityContext" not in spec["containers"][0]


def test_volumes_come_from_where_they_are_said_to():
    volumes = [
        {"name": "data", "mount": "/data", "claim": "set-1", "read_only": True, "sub_path": "a/b"},
        {"name": "fast", "mount": "/fast", "template": {"size": "5Gi", "storage_class": "nvme"}},
        {"name": "host", "mount": "/host", "host_path": "/srv"},
        {"name": "tmp", "mount": "/tmp", "empty_dir": {"size": "1GiB", "medium": "memory"}},
        {"name": "conf", "mount": "/conf", "config_map": "c"},
        {"name": "key", "mount": "/key", "secret": "s"},
    ]
    spec = pod(partition(volumes=volumes))["spec"]
    found = {one.pop("name"): one for one in spec["volumes"] if not one["name"].startswith("mlhpc-")}
    assert found == {
        "data": {"persistentVolumeClaim": {"claimName": "set-1"}},
        "fast": {
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "5Gi"}},
                        "storageClassName": "nvme",
                    }
                }
            }
        },
        "host": {"hostPath": {"path": "/srv"}},
        "tmp": {"emptyDir": {"medium": "Memory", "sizeLimit": "1073741824"}},
        "conf": {"configMap": {"name": "c"}},
        "key": {"secret": {"secretName": "s"}},
    }
    mounts = {one["name"]: one for one in spec["containers"][0]["volumeMounts"]}
    assert mounts["data"] == {"name": "data", "mountPath": "/data", "readOnly": True, "subPath": "a/b"}
    assert manifest_schemas.complaints(workload(partition(volumes=volumes))) == []


def test_what_a_partition_says_of_its_pods_is_there():
    where = partition(
        node_selector={"gpu": "a100"},
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        priority_class="high",
        service_account="runner",
        runtime_class="nvidia",
        image_pull_secrets=["pull"],
        image_pull_policy="Always",
        grace="12s",
    )
    spec = pod(where)["spec"]
    assert spec["nodeSelector"] == {"gpu": "a100"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "runner")
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("nvidia", [{"name": "pull"}])
    assert spec["containers"][0]["imagePullPolicy"] == "Always"
    assert spec["terminationGracePeriodSeconds"] == 12


def test_an_ipujob_asks_for_all_ipus_of_its_ranks():
    where = partition("ipu", 64, kind="ipujob")
    one = plan_of(where, 1, 2).runs[0]
    fields = {"ipus_per_replica": 4, "ipu_replicas": 2}
    made = workload(where, 1, 2, runs=(replace(one, parameters=fields),))
    assert made["spec"]["ipusPerJobInstance"] == "16"
    assert workload(where, 1, 2)["spec"]["ipusPerJobInstance"] == "2"
    assert manifest_schemas.complaints(made) == []


def test_a_kind_with_a_most_of_pods_has_no_more():
    with pytest.raises(UsageError, match="site:part: IPUJob has at most 1 pod here, not 2"):
        rendered(partition("ipu", 4, kind="ipujob"), 2)


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
def test_names_of_users_become_values_of_labels(text: str, safe: str):
    assert label_safe(text) == safe


def test_objects_are_found_by_their_labels():
    assert selector(allocation="0-a", owner="Ada L") == (
        "app.kubernetes.io/managed-by=pytest-mlhpc,pytest-mlhpc/allocation=0-a,pytest-mlhpc/owner=Ada-L"
    )
