"""Operations by the rules of HPC AI500, against counts by hand and the figure that the paper prints."""

import pytest
import torch
from probe_ranks import task_of
from torch import nn
from torch.nn import functional

from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.workloads import resnet50

#: What the paper counts for a batch of 512 of ResNet-50, forward and backward, in GFLOP.
PAPER_BATCH, PAPER_GFLOP = 512, 11_776


def forward(layer: nn.Module, *shape: int) -> int:
    return reporting.forward_and_train(layer, torch.empty(shape))[0]


def version_1(model: nn.Module) -> nn.Module:
    """Move each bottleneck's stride into its first 1x1 convolution: the network of the original paper."""
    for block in model.modules():
        if isinstance(block, resnet50.Bottleneck):
            block.body[0].stride, block.body[3].stride = block.body[3].stride, (1, 1)
    return model


@pytest.mark.parametrize(("change", "expected"), [(version_1, 23.0), (lambda model: model, 24.4)])
def test_resnet_50_has_so_many_operations_as_version_1_and_as_version_1_5(change, expected):
    with reporting.on_meta():
        model = change(resnet50.ResNet50(stem="v1.5", classes=1000).eval())
        gflop = reporting.forward_and_train(model, torch.empty(1, 3, 224, 224))[1] / 1e9
    assert round(gflop, 1) == expected
    if change is version_1:
        assert gflop * PAPER_BATCH == pytest.approx(PAPER_GFLOP, rel=0.001)


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
def test_each_rule_of_the_table_is_followed(layer, shape, expected):
    assert forward(layer, *shape) == expected


def test_training_spares_the_gradient_of_the_first_layers_input():
    network = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))

    assert reporting.forward_and_train(network, torch.empty(1, 10)) == (300, 3 * 300 - 200)


def test_functions_that_are_no_modules_count_too():
    class Residual(nn.Module):
        def forward(self, inputs):
            return functional.relu(inputs + inputs)

    assert forward(Residual(), 2, 3) == 6 + 6


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # What we leave out are normalisation, activation and pooling.
        *((name, 0.98, 1.2) for name in ("cosmoflow", "deepcam", "resnet50")),
        # The rules count one for a multiply-add of a product.
        ("language_model", 0.5, 0.6),
    ],
)
def test_workloads_differ_from_our_count_by_the_rules(name, least, most):
    task = task_of(name)
    ours, theirs = reporting.count(task).train, reporting.count_ai500(task)[1]
    assert least * ours < theirs < most * ours
