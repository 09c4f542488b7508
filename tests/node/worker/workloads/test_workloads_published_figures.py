"""Parameters and operations against the published references, exactly."""

import functools
from typing import Any

import pytest
from probe_ranks import task_of
from tables import table

from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.workloads.cosmoflow import CosmoFlow

TABLES = table("workloads")


@functools.cache
def cost(name: str, preset: str = "reference", **changes: Any) -> reporting.Operations:
    return reporting.count(task_of(name, preset, **changes))


@pytest.mark.parametrize(("name", "preset", "changes", "parameters"), TABLES["parameters"])
def test_each_model_has_the_published_number_of_parameters(name, preset, changes, parameters):
    assert cost(name, preset, **changes).parameters == parameters


@pytest.mark.parametrize(("name", "changes", "gigaflop"), TABLES["operations"])
def test_each_model_does_the_published_number_of_operations(name, changes, gigaflop):
    found = cost(name, **changes)
    assert [found.forward / 1e9, found.train / 1e9][: len(gigaflop)] == pytest.approx(gigaflop, rel=2e-4)


def test_cosmoflows_layers_have_the_published_sizes():
    with reporting.on_meta():
        model = CosmoFlow(kernel_size=3, input_size=128, layers=5, base_channels=32, dropout=0.5)
    found = [sum(p.numel() for p in layer.parameters()) for layer in model.features]
    assert [size for size in found if size] == [3_488, 55_360, 221_312, 884_992, 3_539_456]


def test_the_epcc_stem_costs_3_9_times_the_operations():
    assert cost("resnet50", stem="epcc").forward / cost("resnet50").forward == pytest.approx(3.90, abs=0.005)


def test_gpt2_without_attention_does_253_gflop():
    attention = 12 * 2 * 2 * 1024 * 1024 * 768
    assert (cost("language_model").forward - attention) / 1e9 == pytest.approx(253.0, abs=0.05)
