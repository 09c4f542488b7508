"""``kubernetes={...}`` of a test: checked at collection, carried to its allocation, ignored where there is no Kubernetes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.config.model import NodeType, Vet
from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.ledger_entry import spec_digest
from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.plan import plan_of, vetting_settings
from pytest_mlhpc.jobs.spec import fits_into, same_needs
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions

RATE = [Metric("rate", r"rate: (\S+)", "items/s")]


@pytest.fixture
def cluster(target):
    """Return a target whose scheduler is kubernetes."""
    options = KubernetesOptions.model_validate({"image": "a", "labels": {"team": "x"}}).model_dump()
    partition = replace(target.partition, scheduler="kubernetes", scheduler_options=options)
    return replace(target, partition=partition)


@pytest.fixture
def spec(declare):
    """Declare a test on a target whose scheduler's package is installed."""
    return lambda on, **marked: declare(on=on, **{"schemas": {"kubernetes": KubernetesOptions}, **marked})


def test_options_are_checked_and_carried_to_the_allocation(spec, cluster, tmp_path):
    found = spec(cluster, kubernetes={"image": "b", "patience": {"image": "2m"}, "shared_memory": "1GiB"})
    assert found.scheduler_options.items() >= {"image": "b", "shared_memory": 2**30}.items()
    assert found.asked["kubernetes"]["patience"]["image"] == 120.0
    plan = plan_of([(found, 0)], tmp_path, "sha")
    assert plan.scheduler_options == found.scheduler_options
    stored = json.loads(json.dumps(to_json(plan)))
    assert from_json(Plan, stored) == plan
    del stored["scheduler_options"]  # as older sessions wrote it
    assert from_json(Plan, stored).scheduler_options == {}


def test_they_make_another_job_but_no_other_definition(spec, cluster):
    plain, other = spec(cluster), spec(cluster, kubernetes={"image": "b"})
    assert plain.definition == other.definition
    assert spec_digest(plain) != spec_digest(other)
    assert not same_needs(plain, other)
    assert same_needs(other, spec(cluster, kubernetes={"image": "b"}, name="second"))


def test_they_are_ignored_on_every_other_system(spec, target):
    found = spec(target, kubernetes={"image": "b", "nonsense": 1})
    assert (found.scheduler_options, found.asked) == ({}, {})
    assert spec_digest(found) == spec_digest(spec(target))


def test_a_file_is_found_next_to_the_test(spec, cluster, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("spec: {suspend: false}\n")
    for folder, manifest in ((tmp_path, "job.yaml"), (Path(), path)):
        found = spec(cluster, folder=folder, kubernetes={"manifest": manifest})
        assert found.scheduler_options["manifest"] == {"spec": {"suspend": False}}


def test_a_record_holds_the_hash_of_a_manifest_alone(spec, cluster):
    container = {"name": "worker", "env": [{"name": "T", "value": "s3cret"}]}
    manifest = {"spec": {"template": {"spec": {"containers": [container]}}}}
    found = spec(cluster, kubernetes={"manifest": manifest, "image": "b"})
    assert found.scheduler_options["manifest"] == manifest
    assert "s3cret" not in str(found.asked)
    asked = found.asked["kubernetes"]
    assert (asked["manifest"].partition(":")[0], asked["image"]) == ("sha256", "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"imag": "b"}, "kubernetes.imag: unknown key (did you mean 'image'?)"),
        ({"labels": {"a": "b c"}}, "kubernetes.labels.a: 'b c' is not a label's value: letters, digits, '.', '_' and '-', at most 63"),
        ({"kind": "jobz"}, "kubernetes: kind 'jobz' is not one of ipujob, job, jobset, kueue, pods, pytorchjob (did you mean 'job'?)"),
        ({"manifest": "none.yaml"}, "kubernetes.manifest: none.yaml: cannot be read: No such file or directory"),
        ({"tolerations": [{"key": "a", "efect": "b"}]}, "kubernetes.tolerations[0].efect: unknown key (did you mean 'effect'?)"),
        ({"image": object}, "kubernetes: kubernetes.image: type is neither text nor number, list or mapping"),
        ({"labels": {1: "a"}}, "kubernetes: kubernetes.labels: the key 1 should be text"),
        (["image"], "kubernetes: expected mapping, found ['image']"),
    ],
)  # fmt: skip
def test_a_mistake_names_test_key_and_nearest_name(spec, cluster, given, message):
    with pytest.raises(SpecError) as caught:
        spec(cluster, kubernetes=given)
    assert str(caught.value) == f"t.py::test_it: {message}"


def test_without_a_package_for_the_scheduler_they_cannot_be_checked(spec, cluster):
    with pytest.raises(SpecError, match="kubernetes: no installed package takes options of it"):
        spec(cluster, schemas={}, kubernetes={"image": "b"})


@pytest.mark.parametrize(
    ("kind", "devices", "share"),
    [
        ("kubernetes cuda", 1, (16, 2**34)), ("kubernetes cuda", 4, (64, 2**36)), ("kubernetes cpu", 1, (64, 2**36)),
        ("kubernetes ipu", 1, (64, 2**36)), ("slurm cuda", 1, (64, 2**36)),
    ],
)  # fmt: skip
def test_a_run_in_a_pod_has_the_share_of_the_node_that_its_devices_are(spec, target, kind, devices, share):
    scheduler, accelerator = kind.split()
    node = NodeType(cores=64, memory=2**36, max=1, devices=4)
    partition = replace(target.partition, scheduler=scheduler, accelerator=accelerator, nodes=node)
    found = spec(replace(target, partition=partition), devices_per_node=devices)
    assert (found.node_cores, found.node_memory) == share
    assert found.cores_per_rank == share[0] // devices


@pytest.mark.parametrize(
    ("workload", "asked", "text"),
    [
        ("cosmoflow", {}, "sys:part has no agent in its pods (kubernetes: {agent: false}), which only programs can do without"),
        ("command", {"ranks_per_node": 2}, "ranks_per_node: sys:part has no agent in its pods (kubernetes: {agent: false}): a pod runs one process, 2 asked"),
        ("command", {"nodes": 2}, "nodes: sys:part has no agent in its pods (kubernetes: {agent: false}) that would start it once; for one process on each node say ranks_per_node=1"),
        ("command", {"files": [Path(__file__).name]}, "files: sys:part has no agent in its pods (kubernetes: {agent: false}) that would take them; put them on a volume"),
        ("command", {"artifacts": "m.json"}, "artifacts: sys:part has no agent in its pods (kubernetes: {agent: false}) that would send them"),
        ("command", {"metrics": [Metric("rate", file="m.json", key="rate", unit="MB/s")]}, "artifacts: sys:part has no agent"),
        ("command", {"env": {"A": "{numa_nodes}"}}, "that would read {numa_nodes} on the node"),
    ],
)  # fmt: skip
def test_what_needs_an_agent_is_refused_where_a_pod_has_none(spec, cluster, workload, asked, text):
    fields = {"command": ["x"], "metrics": RATE} if workload == "command" else {}
    with pytest.raises(SpecError) as caught:
        spec(
            cluster,
            workload=workload,
            folder=Path(__file__).parent,
            **{**fields, **asked},
            kubernetes={"agent": False},
        )
    assert text in str(caught.value.problems[0])


def test_a_program_without_agent_shares_no_allocation_and_is_not_vetted(spec, cluster):
    vetted = replace(cluster, partition=replace(cluster.partition, vet=Vet("quick"), launcher="torchrun"))
    fields = {"workload": "command", "command": ["x"], "metrics": RATE, "nodes": 2, "ranks_per_node": 1}
    found = spec(vetted, **fields, kubernetes={"agent": False})
    assert found.agentless
    assert not fits_into([found], replace(found, node_id="other"), None)
    assert vetting_settings(found) is None
    usual = spec(vetted, **fields)
    assert fits_into([usual], replace(usual, node_id="other"), None)
    assert vetting_settings(usual) is not None
