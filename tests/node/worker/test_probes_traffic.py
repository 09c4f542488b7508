"""Operations and bytes of a step by class of work: small cases by hand, whole models against the analytic count."""

from pathlib import Path

import pytest
import torch
from probe_ranks import place_of, plan
from tables import table

from pytest_mlhpc.node.worker import prepare, reporting
from pytest_mlhpc.node.worker.main import name_failure
from pytest_mlhpc.node.worker.probes import kernels, measure
from pytest_mlhpc.node.worker.probes.kernels import class_of, marks_only

SMALL = {
    "cosmoflow": {"input_size": 16, "layers": 3, "base_channels": 4},
    "deepcam": {"height": 32, "width": 32, "width_multiplier": 0.125, "middle_blocks": 1},
    "resnet50": {"image_size": 32},
    "language_model": {"layers": 1, "hidden": 32, "heads": 2, "context": 16},
}


ONE, OTHER, ROWS, COLUMNS = (torch.ones(shape) for shape in (10, 10, (2, 3), (3, 5)))


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda: ONE + OTHER, {"elementwise": (0, 3 * 40)}),
        (lambda: ONE.add_(OTHER), {"elementwise": (0, 3 * 40)}),
        (lambda: torch._foreach_add_([ONE, ONE[:5]], [OTHER, OTHER[:5]]), {"elementwise": (0, 3 * 60)}),
        (lambda: ONE.copy_(OTHER), {"memory": (0, 2 * 40)}),
        (lambda: (ONE.view(2, 5).t()[0], torch.empty(1000)), {}),
        (lambda: OTHER + ONE[:1].expand(10), {"elementwise": (0, 40 + 4 + 40)}),
        (lambda: ROWS @ COLUMNS, {"matrix": (2 * 2 * 3 * 5, 4 * (6 + 15 + 10))}),
    ],
    ids=[
        "an addition", "an addition in place", "an operator on lists writes into the first", "a copy does not read its target",
        "views and new memory move nothing", "repeated elements are stored once", "a multiply-add is two operations",
    ],
)  # fmt: skip
def test_an_operator_reads_each_tensor_once_and_writes_each_result_once(operation, found):
    with kernels.OperatorCounter() as counter:
        operation()
    assert counter.found == found


@pytest.mark.parametrize("workload", sorted(SMALL))
def test_operations_of_a_step_are_those_of_the_analytic_count(workload):
    task = prepare.load_task(plan(workload, parameters=SMALL[workload]))
    found = kernels.count(task, *measure.sample_batch(task, 2, torch.device("cpu")), "fp32")
    analytic = reporting.count(task)
    # Torch computes the gradient of the first layer's input nowhere, and the language model's head is tied or not as counted.
    assert sum(done for done, _ in found.values()) == pytest.approx(2 * analytic.train, rel=0.02)
    assert all(moved > 0 for _, moved in found.values())
    assert found["optimizer"][1] > 4 * analytic.parameters


def test_a_kernel_belongs_to_the_class_of_its_name():
    kernels = table("kernels")
    assert {kind: [class_of(name) for name in names] for kind, names in kernels.items()} == {
        kind: [kind] * len(names) for kind, names in kernels.items()
    }


def test_rows_that_only_surround_others_are_no_kernels():
    surround = (
        "ProfilerStep*",
        "autograd::engine::evaluate_function: ConvolutionBackward0",
        "cudaLaunchKernel",
    )
    assert [marks_only(name) for name in (*surround, "aten::convolution")] == [True, True, True, False]


def test_a_batch_beyond_all_memory_ends_at_once_as_such():
    with pytest.raises(RuntimeError) as refused:
        measure.build(place_of("kernels", Path(), of="cosmoflow", batch=10**9))
    assert name_failure(refused.value)[0] == "out_of_memory"
