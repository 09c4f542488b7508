"""The operation counter against counts by hand and by torch; the table of peaks."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - behind importorskip

from pytest_mlhpc.worker import flops  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.workloads.base import Task, TensorSpec  # noqa: E402 - behind importorskip


def of(layer: nn.Module, shape: tuple[int, ...]) -> int:
    inputs = torch.empty(shape)
    return flops.layer_operations(layer, inputs, layer(inputs))


def task_of(build, shape: tuple[int, ...]) -> Task:
    return Task(
        name="test",
        model=build,
        prepare=lambda inputs, targets: (inputs, targets),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        input=TensorSpec(shape, torch.float32),
        target=TensorSpec((), torch.float32),
    )


def test_a_convolution_is_counted_from_its_output():
    assert of(nn.Conv2d(3, 8, (5, 3), stride=2, bias=False), (2, 3, 11, 9)) == 2 * (2 * 8 * 4 * 4) * 3 * 15


def test_a_grouped_convolution_is_divided_by_its_groups():
    assert of(nn.Conv2d(16, 16, 3, padding=1, groups=16), (1, 16, 8, 8)) == 2 * (16 * 8 * 8) * 9


def test_a_transposed_convolution_is_counted_from_its_input():
    assert of(nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (1, 6, 5, 5)) == 2 * (6 * 5 * 5) * 2 * 9


def test_a_linear_layer_counts_every_position():
    assert of(nn.Linear(7, 5), (2, 3, 7)) == 2 * (2 * 3 * 5) * 7


def test_normalisation_and_pooling_are_not_counted():
    assert of(nn.BatchNorm2d(3), (2, 3, 4, 4)) == of(nn.MaxPool2d(2), (2, 3, 4, 4)) == 0


def test_training_is_three_times_forward_less_the_first_layers_input_gradient():
    found = flops.count(task_of(lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), (10,)))
    assert found == flops.Operations(parameters=325, forward=400 + 200, train=3 * 600 - 400)


def test_a_layer_that_runs_twice_is_counted_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.layer(self.layer(inputs))

    assert flops.count(task_of(Twice, (4,))).forward == 2 * 32


def test_ungrouped_layers_agree_with_torchs_own_counter():
    counter = pytest.importorskip("torch.utils.flop_counter")

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(2, 4, 3, stride=2, dilation=2),
            nn.ConvTranspose3d(4, 3, 3, stride=2),
            nn.Flatten(),
            nn.LazyLinear(3),
        )

    model, inputs = build(), torch.randn(1, 2, 9, 9, 9)
    model(inputs)
    width = model[3].in_features

    def again() -> nn.Module:
        return nn.Sequential(*build()[:3], nn.Linear(width, 3))

    found = flops.count(task_of(again, (2, 9, 9, 9)))
    with counter.FlopCounterMode(display=False) as mode:
        output = model(inputs)
    assert found.forward == mode.get_total_flops()
    with counter.FlopCounterMode(display=False) as mode:
        output.sum().backward()
    assert found.train - found.forward == mode.get_total_flops()


def test_counting_leaves_no_memory_behind_and_needs_none():
    huge = flops.count(task_of(lambda: nn.Linear(10**7, 10**7, bias=False), (10**7,)))
    assert huge.parameters == 10**14


def test_a_torch_without_a_device_context_counts_the_same(monkeypatch):
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(4, 8, 3, padding=1), nn.BatchNorm3d(8), nn.MaxPool3d(2), nn.Conv3d(8, 2, 1)
        )

    expected = flops.count(task_of(build, (4, 9, 9, 9)))
    monkeypatch.setattr(flops, "on_meta", flops._OnMeta)
    assert flops.count(task_of(build, (4, 9, 9, 9))) == expected


def test_a_torch_without_3d_pooling_on_meta_counts_the_same(monkeypatch):
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv3d(4, 8, 3), nn.MaxPool3d(2), nn.Conv3d(8, 2, 1), nn.MaxPool3d(3, 2, 1))

    task = task_of(build, (4, 9, 9, 9))
    expected = flops.count(task)

    def absent(*_args, **_options):
        raise NotImplementedError("no kernel on meta")

    monkeypatch.setattr(nn.MaxPool3d, "forward", absent)
    assert flops.count(task) == expected


def test_a_model_that_cannot_run_without_data_says_so():
    class NeedsData(nn.Module):
        def forward(self, inputs):
            return inputs if float(inputs.sum()) > 0 else -inputs

    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        flops.count(task_of(NeedsData, (4,)))


@pytest.mark.parametrize(
    ("model", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA H20", "bf16", 148),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "fp16", 1300),
    ],
)
def test_known_devices_have_their_dense_peak(model, precision, teraflops):
    assert flops.peak_flops(model, precision) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),  # has none
        ("Tesla V100-PCIE-16GB", "fp16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H100", "bf16"),  # which one?
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA H800", "bf16"),
        ("NVIDIA A100X", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp64"),
        ("NVIDIA A10", "bf16"),
        ("AMD EPYC 7742 64-Core Processor", "fp32"),
        ("Intel(R) Data Center GPU Max 1550", "bf16"),
        ("", "bf16"),
    ],
)
def test_what_is_not_known_has_no_peak(model, precision):
    assert flops.peak_flops(model, precision) is None


def test_intels_peak_follows_from_its_compute_units():
    found = flops.peak_flops("Intel(R) Data Center GPU Max 1550", "bf16", compute_units=448)
    assert found == pytest.approx(512 * 448 * 1.3e9)


def test_operations_are_plain_integers():
    found = flops.count(task_of(lambda: nn.Linear(3, 3), (3,)))
    assert all(type(value) is int for value in dataclasses.astuple(found))
