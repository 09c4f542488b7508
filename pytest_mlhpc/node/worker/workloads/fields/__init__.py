"""No torch. The fields that every training workload has: batch, precision, optimizer and seed here, a module for each other matter.

Each module has ``FIELDS``, ``wrong(values)`` (values that are fine alone but not together, or not on so many devices:
``values`` holds ``devices`` and ``nodes`` too) and ``expected(values)`` (metrics that a run with these values must report
besides). A field that was added later is unset (None) by default, so that the keys of older benchmarks stay as they are.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field
from pytest_mlhpc.node.worker.workloads.fields import (
    arithmetic,
    compiled_devices,
    parallel,
    quality,
)

PRECISIONS = ("fp32", "bf16", "fp16", "tf32")
OPTIMIZERS = ("sgd", "adam", "adamw", "lamb", "lars")

LOADER_WORKERS = Field(
    None,
    "reading processes of one rank; unset: chosen from its cores",
    minimum=0,
    maximum=1024,  # ours: no node has more cores for one rank, and each takes a process with torch
)

#: Every metric that a training may report, whatever its fields; which ones it must is said by ``expected``.
REPORTED = (
    "epoch_time", "io_time", "compute_time", "wait_time", "copy_time", "first_batch_time", "warmup_time",
    "exposed_copy_time", "read_time", "effective_throughput", "compute_fraction", "tokens_throughput",
    "compute_throughput", "step_time", "step_time_trend", "step_time_p95", "step_time_max", "forward_time",
    "backward_time", "optimizer_time", "exposed_communication_time", "rank_skew", "loss", "parameters",
    "forward_flop_per_sample", "train_flop_per_sample", "achieved_flops", "model_flops_utilization", "peak_memory",
    "energy", "energy_efficiency", "calibration_rate",
    "compile_time", "ipus", "ipu_latency", "host_ipu_latency", "ipu_compute_latency", "ipu_host_latency",
    *(f"{kind}_{what}" for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast") for what in ("count", "bytes")),
    "time_to_train", "staging_time", "training_time", "evaluation_time", "epochs", "quality", "training_epoch_time",
    "evaluation_throughput", "staging_bandwidth", *parallel.BAGGING_METRICS, parallel.BAGGING_ROUNDS, "hpc_ai500_flop_per_sample",
    "telemetry_cores", "telemetry_memory", "telemetry_read_rate", "telemetry_device_busy", "telemetry_power",
    "telemetry_temperature", "telemetry_clock", "telemetry_cost",
)  # fmt: skip

Wrong = Tuple[Tuple[str, str], ...]

_MATTERS = (
    arithmetic,
    compiled_devices,
    parallel,
    quality,
)


def training(optimizer: str, learning_rate: float) -> Dict[str, Field]:
    """Return the fields that every training workload has, with these two defaults."""
    return {
        **_basic(optimizer, learning_rate),
        **arithmetic.FIELDS,
        **compiled_devices.FIELDS,
        **parallel.FIELDS,
        **quality.FIELDS,
    }


def _basic(optimizer: str, learning_rate: float) -> Dict[str, Field]:
    """Return batch, precision, optimizer, seed and the like, with this optimizer and learning rate as defaults."""
    return {
        "global_batch": Field(
            None,
            "samples of one step on all ranks; unset: the workload's device_batch times the ranks",
            minimum=1,
        ),
        "precision": Field("fp32", "arithmetic of forward and backward pass", "str", PRECISIONS),
        "optimizer": Field(optimizer, "what updates the weights", "str", OPTIMIZERS),
        "learning_rate": Field(learning_rate, "constant learning rate", "float", minimum=0.0),
        "seed": Field(0, "seed of weights, dropout and order of samples", minimum=0),
        "loader_workers": LOADER_WORKERS,
        "channels_last": Field(
            default=False, help="keep images with the channels last in memory", type="bool"
        ),
        "gradient_accumulation": Field(1, "forward and backward passes to one update", minimum=1),
        "telemetry": Field(
            None,
            "sample processes and devices beside the run, and record cores, memory, power, clocks",
            "bool",
            identity=False,
        ),
    }


def _wrong_basic(values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Check probabilities, and that the batch divides evenly."""
    found: List[Tuple[str, str]] = [
        (name, f"{name}={values[name]} is not in [0, 1)")
        for name in ("dropout", "label_smoothing")
        if name in values and not 0 <= values[name] < 1
    ]
    batch, ranks = values.get("global_batch"), values.get("devices", 1)
    parts = ranks * values.get("gradient_accumulation", 1)
    if batch is not None and batch % parts:
        how = f"{ranks} devices x gradient_accumulation={values.get('gradient_accumulation', 1)}"
        found.append(("global_batch", f"global_batch={batch} does not divide over {how}"))
    return tuple(found)


def _expected_basic(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what every node can tell of itself where it is sampled (``node/telemetry/sidecar.py``)."""
    return ("telemetry_cores", "telemetry_memory", "telemetry_cost") if values.get("telemetry") else ()


def wrong(values: Mapping[str, Any]) -> Wrong:
    """Return (field, what is wrong) for values that do not go together."""
    return (*_wrong_basic(values), *(found for matter in _MATTERS for found in matter.wrong(values)))


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return the metrics that a run with *values* must report beyond those of every run of its workload."""
    return (*_expected_basic(values), *(name for matter in _MATTERS for name in matter.expected(values)))
