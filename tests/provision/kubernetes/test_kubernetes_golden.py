"""The manifests of systems.yaml, as reviewed, are what schemas and sites want; ../test_reviewed_previews.py writes them."""

from __future__ import annotations

from pathlib import Path

import manifest_schemas
import pytest
import yaml

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
