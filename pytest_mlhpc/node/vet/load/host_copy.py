"""Copies between the host and each device, in both directions: PCI Express, or whatever joins them.

One device at a time, as the floors were measured: devices that share a switch would halve each other's figure. The host's
memory is pinned, and touched by a core beside the device where the kernel tells which those are.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterator, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.load import devices
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, numbers

#: Seconds of measuring for each direction of each device.
QUICK_S, DEEP_S = 0.1, 0.5

#: Bytes of one copy: enough for the full rate of PCI Express 5.0 x16 and of NVLink-C2C (a few milliseconds).
BYTES = 256 << 20


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure each device after the other. Nodes without devices have nothing to copy to: nothing is said of them."""
    seconds = arguments.seconds(QUICK_S, DEEP_S)
    devices.note_unused(exam, node)
    buffers: Dict[
        FrozenSet[int], Tensor
    ] = {}  # stays allocated: torch would hand a freed one on to a device far from it
    for device in node.devices:
        begun(f"host_copy {device.name}")
        near = near_cores(device, node.cores)
        try:
            with pinned_to(near):
                device.use()
                if near not in buffers:
                    buffers[near] = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
                values = of_device(device, buffers[near], seconds)
        except (RuntimeError, MemoryError) as error:
            exam.findings.append(devices.failure("host_copy", device, error))
            continue
        for direction, value in values.items():
            key = f"host_copy/{direction}/{BYTES >> 20}MiB/pinned"
            about: Dict[str, Any] = {"device": device.name, "floor": "host_copy", "round": arguments.round}
            exam.reading(f"host_copy_{direction}", key, device.model, value, **about)


def of_device(device: Device, host: Tensor, seconds: float) -> Dict[str, float]:
    """Return bytes per second to the device (h2d) and from it (d2h)."""
    there = torch.empty(BYTES, dtype=torch.uint8, device=device.torch)
    return {
        "h2d": _rate(device, there, host, seconds),
        "d2h": _rate(device, host, there, seconds),
    }


def _rate(device: Device, target: Tensor, source: Tensor, seconds: float) -> float:
    def one() -> object:
        return target.copy_(source, non_blocking=True)

    device.timed(one)
    times = devices.times_of(lambda: device.timed(one), seconds)
    return devices.median_rate(float(math.prod(source.shape)), times)


def near_cores(device: Device, allowed: Tuple[int, ...], root: Path = Path("/")) -> FrozenSet[int]:
    """Return which of our cores are next to the device, by the kernel's ``local_cpulist``; empty: nobody tells."""
    if not device.pci:
        return frozenset()
    file = f"/sys/bus/pci/devices/{device.pci}/local_cpulist"
    try:
        return numbers(Machine(root=root).text(file)) & frozenset(allowed)
    except Unreadable:
        return frozenset()


@contextlib.contextmanager
def pinned_to(cores: FrozenSet[int]) -> Iterator[None]:
    """Keep the calling thread on these cores; on those that it had where there are none."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
