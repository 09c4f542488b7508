"""The key of a benchmark: what is computed and on what data, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_mlhpc.jobs.planning import run_of
from pytest_mlhpc.report import parity
from pytest_mlhpc.worker.data import files
from pytest_mlhpc.worker.workloads.fields import arithmetic


@pytest.fixture
def gpus(target):
    def make(accelerator):
        nodes = replace(target.partition.nodes, devices=4)
        return replace(target, partition=replace(target.partition, accelerator=accelerator, nodes=nodes))

    return make


def test_the_key_is_sorted_text_of_what_is_computed(declare):
    assert declare("resnet50", devices=2, stem="epcc", learning_rate=0.05, seed=0).benchmark == (
        "resnet50[channels_last=false classes=1000 global_batch=16 gradient_accumulation=1 image_size=64 label_smoothing=0.1 "
        "learning_rate=0.05 optimizer=sgd precision=fp32 seed=0 stem=epcc] "
        "data=memory devices=2 name=test_it nodes=1 preset=smoke"
    )


@pytest.mark.parametrize(
    ("workload", "one", "other"),
    [
        ("cosmoflow", {}, {"kernel_size": 2}),
        ("cosmoflow", {}, {"devices": 2}),
        ("cosmoflow", {}, {"data": "files"}),
        ("cosmoflow", {}, {"data": "cosmo"}),
        ("cosmoflow", {}, {"cache": "cold"}),
        ("cosmoflow", {}, {"name": "x"}),
        ("cosmoflow", {}, {"compile": "default"}),
        ("storage", {"file_size": "1GiB"}, {"file_size": "2GiB"}),
        ("kernels", {}, {"of": "deepcam"}),
        ("kernels", {}, {"batch": 4}),
        ("kernels", {}, {"precision": "bf16"}),
        ("kernels", {}, {"fields": {"kernel_size": 2}}),
    ],
)
def test_what_changes_the_computation_changes_the_key(declare, workload, one, other):
    assert declare(workload, **one).benchmark != declare(workload, **other).benchmark


@pytest.mark.parametrize(
    ("workload", "one", "other"),
    [
        ("cosmoflow", {}, {"steps": 99, "warmup": 9, "judge": False, "time_limit": 5}),
        ("cosmoflow", {}, {"features": ["ib"]}),
        ("cosmoflow", {"learning_rate": 1}, {"learning_rate": 1.0}),
        ("storage", {"file_size": "1GiB"}, {"file_size": "1024MiB"}),
        ("storage", {"path": "/a"}, {"path": "/b"}),
    ],
)
def test_what_changes_no_computation_changes_no_key(declare, workload, one, other):
    assert declare(workload, **one).benchmark == declare(workload, **other).benchmark


@pytest.mark.parametrize(
    ("workload", "fields", "part"),
    [
        ("storage", {}, " cache=cold "),
        ("storage", {"cache": "warm"}, " cache=warm "),
        ("reading", {}, " cache=warm "),
        ("reading", {"cache": "cold"}, " cache=cold "),
        ("cosmoflow", {"compile": "default"}, "compile=default"),
        ("cosmoflow", {"threads": 2}, "threads=2"),
        ("cosmoflow", {"name": "a b] devices=9"}, 'name="a b] devices=9"'),  # forges no other key
    ],
)
def test_the_key_names_what_must_never_be_compared(declare, workload, fields, part):
    assert part in declare(workload, **fields).benchmark


def test_keys_of_older_benchmarks_stay_as_they_were(declare):
    key = declare().benchmark
    assert key.startswith(
        "cosmoflow[base_channels=8 channels_last=false dropout=0.5 global_batch=8 gradient_accumulation=1 "
    )
    assert not [field for field in ("tuning", "compile", "threads", "None", "null") if field in key]


def test_moving_the_file_or_the_data_changes_nothing(declare, target):
    moved = replace(target, datasets={"cosmo": replace(target.datasets["cosmo"], path="/elsewhere")})
    there, here = declare(data="cosmo", on=moved, node_id="new/place.py::test_it"), declare(data="cosmo")
    assert there.benchmark == here.benchmark
    assert "/" not in there.benchmark


def test_a_path_to_a_set_of_ours_is_planned_as_synthetic_and_shares_no_series_with_real_data(
    declare, tmp_path
):
    (tmp_path / "sample").write_bytes(b"x")
    real = declare(data=str(tmp_path))
    assert run_of(real, 0).data_kind == "real"
    files.write_manifest(tmp_path, files.describe(tmp_path, {"workload": "cosmoflow"}))
    made = declare(data=str(tmp_path))
    assert run_of(made, 0).data_kind == "synthetic"
    assert run_of(declare(data=str(tmp_path / "train")), 0).data_kind == "synthetic"
    assert made.benchmark != real.benchmark


def test_a_damaged_manifest_is_left_to_the_run_to_report(declare, tmp_path):
    (tmp_path / files.MANIFEST).write_text("{")
    assert run_of(declare(data=str(tmp_path)), 0).data_kind == "real"


def test_tuning_fills_in_what_is_open_and_keeps_both_asked_and_effective_values(declare, gpus):
    spec = declare("language_model", on=gpus("cuda"), tuning="fast", precision="fp16")
    assert spec.asked == {"tuning": "fast", "precision": "fp16"}
    tuned = {"precision": "fp16", "fused_optimizer": True, "compile": "default"}
    assert spec.parameters.items() >= tuned.items()
    assert declare(on=gpus("cuda"), cuda_graphs=True).parameters["cuda_graphs"] is True


def test_the_key_of_a_tuned_run_names_what_is_computed_and_not_how(declare, gpus):
    tuned = declare("language_model", on=gpus("cuda"), tuning="fast").benchmark
    assert "precision=bf16" in tuned
    assert "tuning=fast" in tuned
    assert not [field for field in ("compile", "fused_optimizer") if field in tuned]
    asked = declare("language_model", on=gpus("cuda"), tuning="fast", compile="default").benchmark
    assert "compile=default" in asked


def test_fast_is_one_benchmark_on_devices_that_compute_the_same(declare, gpus):
    keys = {
        declare("language_model", on=gpus(kind), tuning="fast").benchmark for kind in ("cuda", "rocm", "xpu")
    }
    assert len(keys) == 1
    assert declare("language_model", tuning="fast").benchmark not in keys  # a CPU stays in fp32


def test_how_a_device_computes_is_each_machines_own_where_each_is_compared_at_its_best():
    assert {*arithmetic.FIELDS} <= parity.TUNING
