"""The operation counter against counts by hand and by torch; the table of peaks."""

import dataclasses

import pytest
from tables import table

torch = pytest.importorskip("torch")

from tiny_workload import task_like  # noqa: E402 - behind importorskip
from torch import nn  # noqa: E402 - behind importorskip
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 - behind importorskip

from pytest_mlhpc.node.worker import reporting  # noqa: E402 - behind importorskip
from pytest_mlhpc.node.worker.base import Task, TensorSpec  # noqa: E402 - likewise


def task_of(build, shape: tuple[int, ...]) -> Task:
    return task_like("test", model=build, input=TensorSpec(shape, torch.float32))


@pytest.mark.parametrize(
    ("layer", "shape", "operations"),
    [
        (nn.Conv2d(3, 8, (5, 3), stride=2, bias=False), (2, 3, 11, 9), 2 * (2 * 8 * 4 * 4) * 3 * 15),
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), (1, 16, 8, 8), 2 * (16 * 8 * 8) * 9),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (1, 6, 5, 5), 2 * (6 * 5 * 5) * 2 * 9),
        (nn.Linear(7, 5), (2, 3, 7), 2 * (2 * 3 * 5) * 7),
        (nn.BatchNorm2d(3), (2, 3, 4, 4), 0),
        (nn.MaxPool2d(2), (2, 3, 4, 4), 0),
    ],
    ids=[
        "a convolution from its output", "a grouped one divided by its groups", "a transposed one from its input",
        "a linear layer at every position", "normalisation not at all", "pooling not at all",
    ],
)  # fmt: skip
def test_a_layer_is_counted(layer, shape, operations):
    inputs = torch.empty(shape)
    assert reporting.layer_operations(layer, inputs, layer(inputs)) == operations


def test_training_is_three_times_forward_less_the_first_layers_input_gradient():
    found = reporting.count(
        task_of(lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), (10,))
    )
    assert found == reporting.Operations(parameters=325, forward=400 + 200, train=3 * 600 - 400)
    assert {type(value) for value in dataclasses.astuple(found)} == {int}


def test_a_layer_that_runs_twice_is_counted_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return self.layer(self.layer(inputs))

    assert reporting.count(task_of(Twice, (4,))).forward == 2 * 32


def test_ungrouped_layers_agree_with_torchs_own_counter():
    def build() -> nn.Module:
        there, back = nn.Conv3d(2, 4, 3, stride=2, dilation=2), nn.ConvTranspose3d(4, 3, 3, stride=2)
        return nn.Sequential(there, back, nn.Flatten(), nn.Linear(1029, 3))

    found = reporting.count(task_of(build, (2, 9, 9, 9)))
    with FlopCounterMode(display=False) as forward:
        output = build()(torch.randn(1, 2, 9, 9, 9))
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert found.forward == forward.get_total_flops()
    assert found.train - found.forward == backward.get_total_flops()


def test_counting_needs_no_memory():
    huge = task_of(lambda: nn.Linear(10**7, 10**7, bias=False), (10**7,))
    assert reporting.count(huge).parameters == 10**14


def absent(*_args, **_options):
    raise NotImplementedError("no kernel on meta")


@pytest.mark.parametrize(
    ("owner", "name", "older"), [(reporting, "on_meta", reporting._OnMeta), (nn.MaxPool3d, "forward", absent)]
)
def test_a_torch_without_a_device_context_or_3d_pooling_on_meta_counts_the_same(monkeypatch, owner, name, older):  # fmt: skip
    def build() -> nn.Module:
        first = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.BatchNorm3d(8), nn.MaxPool3d(2))
        return nn.Sequential(first, nn.Conv3d(8, 2, 1), nn.MaxPool3d(3, 2, 1))

    task = task_of(build, (4, 9, 9, 9))
    expected = reporting.count(task)
    monkeypatch.setattr(owner, name, older)
    assert reporting.count(task) == expected


def test_a_model_that_cannot_run_without_data_says_so():
    class NeedsData(nn.Module):
        def forward(self, inputs):
            return inputs if float(inputs.sum()) > 0 else -inputs

    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        reporting.count(task_of(NeedsData, (4,)))


#: Intel's follows from its compute units.
INTEL = ("Intel(R) Data Center GPU Max 1550", "bf16", 512 * 448 * 1.3e-3, {"compute_units": 448})


@pytest.mark.parametrize(
    ("model", "precision", "teraflops", "units"), [*((*row, {}) for row in table("peaks")["peaks"]), INTEL]
)
def test_only_known_devices_have_a_peak(model, precision, teraflops, units):
    found = reporting.peak_flops(model, precision, **units)
    assert found == (pytest.approx(teraflops * 1e12) if teraflops else None)
