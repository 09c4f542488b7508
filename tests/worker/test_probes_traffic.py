"""Operations and bytes of a step by class of work: small cases by hand, whole models against the analytic count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from probe_ranks import plan

from pytest_mlhpc.worker import flops, prepare
from pytest_mlhpc.worker.accelerators.base import open_device
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.main import name_failure
from pytest_mlhpc.worker.probes import inside, traffic
from pytest_mlhpc.worker.probes.base import Place
from pytest_mlhpc.worker.probes.classes import class_of, marks_only

SMALL = {
    "cosmoflow": {"input_size": 16, "layers": 3, "base_channels": 4},
    "deepcam": {"height": 32, "width": 32, "width_multiplier": 0.125, "middle_blocks": 1},
    "resnet50": {"image_size": 32},
    "language_model": {"layers": 1, "hidden": 32, "heads": 2, "context": 16},
}


def counted(operation):
    with traffic.Counter() as counter:
        operation()
    return counter.found


def test_an_addition_reads_two_tensors_and_writes_one():
    one, other = torch.ones(10), torch.ones(10)
    assert counted(lambda: one + other) == {"elementwise": (0, 3 * 40)}


def test_an_addition_in_place_reads_two_tensors_and_writes_one():
    one, other = torch.ones(10), torch.ones(10)
    assert counted(lambda: one.add_(other)) == {"elementwise": (0, 3 * 40)}


def test_an_operator_on_lists_writes_into_its_first_list():
    ones, others = [torch.ones(10), torch.ones(5)], [torch.ones(10), torch.ones(5)]
    assert counted(lambda: torch._foreach_add_(ones, others)) == {"elementwise": (0, 3 * 60)}


def test_a_copy_does_not_read_where_it_writes():
    one, other = torch.ones(10), torch.ones(10)
    assert counted(lambda: one.copy_(other)) == {"memory": (0, 2 * 40)}


def test_views_and_new_memory_move_nothing():
    one = torch.ones(10)
    assert counted(lambda: (one.view(2, 5).t()[0], torch.empty(1000))) == {}


def test_what_repeats_itself_lies_there_once():
    one, other = torch.ones(1).expand(10), torch.ones(10)
    assert counted(lambda: other + one) == {"elementwise": (0, 40 + 4 + 40)}


def test_a_product_of_matrices_is_two_operations_for_each_multiply_add():
    left, right = torch.ones(2, 3), torch.ones(3, 5)
    assert counted(lambda: left @ right) == {"matrix": (2 * 2 * 3 * 5, 4 * (6 + 15 + 10))}


@pytest.mark.parametrize("workload", sorted(SMALL))
def test_operations_of_a_step_are_those_of_the_analytic_count(workload):
    run = plan(workload, parameters=SMALL[workload])
    task = prepare.load_task(run)
    found = traffic.count(task, *inside.sample_batch(task, 2, torch.device("cpu")), "fp32")
    analytic = flops.count(task).train * 2
    # Torch computes the gradient of the first layer's input nowhere, and the language model's head is tied or not as counted.
    assert sum(done for done, _ in found.values()) == pytest.approx(analytic, rel=0.02)
    assert all(moved > 0 for _, moved in found.values())
    assert found["optimizer"][1] > 4 * flops.count(task).parameters


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("aten::convolution_backward", "convolution"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "convolution"),
        ("aten::addmm", "matrix"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_batch_norm", "normalisation"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW", "normalisation"),
        ("aten::max_pool3d_with_indices", "pooling"),
        ("aten::mkldnn_max_pool3d_backward", "pooling"),
        ("aten::leaky_relu_backward", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("aten::sum", "reduction"),
        ("aten::copy_", "memory"),
        ("Memcpy HtoD (Pinned -> Device)", "memory"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("c10d::allreduce_", "communication"),
        ("no kernel that anybody knows", "other"),
    ],
)
def test_a_kernel_belongs_to_the_class_of_its_name(name, belongs):
    assert class_of(name) == belongs


def test_rows_that_only_surround_others_are_no_kernels():
    marks = ["ProfilerStep*", "autograd::engine::evaluate_function: ConvolutionBackward0", "cudaLaunchKernel"]
    assert [marks_only(name) for name in marks] == [True] * 3
    assert not marks_only("aten::convolution")


def test_a_batch_beyond_all_memory_ends_at_once_as_such():
    run = plan("kernels", parameters={"of": "cosmoflow", "batch": 10**9})
    with pytest.raises(RuntimeError) as told:
        inside.build(Place(run, Group(), open_device("cpu", 0), Path()))
    assert name_failure(told.value)[0] == "out_of_memory"
