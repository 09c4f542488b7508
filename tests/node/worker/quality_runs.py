"""Runs to a quality target that are small enough for a test: CosmoFlow of 8 voxels, DeepCAM of 32 x 48 pixels."""

from pathlib import Path
from typing import Any

from probe_ranks import alone, smoke
from rank_helpers import run_plan

from pytest_mlhpc.node.protocol.combine import combine
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.node.worker.data.dataset_files import SetLayout
from pytest_mlhpc.node.worker.data.make import make_set
from pytest_mlhpc.node.worker.quality.measure import measure

#: What reaches the targets of MLPerf HPC within seconds on one core.
TINY: dict[str, dict[str, Any]] = {
    "cosmoflow": {
        "input_size": 8, "layers": 2, "base_channels": 8, "dropout": 0.0, "learning_rate": 0.005,
        "schedule": {"kind": "constant"}, "global_batch": 8, "max_epochs": 12, "train_samples": 96, "eval_samples": 16, "seed": 1,
    },
    "deepcam": {
        "height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1, "learning_rate": 0.005,
        "schedule": {"kind": "constant"}, "global_batch": 4,
        "max_epochs": 12, "train_samples": 48, "eval_samples": 8, "seed": 1,
    },
    "resnet50": {
        "image_size": 32, "classes": 4, "learning_rate": 0.02, "global_batch": 16, "max_epochs": 24, "train_samples": 64,
        "eval_samples": 32, "evaluate_every": 1, "schedule": {"kind": "poly", "warmup": 2, "length": 16, "end": 1e-4}, "seed": 1,
    },
    "language_model": {
        "layers": 1, "hidden": 32, "heads": 2, "context": 32, "learning_rate": 0.01, "global_batch": 8, "max_epochs": 8,
        "train_samples": 256, "eval_samples": 32, "schedule": {"kind": "constant"},
    },
}  # fmt: skip


def plan(workload: str = "cosmoflow", *, changes: dict[str, Any] | None = None, **fields: Any) -> RunPlan:
    """Return a run of *workload* with these *fields*; *changes* are those of the plan itself."""
    parameters = smoke(workload, until="quality", loader_workers=0, **{**TINY[workload], **fields})
    values: dict[str, Any] = {
        "workload": workload, "parameters": parameters, "variables": {}, "data_source": "files", "steps": 1,
        "warmup_steps": 0, "time_limit_s": 36_000.0,
    }  # fmt: skip
    return run_plan(**{**values, **(changes or {})})


def trained(run: RunPlan, folder: Path) -> Measurement:
    """Do *run* in this process."""
    return combine(run, [alone(measure, run, folder)])


def figures(measurement: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in measurement.metrics}


def values(measurement: Measurement, key: str) -> list[Any]:
    """Return the values of all events called *key*."""
    return [event.value for event in measurement.per_rank[0].events if event.key == key]


def make_small_set(root: Path, train: int, validation: int) -> Path:
    """Make a set of so many samples of 8 voxels."""
    make_set(SetLayout("cosmoflow", "tfrecord-gzip", {"edge": 8, "learnable": 1}, train, validation, 0), root)
    return root
