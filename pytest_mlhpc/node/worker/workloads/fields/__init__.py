"""No torch. The fields that every training workload has, a module for each matter.

Each module has ``FIELDS``, ``wrong(values)`` (values that are fine alone but not together, or not on so many devices:
``values`` holds ``devices`` and ``nodes`` too) and ``expected(values)`` (metrics that a run with these values must report
besides). A field that was added later is unset (None) by default, so that the keys of older benchmarks stay as they are.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field
from pytest_mlhpc.node.worker.workloads.fields import (
    arithmetic,
    bagging,
    basic,
    compiled_devices,
    parallel,
    quality,
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
    "evaluation_throughput", "staging_bandwidth", *bagging.METRICS, bagging.ROUNDS, "hpc_ai500_flop_per_sample",
    "telemetry_cores", "telemetry_memory", "telemetry_read_rate", "telemetry_device_busy", "telemetry_power",
    "telemetry_temperature", "telemetry_clock", "telemetry_cost",
)  # fmt: skip

Wrong = Tuple[Tuple[str, str], ...]

_MATTERS = (
    basic,
    arithmetic,
    compiled_devices,
    parallel,
    quality,
    bagging,
)


def training(optimizer: str, learning_rate: float) -> Dict[str, Field]:
    """Return the fields that every training workload has, with these two defaults."""
    return {
        **basic.fields(optimizer, learning_rate),
        **arithmetic.FIELDS,
        **compiled_devices.FIELDS,
        **parallel.FIELDS,
        **quality.FIELDS,
        **bagging.FIELDS,
    }


def wrong(values: Mapping[str, Any]) -> Wrong:
    """Return (field, what is wrong) for values that do not go together."""
    return tuple(found for matter in _MATTERS for found in matter.wrong(values))


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return the metrics that a run with *values* must report beyond those of every run of its workload."""
    return tuple(name for matter in _MATTERS for name in matter.expected(values))
