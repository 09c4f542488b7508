"""PAYLOAD. What reports of all modes have in common: who measured, what the model costs, what the node did meanwhile.

Each function returns fields of a ``RankReport`` with their types, ``RankReport(**who(...), **cost(...), steps=...)``: a field
that is missing, doubled or of another type is then found by mypy, and a mode states only what is its own.
"""

from __future__ import annotations

import socket
from types import MappingProxyType
from typing import Callable, Mapping, Optional, TypedDict

import torch

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import calibrate, distributed, energy, environment, flops
from pytest_mlhpc.node.worker.accelerators import binding
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.base import Task

#: ``progress(step, steps, samples per second of this rank)``; the batch adds ranks up.
Progress = Callable[[int, int, float], None]


class Who(TypedDict):
    """Which rank measured, on which device, with data from where."""

    rank: int
    local_rank: int
    host: str
    device_type: str
    device_index: int
    device_model: str
    data_source: str


class Cost(TypedDict):
    """What one sample costs, and the peak rate of the device in the run's precision; see :mod:`~pytest_mlhpc.node.worker.flops`."""

    forward_flop_per_sample: float
    train_flop_per_sample: float
    peak_flops_per_s: Optional[float]
    parameters: int
    tokens_per_sample: Optional[int]


class Meanwhile(TypedDict):
    """What was used in a window, and what else its node did."""

    energy_j: Optional[float]
    contention: Mapping[str, float]
    peak_memory_bytes: Optional[int]


def who(run: RunPlan, group: Group, accelerator: Accelerator) -> Who:
    """Say which rank measured what."""
    return {
        "rank": group.rank,
        "local_rank": group.local_rank,
        "host": socket.gethostname(),
        "device_type": accelerator.type,
        "device_index": accelerator.index,
        "device_model": accelerator.model,
        "data_source": run.data_source,
    }


def cost(run: RunPlan, task: Task, accelerator: Accelerator) -> Cost:
    """Count what the model of *task* costs."""
    operations = flops.count(task)
    precision = str(run.parameters.get("precision") or "fp32")
    return {
        "forward_flop_per_sample": float(operations.forward),
        "train_flop_per_sample": float(operations.train),
        "peak_flops_per_s": flops.peak_flops(accelerator.model, precision),
        "parameters": operations.parameters,
        "tokens_per_sample": task.tokens_per_sample or None,
    }


class Watch:
    """Looks at device and node from when it is made until :meth:`over`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        accelerator.reset_peak_memory()
        self._before, self._joules = contention.snapshot(), accelerator.energy_j()

    def over(self) -> Meanwhile:
        """Return what happened in between."""
        return {
            "energy_j": energy.difference(self._joules, self._accelerator.energy_j()),
            "contention": contention.difference(self._before, contention.snapshot()),
            "peak_memory_bytes": self._accelerator.peak_memory_bytes(),
        }


def calibrated(run: RunPlan, group: Group, accelerator: Accelerator) -> Optional[float]:
    """Run the fixed kernel, if it is wanted, and return its rate in 1/s.

    On all ranks at once: cores that share a cache or a clock must do so both times.
    """
    if not run.calibrate:
        return None
    distributed.barrier(group, accelerator)
    return calibrate.calibrate(accelerator)


def surroundings(
    run: RunPlan,
    group: Group,
    accelerator: Accelerator,
    own: Mapping[str, str] = MappingProxyType({}),
) -> Optional[Mapping[str, str]]:
    """Return what software and hardware the ranks measure with, and a mode's *own*; the first rank tells it for all."""
    if group.rank != 0:
        return None
    device = {**accelerator.environment(), **binding.described(run)}
    if run.calibrate:
        device["calibration_kernel"] = calibrate.KERNEL
    return {**environment.describe(str(torch.__version__), accelerator.model, device, run.cwd), **own}
