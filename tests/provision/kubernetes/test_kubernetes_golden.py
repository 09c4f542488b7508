"""The manifests of systems.yaml, as reviewed, are what schemas and sites want; ../test_reviewed_previews.py writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import manifest_schemas
import pytest
import yaml

GOLDEN = Path(__file__).parent / "golden"
OURS = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))


def pod_spec(found: dict[str, Any]) -> dict[str, Any]:
    holder = found["spec"]["workers"] if found["kind"] == "IPUJob" else found["spec"]
    return dict(holder["template"]["spec"])


@pytest.mark.parametrize("name", OURS)
def test_each_manifest_is_what_the_published_schema_of_its_kind_says(name: str):
    found = objects(name)
    assert found
    for one in found:
        assert manifest_schemas.complaints(one) == []


JOB = {"apiVersion": "batch/v1", "kind": "Job"}
PYTORCH_JOB = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}}


@pytest.mark.parametrize(
    ("job", "spec", "complaint"),
    [
        (JOB, {"parallelism": "2"}, "spec.parallelism"),
        (JOB, {"paralelism": 2}, "spec.paralelism"),
        (JOB, {"template": {"spec": {"containers": [{"name": "w", "imag": "x"}]}}}, "containers.0.imag"),
        (PYTORCH_JOB, {"runPolicy": {"backofLimit": 1}}, "backofLimit"),
        (PYTORCH_JOB, {"pytorchReplicaSpecs": {"Master": {"template": {"spce": {}}}}}, "spce"),
    ],
)
def test_the_check_of_manifests_sees_mistakes(job: dict[str, Any], spec: dict[str, Any], complaint: str):
    assert any(complaint in text for text in manifest_schemas.complaints({**job, "spec": spec}))


NO_PRIVILEGES = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
EIDF = [name for name in OURS if name.startswith("eidf-gpu.")]


@pytest.mark.parametrize("name", EIDF)
def test_what_eidf_is_given_follows_its_rules(name: str):
    (job,) = objects(name)
    assert job["kind"] == "Job"  # no bare pods
    assert job["metadata"]["generateName"].endswith("-")
    assert "name" not in job["metadata"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"].endswith("-user-queue")
    assert int(job["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"]) > 0
    spec = pod_spec(job)
    assert spec["nodeSelector"]["nvidia.com/gpu.product"].startswith("NVIDIA-")
    for container in (*spec["containers"], *spec["initContainers"]):
        asked, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= asked.keys() & limits.keys()
        assert int(limits["nvidia.com/gpu"]) <= 8
    assert any("persistentVolumeClaim" in volume for volume in spec["volumes"])
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "mlhpc-shm")
    assert shm["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("name", OURS)
def test_every_pod_has_limits_in_time_and_is_restricted_unless_its_manifest_says_otherwise(name: str):
    for one in objects(name):
        if one["kind"] == "Service":
            continue
        spec = pod_spec(one)
        assert spec["activeDeadlineSeconds"] > 0
        assert spec["restartPolicy"] == "Never"
        if one["kind"] == "Job":
            assert one["spec"]["backoffLimit"] == 0
            assert one["spec"]["activeDeadlineSeconds"] > spec["activeDeadlineSeconds"]
            assert one["spec"]["ttlSecondsAfterFinished"] > 0
        if name.startswith("eidf-graphcore."):
            continue  # its devices need the host's IPC
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec["initContainers"]):
            assert container["securityContext"] == NO_PRIVILEGES
