"""The four workloads under the oldest torch we promise, and under the one of Cerebras' releases, from the zip alone."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
from zipped_batch import bodies, run_batch, training

from pytest_mlhpc.results.schema import Measurement, from_json

ROOT = Path(__file__).parents[2]

#: torch -> variable that names its interpreter, or else where `make old-torch` puts it.
INTERPRETERS = {
    "1.13": ("MLHPC_TORCH_1_13_PYTHON", ROOT / ".venv-torch-1.13/bin/python"),
    "2.4": ("MLHPC_TORCH_2_4_PYTHON", ROOT / ".venv-torch-2.4/bin/python"),
}
TRAINING = ("cosmoflow", "deepcam", "resnet50", "language_model")

pytestmark = pytest.mark.slow


@pytest.fixture(params=sorted(INTERPRETERS))
def old_torch(request):
    variable, default = INTERPRETERS[request.param]
    python = os.environ.get(variable) or str(default)
    if not Path(python).exists():
        pytest.fail(f"there is no {python}: run `make old-torch`, or name an interpreter with torch "
                    f"{request.param} by {variable}", pytrace=False)  # fmt: skip
    return request.param, python


def measured(python: str, folder: Path, run) -> Measurement:
    (body,) = bodies(run_batch([python], folder, run), run, "measurement")
    return from_json(Measurement, body)


def test_the_interpreter_has_that_torch_and_not_this_package(old_torch, tmp_path):
    version, python = old_torch
    code = "import importlib.util as u, torch; print(torch.__version__, u.find_spec('pytest_mlhpc'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    found, package = ended.stdout.split()
    assert found.startswith(f"{version}.")
    assert package == "None"


@pytest.mark.parametrize("workload", TRAINING)
def test_a_workload_is_fully_measured_from_memory(workload, old_torch, tmp_path):
    version, python = old_torch
    run = training(python, workload)
    measurement = measured(python, tmp_path, run)
    loss = measurement.metric("loss")
    assert loss is not None
    assert len(loss.samples) == run.steps + run.warmup_steps
    assert all(math.isfinite(value) for value in loss.samples)
    assert measurement.steps == len(measurement.step_times_s) == run.steps
    assert measurement.environment["torch"].startswith(version)


@pytest.mark.parametrize("workload", TRAINING)
def test_a_workload_reads_its_files_in_loader_processes(workload, old_torch, tmp_path):
    _, python = old_torch
    run = training(python, workload, data_source="files", steps=2, parameters={"loader_workers": 1})
    measurement = measured(python, tmp_path, run)
    assert measurement.data_source == "files"
    assert measurement.per_rank[0].read_s > 0


def test_two_ranks_exchange_gradients(old_torch, tmp_path):
    _, python = old_torch
    run = training(python, "language_model", ranks=2, launcher="torchrun")
    measurement = measured(python, tmp_path, run)
    assert (measurement.ranks, len(measurement.per_rank)) == (2, 2)
    assert measurement.per_rank[0].exposed_communication_s is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16"},
        {"optimizer": "lamb"},
        {"optimizer": "adam", "gradient_accumulation": 2},
        {"architecture": "llama", "kv_heads": 2},
    ],
    ids=lambda fields: "-".join(str(value) for value in fields.values()),
)
def test_a_variant_trains(fields, old_torch, tmp_path):
    _, python = old_torch
    run = training(python, "language_model", steps=2, parameters=fields)
    assert measured(python, tmp_path, run).steps == 2


def test_data_on_the_device_trains(old_torch, tmp_path):
    _, python = old_torch
    run = training(python, "cosmoflow", data_source="device", steps=2, parameters={"channels_last": True})
    assert measured(python, tmp_path, run).data_source == "device"


def probed(python: str, workload: str, **changes):
    return training(python, workload, data_source="none", data_kind="none", **changes)


def test_a_volume_is_measured(old_torch, tmp_path):
    _, python = old_torch
    fields = {"file_size": 1 << 20, "files": 10, "path": str(tmp_path)}
    measurement = measured(python, tmp_path, probed(python, "storage", parameters=fields))
    assert measurement.metric("read_bandwidth").value > 0
    assert not list(tmp_path.glob("mlhpc-storage-*"))


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "point_to_point"])
def test_two_ranks_talk(operation, old_torch, tmp_path):
    _, python = old_torch
    fields = {"operation": operation, "sizes": [8, 4096]}
    run = probed(python, "collective", ranks=2, launcher="torchrun", parameters=fields)
    assert measured(python, tmp_path, run).metric("bus_bandwidth_4kib").value > 0


def test_reduce_scatter_works_or_is_named_as_lacking(old_torch, tmp_path):
    version, python = old_torch
    run = probed(
        python, "collective", ranks=2, launcher="torchrun", parameters={"operation": "reduce_scatter"}
    )
    messages = run_batch([python], tmp_path, run)
    if version == "1.13":
        (failure,) = bodies(messages, run, "failed")
        assert failure["outcome"] == "not_supported"
        assert "reduce_scatter is not in torch 1.13" in failure["text"]
    else:
        (body,) = bodies(messages, run, "measurement")
        assert from_json(Measurement, body).environment["reduce_scatter"] == "reduce_scatter_tensor"


def test_bodies_attract_each_other(old_torch, tmp_path):
    _, python = old_torch
    run = probed(python, "nbody", ranks=2, launcher="torchrun", parameters={"bodies": 128})
    assert measured(python, tmp_path, run).metric("interaction_rate").value > 0


@pytest.mark.parametrize(
    ("fields", "text", "lacking"),
    [
        ({"parallel": {"replicate": 1, "shard": 2}}, "which torch has since 2.6; this is", ("1.13", "2.4")),
        ({"compile": "default"}, "cannot compile a model in place, torch 2.2 and newer can", ("1.13",)),
        ({"fused_optimizer": True, "optimizer": "sgd"}, "has no fused SGD for this device", ("1.13",)),
        ({"fused_optimizer": True, "optimizer": "adamw"}, "has no fused AdamW for this device", ("1.13",)),
    ],
    ids=["shards", "compile", "fused-sgd", "fused-adamw"],
)
def test_a_manner_of_training_works_or_is_named_as_lacking(fields, text, lacking, old_torch, tmp_path):
    version, python = old_torch
    several = {"ranks": 2, "launcher": "torchrun"} if "parallel" in fields else {}
    run = training(python, "language_model", steps=2, parameters=fields, **several)
    if version not in lacking:
        assert measured(python, tmp_path, run).steps == 2
        return
    (failure,) = bodies(run_batch([python], tmp_path, run), run, "failed")
    assert failure["outcome"] == "not_supported"
    assert text in failure["text"]


def test_an_ensemble_is_trained_or_named_as_lacking(old_torch, tmp_path):
    version, python = old_torch
    fields = {"bagging": [2, 1], "global_batch": 8}
    run = training(python, "language_model", ranks=2, launcher="torchrun", steps=2, parameters=fields)
    if version == "1.13":
        (failure,) = bodies(run_batch([python], tmp_path, run), run, "failed")
        assert failure["outcome"] == "not_supported"
        assert "bagging: stores of torch 1.13" in failure["text"]
        return
    measurement = measured(python, tmp_path, run)
    assert measurement.metric("base_models").value == 2
    assert measurement.metric("ensemble_quality").value > 0


def test_a_quality_is_reached(old_torch, tmp_path):
    _, python = old_torch
    fields = {
        "until": "quality", "target": 10.0, "max_epochs": 1, "input_size": 8, "layers": 2, "base_channels": 8,
        "global_batch": 8, "train_samples": 16, "eval_samples": 8, "loader_workers": 1,
    }  # fmt: skip
    run = training(python, "cosmoflow", data_source="files", parameters=fields, steps=1, warmup_steps=0)
    measurement = measured(python, tmp_path, run)
    assert measurement.metric("epochs").value == 1
    assert 0 < measurement.metric("quality").value <= 10
