"""Declaring characterisation: what must be reported, and what cannot be measured is refused before it is submitted."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import SpecError


def problems_of(call) -> list[str]:
    with pytest.raises(SpecError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("workload", "fields", "text"),
    [
        ("peaks", {"precisions": ["fp32", "fp8"]}, "precisions: ['fp32', 'fp8']: name some of fp32, tf32, bf16, fp16"),
        ("peaks", {"precisions": []}, "name some of"),
        ("peaks", {"precisions": ["fp32", "fp32"]}, "each once"),
        ("peaks", {"matrix": 8}, "matrix: 8 is less than 64"),
        ("peaks", {"cache": "cold"}, "cache: means nothing for peaks"),
        ("kernels", {"of": "nbody"}, "of: 'nbody'"),
        ("kernels", {"size": "gigantic"}, "size: cosmoflow has no preset 'gigantic'; it has smoke, small, reference"),
        ("kernels", {"fields": {"kernel": 2}}, "fields: cosmoflow has no field 'kernel'"),
        ("kernels", {"fields": {"input_size": "big"}}, "fields: input_size: expected int, found 'big'"),
        ("reading", {"fields": {"base_channels": 0}}, "fields: base_channels: 0 is less than 1"),
        ("gradients", {"fields": {"kernel_size": 4}}, "fields: kernel_size: 4 is not one of 3, 2"),
        ("kernels", {"fields": {"global_batch": 8}}, "fields: global_batch is not to be set here"),
        ("kernels", {"fields": {"input_size": 4}}, "fields: input_size=4 leaves nothing after 5 layers"),
        ("gradients", {"devices": 1}, "devices: one rank exchanges nothing; at least 2 are needed"),
        ("reading", {"of": "language_model"}, "of: 'language_model'"),
        ("reading", {"of": "deepcam", "format": "tfrecord"}, "format: deepcam has no format 'tfrecord'; it has hdf5"),
        ("reading", {"path": "/data", "format": "hdf5"}, "format: is that of a synthetic set; files of path have one"),
        ("reading", {"samples": 1, "devices": 2}, "samples: 1 samples cannot be shared by 2 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_characterised_is_refused(declare, workload, fields, text):
    (problem,) = problems_of(lambda: declare(workload, **fields))
    assert text in problem


def test_each_precision_must_be_reported(declare):
    expected = declare("peaks", precisions=["fp32", "fp16"]).expected_metrics
    assert {"gemm_flops_fp32", "gemm_flops_fp16", "copy_bandwidth", "triad_bandwidth"} <= set(expected)
    assert "gemm_flops_bf16" not in expected


def test_what_a_step_moves_must_be_reported(declare):
    expected = declare("kernels", of="deepcam").expected_metrics
    assert {"achieved_flops", "step_bytes_modelled", "profiled_step_time"} <= set(expected)


def test_gradients_have_two_ranks_unless_told_otherwise(declare):
    assert declare("gradients").ranks == 2


def test_the_step_that_is_looked_into_makes_the_benchmark(declare):
    keys = {
        declare("kernels", **fields).benchmark
        for fields in (
            {},
            {"of": "deepcam"},
            {"batch": 4},
            {"precision": "bf16"},
            {"fields": {"kernel_size": 2}},
        )
    }
    assert len(keys) == 5


def test_cold_and_warm_files_are_never_compared(declare):
    assert " cache=warm " in declare("reading").benchmark
    assert " cache=cold " in declare("reading", cache="cold").benchmark
