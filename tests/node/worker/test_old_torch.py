"""The four workloads under the oldest torch we promise, and under the one of Cerebras' releases, from the zip alone."""

import math
import os
import subprocess

import pytest
from zipped_batch import failed, interpreter, measured, training

#: torch -> variable that names its interpreter, or else where `make old-torch` puts it.
INTERPRETERS = {
    "1.13": ("MLHPC_TORCH_1_13_PYTHON", ".venv-torch-1.13"),
    "2.4": ("MLHPC_TORCH_2_4_PYTHON", ".venv-torch-2.4"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(params=sorted(INTERPRETERS))
def old_torch(request):
    return request.param, interpreter(*INTERPRETERS[request.param], "make old-torch")


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


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam", "resnet50", "language_model"])
def test_a_workload_is_fully_measured_from_memory_and_from_files(workload, old_torch, tmp_path):
    version, python = old_torch
    files = {"data_source": "files", "parameters": {"loader_workers": 1}, "run_id": "files"}
    runs = training(python, workload), training(python, workload, steps=2, **files)
    memory, files = measured(python, tmp_path, *runs)
    losses = memory.metric("loss").samples
    assert (len(losses), memory.steps, len(memory.step_times_s)) == (4 + 2, 4, 4)
    assert all(math.isfinite(value) for value in losses)
    assert memory.environment["torch"].startswith(version)
    assert files.data_source == "files"
    assert files.per_rank[0].read_s > 0


TWO_RANKS = {"ranks": 2, "launcher": "torchrun"}
PROBE = {"data_source": "none", "data_kind": "none"}


@pytest.mark.parametrize(
    ("workload", "changes", "holds"),
    [
        ("language_model", TWO_RANKS,
         lambda found: all(report.exposed_communication_s is not None for report in found.per_rank)),
        ("cosmoflow", {"data_source": "device", "steps": 2, "parameters": {"channels_last": True}},
         lambda found: found.data_source == "device"),
        *(
            ("language_model", {"steps": 2, "parameters": fields}, lambda found: found.steps == 2)
            for fields in ({"precision": "bf16"}, {"optimizer": "lamb"}, {"optimizer": "adam", "gradient_accumulation": 2},
                           {"architecture": "llama", "kv_heads": 2})
        ),
        *(
            ("collective", {**TWO_RANKS, **PROBE, "parameters": {"operation": operation, "sizes": [8, 4096]}},
             lambda found: found.metric("bus_bandwidth_4kib").value > 0)
            for operation in ("all_reduce", "all_gather", "point_to_point")
        ),
        ("nbody", {**TWO_RANKS, **PROBE, "parameters": {"bodies": 128}},
         lambda found: found.metric("interaction_rate").value > 0),
        ("cosmoflow", {"data_source": "files", "steps": 1, "warmup_steps": 0, "parameters": {
            "until": "quality", "target": 10.0, "max_epochs": 1, "input_size": 8, "layers": 2, "base_channels": 8,
            "global_batch": 8, "train_samples": 16, "eval_samples": 8, "loader_workers": 1}},
         lambda found: found.metric("epochs").value == 1 and 0 < found.metric("quality").value <= 10),
    ],
)  # fmt: skip
def test_a_run_is_measured(workload, changes, holds, old_torch, tmp_path):
    _, python = old_torch
    (measurement,) = measured(python, tmp_path, training(python, workload, **changes))
    assert holds(measurement)


def test_a_volume_is_measured(old_torch, tmp_path):
    _, python = old_torch
    fields = {"file_size": 1 << 20, "files": 10, "path": str(tmp_path)}
    (measurement,) = measured(python, tmp_path, training(python, "storage", **PROBE, parameters=fields))
    assert measurement.metric("read_bandwidth").value > 0
    assert not list(tmp_path.glob("mlhpc-storage-*"))


@pytest.mark.parametrize(
    ("changes", "text", "lacking"),
    [
        ({"workload": "collective", **TWO_RANKS, **PROBE, "parameters": {"operation": "reduce_scatter"}},
         "reduce_scatter is not in torch 1.13", ("1.13",)),
        ({"workload": "language_model", **TWO_RANKS, "parameters": {"bagging": [2, 1], "global_batch": 8}},
         "bagging: stores of torch 1.13", ("1.13",)),
        ({"workload": "language_model", **TWO_RANKS, "parameters": {"parallel": {"replicate": 1, "shard": 2}}},
         "which torch has since 2.6; this is", ("1.13", "2.4")),
        ({"workload": "language_model", "parameters": {"compile": "default"}},
         "cannot compile a model in place, torch 2.2 and newer can", ("1.13",)),
        *(
            ({"workload": "language_model", "parameters": {"fused_optimizer": True, "optimizer": optimizer.lower()}},
             f"has no fused {optimizer} for this device", ("1.13",))
            for optimizer in ("SGD", "AdamW")
        ),
    ],
    ids=["reduce_scatter", "ensemble", "shards", "compile", "fused-sgd", "fused-adamw"],
)  # fmt: skip
def test_a_run_is_measured_or_named_as_lacking(changes, text, lacking, old_torch, tmp_path):
    version, python = old_torch
    run = training(python, steps=2, **changes)
    if version in lacking:
        outcome, found = failed(python, tmp_path, run)
        assert (outcome, text in found) == ("not_supported", True), found
        return
    (measurement,) = measured(python, tmp_path, run)
    assert measurement.steps > 0
    if run.workload == "collective":
        assert measurement.environment["reduce_scatter"] == "reduce_scatter_tensor"
    if "bagging" in changes["parameters"]:
        assert measurement.metric("base_models").value == 2
        assert measurement.metric("ensemble_quality").value > 0
