"""Parameters and operations against the published references, exactly."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from pytest_mlhpc.worker import flops
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

NAMED = {workload.name: workload for workload in WORKLOADS}


def cost(name: str, preset: str = "reference", **changes: Any) -> flops.Operations:
    workload = NAMED[name]
    return flops.count(
        importlib.import_module(workload.module).task(parameters_of(workload, preset, **changes))
    )


@pytest.mark.parametrize(
    ("name", "changes", "parameters"),
    [
        ("cosmoflow", {}, 8_907_556),
        ("cosmoflow", {"kernel_size": 2}, 5_597_604),  # MLPerf HPC v0.7 logs
        ("deepcam", {}, 56_454_720),
        ("resnet50", {}, 25_557_032),
        ("resnet50", {"stem": "epcc"}, 25_549_352),
        ("language_model", {}, 124_439_808),
        ("language_model", {"preset": "llama_8b"}, 8_030_261_248),
        ("language_model", {"preset": "smoke"}, 842_496),
        ("language_model", {"preset": "nano", "vocabulary": 65}, 10_770_816),
        ("cosmoflow", {"preset": "smoke"}, 319_900),
        ("cosmoflow", {"preset": "small"}, 5_237_540),
        ("cosmoflow", {"input_size": 16, "layers": 4, "base_channels": 8}, 90_396),
    ],
)
def test_each_model_has_the_published_number_of_parameters(name, changes, parameters):
    assert cost(name, **changes).parameters == parameters


@pytest.mark.parametrize(
    ("name", "changes", "forward", "train"),
    [
        ("cosmoflow", {}, 68.862, 192.09),
        ("cosmoflow", {"kernel_size": 2}, 20.41, None),
        ("deepcam", {}, 655.338, 1963.97),
        ("resnet50", {}, 8.178, 24.30),
        ("resnet50", {"stem": "epcc"}, 31.93, None),
        ("language_model", {}, 291.6, 3 * 291.6483072),
    ],
)
def test_each_model_does_the_published_number_of_operations(name, changes, forward, train):
    found = cost(name, **changes)
    assert found.forward / 1e9 == pytest.approx(forward, rel=2e-4)
    if train is not None:
        assert found.train / 1e9 == pytest.approx(train, rel=2e-4)


def test_cosmoflows_layers_have_the_published_sizes():
    from pytest_mlhpc.worker.workloads.cosmoflow import CosmoFlow

    with flops.on_meta():
        model = CosmoFlow(kernel_size=3, input_size=128, layers=5, base_channels=32, dropout=0.5)
    found = [sum(p.numel() for p in layer.parameters()) for layer in model.features]
    assert [size for size in found if size] == [3_488, 55_360, 221_312, 884_992, 3_539_456]


def test_the_epcc_stem_costs_3_9_times_the_operations():
    assert cost("resnet50", stem="epcc").forward / cost("resnet50").forward == pytest.approx(3.90, abs=0.005)


def test_gpt2_without_attention_does_253_gflop():
    found = cost("language_model")
    attention = 12 * 2 * 2 * 1024 * 1024 * 768
    assert (found.forward - attention) / 1e9 == pytest.approx(253.0, abs=0.05)
