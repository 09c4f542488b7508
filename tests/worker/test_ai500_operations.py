"""Operations by the rules of HPC AI500, against counts by hand and the figure that the paper prints."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - behind importorskip
from torch.nn import functional  # noqa: E402 - behind importorskip

from pytest_mlhpc.worker import flops  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.bagging import operations  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.workloads import language_model, resnet50  # noqa: E402 - behind importorskip
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of  # noqa: E402 - behind importorskip

#: What the paper counts for a batch of 512 of ResNet-50, forward and backward, in GFLOP.
PAPER_BATCH, PAPER_GFLOP = 512, 11_776


def forward(layer: nn.Module, *shape: int) -> int:
    return operations.forward_and_train(layer, torch.empty(shape))[0]


def version_1(model: nn.Module) -> nn.Module:
    """Move each bottleneck's stride into its first 1x1 convolution: the network of the original paper."""
    for block in model.modules():
        if isinstance(block, resnet50.Bottleneck):
            block.body[0].stride, block.body[3].stride = block.body[3].stride, (1, 1)
    return model


def gflop_of_resnet(change) -> float:
    with flops.on_meta():
        model = change(resnet50.ResNet50(stem="v1.5", classes=1000).eval())
        return operations.forward_and_train(model, torch.empty(1, 3, 224, 224))[1] / 1e9


def test_resnet_50_version_1_has_the_operations_that_the_paper_prints():
    gflop = gflop_of_resnet(version_1)

    assert round(gflop, 1) == 23.0
    assert gflop * PAPER_BATCH == pytest.approx(PAPER_GFLOP, rel=0.001)


def test_resnet_50_version_1_5_has_24_4():
    assert round(gflop_of_resnet(lambda model: model), 1) == 24.4


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(3, 8, 5, bias=False), (1, 3, 12, 12), 2 * 25 * 3 * 8 * 8 * 8),
        (nn.Conv2d(16, 16, 3, padding=1, groups=16), (1, 16, 8, 8), 2 * 9 * 16 * 64),
        (nn.Conv2d(16, 32, 3, padding=1, groups=4), (1, 16, 8, 8), 2 * 9 * 16 * 64 * 32 // 4),
        (nn.Linear(7, 5), (1, 7), 7 * 5),
        (nn.ReLU(), (1, 4, 6, 6), 4 * 36),
        (nn.MaxPool2d(2), (1, 4, 6, 6), 4 * 36),
        (nn.BatchNorm2d(4).eval(), (1, 4, 6, 6), 4 * 36),
    ],
    ids=["convolution", "depthwise", "groups", "fully connected", "element-wise", "pooling", "normalisation"],
)
def test_each_rule_of_the_table_is_kept(layer, shape, expected):
    assert forward(layer, *shape) == expected


def test_training_spares_the_gradient_of_the_first_layers_input():
    network = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))

    assert operations.forward_and_train(network, torch.empty(1, 10)) == (300, 3 * 300 - 200)


def test_functions_that_are_no_modules_count_too():
    class Residual(nn.Module):
        def forward(self, inputs):
            return functional.relu(inputs + inputs)

    assert forward(Residual(), 2, 3) == 6 + 6


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "resnet50"])
def test_convolutional_workloads_differ_from_our_count_by_what_we_leave_out(name):
    workload = next(one for one in WORKLOADS if one.name == name)
    import importlib

    task = importlib.import_module(workload.module).task(parameters_of(workload, "smoke"))
    ours, theirs = flops.count(task).train, operations.count(task)[1]

    assert 0.98 * ours < theirs < 1.2 * ours


def test_products_of_a_language_model_count_one_for_a_multiply_add():
    workload = next(one for one in WORKLOADS if one.name == "language_model")
    task = language_model.task(parameters_of(workload, "smoke"))
    ours, theirs = flops.count(task).train, operations.count(task)[1]

    assert 0.5 * ours < theirs < 0.6 * ours
