"""The manifests of systems.yaml, as reviewed: ``MLHPC_UPDATE_GOLDEN=1 pytest tests/provision/kubernetes`` writes them."""

from __future__ import annotations

import argparse
import os
from functools import cache
from pathlib import Path
from typing import Any

import manifest_schemas
import pytest
import yaml

from pytest_mlhpc.plugins import make_manager
from pytest_mlhpc.system import cli
from pytest_mlhpc.system.loading import load_systems
from pytest_mlhpc.system.previews import Previews, previews

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
OURS = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


@cache
def shown() -> Previews:
    hook = make_manager().hook
    schedulers = {name: model for each in hook.mlhpc_schedulers() for name, model in each.items()}
    return previews(load_systems(ROOT / "systems.yaml", schedulers=schedulers, environ={}), hook)


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()))


def pod_spec(found: dict[str, Any]) -> dict[str, Any]:
    spec = found["spec"]
    if found["kind"] == "IPUJob":
        return dict(spec["workers"]["template"]["spec"])
    return dict(spec["template"]["spec"])


def test_the_manifests_of_our_systems_are_those_that_were_reviewed():
    texts = {name: preview.text for name, preview in shown().found.items() if preview.suffix == "yaml"}
    if os.environ.get("MLHPC_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        for old in GOLDEN.glob("*.yaml"):
            old.unlink()
        for name, text in texts.items():
            (GOLDEN / f"{name}.yaml").write_text(text)
    reviewed = {path.stem: path.read_text() for path in GOLDEN.glob("*.yaml")}
    assert shown().notes == ()
    assert sorted(texts) == sorted(reviewed)
    for name, text in texts.items():
        assert text == reviewed[name], f"{name}: see the head of this file"


@pytest.mark.parametrize("name", OURS)
def test_each_manifest_is_what_the_published_schema_of_its_kind_says(name: str):
    found = objects(name)
    assert found
    for one in found:
        assert manifest_schemas.complaints(one) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spec": {"parallelism": "2"}}, "spec.parallelism"),
        ({"spec": {"paralelism": 2}}, "spec.paralelism"),
        ({"spec": {"template": {"spec": {"containers": [{"name": "w", "imag": "x"}]}}}}, "containers.0.imag"),
    ],
)
def test_the_check_of_manifests_sees_mistakes(change: dict[str, Any], complaint: str):
    one = {"apiVersion": "batch/v1", "kind": "Job", **change}
    assert any(complaint in text for text in manifest_schemas.complaints(one))


def test_the_check_sees_mistakes_in_kinds_of_others():
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {}}
    spec = {"runPolicy": {"backofLimit": 1}, "pytorchReplicaSpecs": {"Master": {"template": {"spce": {}}}}}
    texts = manifest_schemas.complaints({**job, "spec": spec})
    assert any("backofLimit" in text for text in texts)
    assert any("spce" in text for text in texts)


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
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def mlhpc_systems(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(argv))


def test_manifests_are_printed_counted_and_written_beside_job_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    (tmp_path / "systems.yaml").write_text(
        "systems:\n  mine:\n    partitions:\n      one:\n        scheduler: kubernetes\n"
        "        nodes: {cores: 2, memory: 2GiB}\n        kubernetes: {image: '${IMAGE}'}\n"
        "        environments: {default: {python: python3}}\n"
        "      two:\n        scheduler: slurm\n        nodes: {cores: 2, memory: 2GiB}\n"
        "        environments: {default: {python: python3}}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert mlhpc_systems("check", "--render-to", "out") == 0
    assert (
        capsys.readouterr().out.splitlines()[-1].endswith("1 systems, 1 job scripts, 1 manifests, no problem")
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "mine.one.default.yaml",
        "mine.two.default.sh",
    ]
    assert mlhpc_systems("check", "--render", "mine:one") == 0
    (job,) = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "${IMAGE}"
