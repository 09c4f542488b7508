"""Records of peaks, kernels and trainings as runs leave them, with figures that are easy to reckon with."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from worlds import measurement, record

from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.characters import CLASSES
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of
from pytest_mlhpc.store.record import Record

_NAMED = {workload.name: workload for workload in WORKLOADS}

#: Half of a step's time is convolutions, a quarter the optimizer, a quarter what nobody knows.
SHARES = {"convolution": 0.5, "optimizer": 0.25, "other": 0.25}


def one(
    number: int, workload: str, parameters: Mapping[str, Any], found: Measurement, **changes: Any
) -> Record:
    fields = {
        "benchmark": f"test_{workload}",
        "definition": f"{workload} devices={found.devices} nodes=1 number={number} preset=smoke",
        "created_ns": time.time_ns() - (1000 - number) * 10**9,
        "parameters": dict(parameters),
        "measurement": found,
        "preset": "smoke",
    }
    return record(number, **{**fields, **changes})


def measured(metrics: Iterable[MetricValue], **changes: Any) -> Measurement:
    return measurement(more=tuple(metrics), **changes)


def peaks(
    number: int = 1, *, devices: int = 1, flops: float = 100e9, moved: float = 20e9,
    environment: Mapping[str, str] | None = None, **changes: Any,
) -> Record:  # fmt: skip
    """All devices together: 100 GFLOP/s in fp32, 400 in bf16, 20 GB/s; the best repetition is a tenth above the median."""
    rates = {"gemm_flops_fp32": flops, "gemm_flops_bf16": 4 * flops}
    bandwidths = {"copy_bandwidth": moved, "triad_bandwidth": moved / 2}
    metrics = [
        MetricValue(
            name, value, "FLOP/s" if name in rates else "B/s", "higher", (value * 0.9, value, value * 1.1)
        )
        for name, value in {**rates, **bandwidths}.items()
    ]
    found = measured(metrics, devices=devices, environment=environment or {})
    return one(number, "peaks", parameters_of(_NAMED["peaks"], "smoke"), found, **changes)


def kernels(number: int = 2, *, of: str = "cosmoflow", more: tuple[MetricValue, ...] = (), devices: int = 1, counter: str = "none: here", threads: str = "", measures: Mapping[str, float] | None = None, changes: Mapping[str, Any] | None = None, **fields: Any) -> Record:  # fmt: skip
    """2 GFLOP and 1 GB a step of 0.1 s: two operations a byte, 20 GFLOP/s."""
    figures = {
        "step_flop": (2e9, "FLOP"), "step_bytes_modelled": (1e9, "B"), "achieved_flops": (20e9 * devices, "FLOP/s"),
        "step_time": (0.1, "s"),
    }  # fmt: skip
    measured_otherwise = measures or {}
    metrics = [
        MetricValue(name, measured_otherwise.get(name, usual), unit, "none")
        for name, (usual, unit) in figures.items()
    ]
    metrics += [MetricValue(f"kernel_share_{name}", SHARES.get(name, 0.0), "1", "none") for name in CLASSES]
    parameters = parameters_of(_NAMED["kernels"], "smoke", of=of, **fields)
    environment = {"memory_counter": counter, "samples_of_a_step": "8"}
    if threads:
        environment["torch_threads"] = threads
    found = measured([*metrics, *more], devices=devices, environment=environment)
    return one(number, "kernels", parameters, found, **(changes or {}))


def training(number: int = 3, *, of: str = "cosmoflow", flops: float = 15e9, batch: int = 8, devices: int = 1, changes: Mapping[str, Any] | None = None, **fields: Any) -> Record:  # fmt: skip
    """Ten steps of *batch* samples on each device."""
    metrics = [MetricValue("achieved_flops", flops * devices, "FLOP/s", "higher")]
    parameters = parameters_of(_NAMED[of], "smoke", **fields)
    found = measured(metrics, devices=devices, steps=10, samples=10 * batch * devices, workload=of)
    return one(number, of, parameters, found, **(changes or {}))
