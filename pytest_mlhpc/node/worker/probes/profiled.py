"""PAYLOAD. Where the time of a training step goes, by class of kernel, as torch's profiler saw it."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple

import torch

from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.probes.classes import class_of, marks_only

#: Steps under the profiler: enough to average, few enough to hold their events in memory.
STEPS = 3


def times(
    accelerator: Accelerator, gradients: Callable[[], object], update: Callable[[], object]
) -> Tuple[Mapping[str, float], float]:
    """Return (seconds of one step by class, wall seconds of one step under the profiler).

    On a device they are those of its kernels, on a CPU of its operators, each less those it called. All of *update* is
    the optimizer's; rows that only launch or surround others are "other". *update* uses the last gradients that
    *gradients* has left.
    """
    found: Dict[str, float] = {}
    wall = 0.0
    for part, kind in ((gradients, ""), (update, "optimizer")):
        profiler = _profiler(accelerator)
        with profiler:
            start = time.perf_counter()
            for _ in range(STEPS):
                part()
            accelerator.synchronize()
            wall += time.perf_counter() - start
        for name, seconds in _rows(profiler, on_host=not accelerator.asynchronous):
            belongs = kind or ("other" if marks_only(name) else class_of(name))
            found[belongs] = found.get(belongs, 0.0) + seconds / STEPS
    return found, wall / STEPS


def _profiler(accelerator: Accelerator) -> Any:
    known = torch.profiler.ProfilerActivity
    # ROCm's devices are torch's "cuda" too; a type that this torch cannot profile leaves what the host did.
    device = getattr(known, accelerator.device.type.upper(), known.CPU)
    return torch.profiler.profile(activities=list(dict.fromkeys((known.CPU, device))))


def _rows(profiler: Any, *, on_host: bool) -> Iterator[Tuple[str, float]]:
    """Yield (name, seconds) of operators on the host, or of kernels on the device.

    A device's rows are kernels alone: rows of operators tell the time of the kernels that they launched once more.
    """
    for row in profiler.key_averages():
        host = str(getattr(row, "device_type", "CPU")).endswith("CPU")
        if host != on_host:
            continue
        if on_host:
            micros = row.self_cpu_time_total
        else:  # renamed in torch 2.4
            micros = getattr(row, "self_device_time_total", None) or getattr(row, "self_cuda_time_total", 0.0)
        yield str(row.key), float(micros) / 1e6
