"""Trainings that cannot fit into the memory of their devices are refused before anything is submitted."""

import importlib
from dataclasses import replace

import pytest

from pytest_mlhpc.config.model import NodeType
from pytest_mlhpc.node.worker.reporting import count
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.session.preflight import model_bytes, need_of, parameter_count, too_large

GIB = 2**30
NAMED = {workload.name: workload for workload in WORKLOADS}


@pytest.fixture
def on(declare, target):
    """Return the job of the 8-billion-parameter model on GPUs of a model, four a node."""

    def make(model="NVIDIA H100 80GB HBM3", *, memory=0, devices=4, **marked):
        size = {"cores": 64, "memory": 512 * GIB, "max": 4, "devices": 4}
        nodes = NodeType(**size, device_model=model, device_memory=memory)
        partition = replace(target.partition, accelerator="cuda", nodes=nodes)
        given = {
            "preset": "llama_8b",
            "devices_per_node": min(4, devices),
            "nodes": max(1, devices // 4),
            **marked,
        }
        return declare("language_model", on=replace(target, partition=partition), **given)

    return make


def sentence(spec):
    (problem,) = too_large([spec])
    assert (problem.where, problem.key) == ("t.py::test_it", "parallel")
    return problem.message


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("cosmoflow", [{}, {"kernel_size": 2}, {"layers": 3, "base_channels": 7}]),
        ("deepcam", [{}, {"width_multiplier": 1 / 32}, {"middle_blocks": 0, "width_multiplier": 0.3}]),
        ("resnet50", [{}, {"stem": "epcc", "classes": 7}]),
        (
            "language_model",
            [{}, {"architecture": "llama"}, {"architecture": "llama", "kv_heads": 2}, {"ffn": 100}],
        ),
    ],
)
def test_parameters_are_counted_as_the_models_have_them(name, variants):
    for preset in NAMED[name].presets:
        for changes in variants:
            if preset == "llama_8b" and changes:
                continue
            values = parameters_of(NAMED[name], preset, **changes)
            task = importlib.import_module(NAMED[name].module).task(values)
            assert parameter_count(name, values) == count(task).parameters, (preset, changes)


def test_nobody_knows_the_parameters_of_a_workload_of_others():
    assert parameter_count("theirs", {"optimizer": "sgd"}) is None


@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("sgd", 3), ("lars", 3), ("adam", 4), ("adamw", 4), ("lamb", 4)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "tf32"])
def test_parameters_gradients_and_states_are_stored_in_fp32(on, optimizer, numbers, precision):
    need = need_of(on(optimizer=optimizer, precision=precision, preset="smoke"))
    assert need.unsharded == 4 * numbers * need.parameters


def test_powersgd_keeps_what_it_did_not_send(on):
    plain, compressed = (
        need_of(on(gradient_compression=how, preset="smoke")) for how in ("none", "powersgd")
    )
    assert compressed.unsharded == plain.unsharded + 4 * plain.parameters


@pytest.mark.parametrize(
    ("model", "changes", "words", "end"),
    [
        pytest.param(
            "NVIDIA H100 80GB HBM3",
            {},
            (
                "needs 119.7GiB unsharded (8,030,261,248 parameters, their gradients and adamw's states in fp32",
                "a NVIDIA H100 80GB HBM3 of sys:part has 80GiB: shard over at least 2",
            ),
            ', such as parallel={"replicate": 2, "shard": 2}',
            id="without shards",
        ),
        pytest.param(
            "Tesla V100-SXM2-16GB",
            {"devices": 8, "parallel": {"replicate": 4, "shard": 2}},
            ("119.7GiB unsharded, 59.8GiB on each of 2 shards",),
            'shard over at least 8, such as parallel={"replicate": 1, "shard": 8}',
            id="with too few shards",
        ),
        pytest.param(
            "NVIDIA H100 80GB HBM3",
            {"devices": 1},
            (),
            "shard over at least 2 devices; this test has 1",
            id="on one device",
        ),
        pytest.param(
            "AMD Instinct MI100",
            {"devices": 3, "global_batch": 3, "nodes": 1},
            (),
            "shard over at least 4 devices; this test has 3",
            id="on too few devices",
        ),
        pytest.param(
            "NVIDIA H200",
            {"memory": 40 * GIB},
            ("has 40GiB",),
            "",
            id="though its name says more than the partition",
        ),
    ],
)
def test_eight_billion_parameters_do_not_fit(on, model, changes, words, end):
    text = sentence(on(model, **changes))
    assert [word for word in words if word not in text] == []
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("NVIDIA H100 80GB HBM3", {"parallel": {"replicate": 2, "shard": 2}}, id="in two shards"),
        pytest.param(
            "NVIDIA H100 80GB HBM3", {"parallel": {"replicate": 1, "shard": 4}}, id="in four shards"
        ),
        pytest.param(
            "NVIDIA H100 80GB HBM3", {"memory": 200 * GIB}, id="the partition says that there is more"
        ),
        *[
            (model, {})
            for model in ("", "Graphcore Bow IPU", "fake gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        ],
    ],
)
def test_what_fits_or_may_fit_is_not_refused(on, model, changes):
    assert too_large([on(model, **changes)]) == []


@pytest.mark.parametrize(
    ("model", "gib"),
    [
        ("NVIDIA A100-SXM4-40GB", 40), ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H200", 141), ("NVIDIA GH200 120GB", 96), ("NVIDIA GH200 480GB", 96), ("Tesla V100-SXM2-16GB", 16),
        ("AMD Instinct MI210", 64), ("AMD Instinct MI250X", 64), ("AMD Instinct MI300X", 192),
        ("", None), ("Graphcore Bow IPU", None), ("fake gpu", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)  # fmt: skip
def test_names_of_devices_tell_their_memory(model, gib):
    assert model_bytes(model) == (gib and gib * GIB)


def test_ranks_on_cores_share_the_memory_of_their_node(declare):
    text = sentence(declare("language_model", preset="small", devices_per_node=2))
    node = "a rank's share of a node of sys:part has 512MiB: shard over at least 4 devices; this test has 2"
    assert ("needs 1.8GiB unsharded" in text, node in text) == (True, True)
    assert too_large([declare("language_model", devices_per_node=2)]) == []


def test_programs_and_probes_need_no_model(declare, command):
    assert too_large([command(), declare("collective", devices_per_node=2)]) == []


def test_all_of_them_are_named(on):
    specs = [on(node_id="a.py::one"), on(node_id="b.py::two"), on(preset="smoke", node_id="c.py::three")]
    assert [problem.where for problem in too_large(specs)] == ["a.py::one", "b.py::two"]
