"""Fields of arithmetic at collection: what is refused before anything is submitted, and what a key is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.report import parity
from pytest_mlhpc.worker.workloads.fields import arithmetic

MADE_WITHOUT = (
    "cosmoflow[base_channels=8 channels_last=false dropout=0.5 global_batch=8 gradient_accumulation=1 "
)


@pytest.fixture
def gpus(target):
    def make(accelerator):
        nodes = replace(target.partition.nodes, devices=4)
        return replace(target, partition=replace(target.partition, accelerator=accelerator, nodes=nodes))

    return make


def problem_of(call):
    with pytest.raises(SpecError) as caught:
        call()
    (problem,) = caught.value.problems
    return str(problem)


def test_keys_of_older_benchmarks_stay_as_they_were(declare):
    assert declare().benchmark.startswith(MADE_WITHOUT)
    assert not [
        word for word in ("tuning", "compile", "threads", "None", "null") if word in declare().benchmark
    ]


def test_a_field_that_the_device_lacks_is_refused_at_collection(declare, gpus):
    assert problem_of(lambda: declare(cuda_graphs=True)) == (
        "t.py::test_it: cuda_graphs: cpu has no CUDA graphs; only cuda and rocm have"
    )
    assert declare(on=gpus("cuda"), cuda_graphs=True).parameters["cuda_graphs"] is True


def test_a_mode_that_torch_does_not_know_is_named_with_the_nearest(declare):
    text = problem_of(lambda: declare(compile="max-autotun"))
    assert "'max-autotun' is not one of" in text
    assert "did you mean 'max-autotune'?" in text


def test_an_asked_for_manner_is_part_of_the_key(declare):
    assert declare(compile="default").benchmark != declare().benchmark
    assert "compile=default" in declare(compile="default").benchmark
    assert "threads=2" in declare(threads=2).benchmark


def test_tuning_fills_in_what_is_open_and_keeps_both_asked_and_effective_values(declare, gpus):
    spec = declare("language_model", on=gpus("cuda"), tuning="fast", precision="fp16")
    assert spec.asked == {"tuning": "fast", "precision": "fp16"}
    assert spec.parameters["precision"] == "fp16"
    assert spec.parameters["fused_optimizer"] is True
    assert spec.parameters["compile"] == "default"


def test_the_key_of_a_tuned_run_names_what_is_computed_and_not_how(declare, gpus):
    tuned = declare("language_model", on=gpus("cuda"), tuning="fast").benchmark
    assert "precision=bf16" in tuned
    assert "tuning=fast" in tuned
    assert "compile" not in tuned
    assert "fused_optimizer" not in tuned
    assert (
        "compile=default"
        in declare("language_model", on=gpus("cuda"), tuning="fast", compile="default").benchmark
    )


def test_fast_is_one_benchmark_on_devices_that_compute_the_same(declare, gpus):
    keys = {
        declare("language_model", on=gpus(kind), tuning="fast").benchmark for kind in ("cuda", "rocm", "xpu")
    }
    assert len(keys) == 1
    assert declare("language_model", tuning="fast").benchmark not in keys  # a CPU stays in fp32


def test_how_a_device_computes_is_each_machines_own_where_each_is_compared_at_its_best():
    assert {*arithmetic.FIELDS} <= parity.TUNING


def test_a_workload_that_is_no_training_has_no_tuning(declare):
    with pytest.raises(SpecError, match="storage has no such field"):
        declare("storage", tuning="fast")
