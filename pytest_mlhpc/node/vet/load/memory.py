"""Memory bandwidth: of the host's cores, within each device, and between the host and each device.

Within: arrays that no cache holds are copied. Bytes read and bytes written both count, as in STREAM's Copy (McCalpin, "What is
STREAM?"). Each core copies an array that it has touched first, so that it lies in the memory next to it.

Between: one device at a time, as the floors were measured: devices that share a switch would halve each other's figure. The host's
memory is pinned, and touched by a core beside the device where the kernel tells which those are.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, Iterator, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks.host import memory_info
from pytest_mlhpc.node.vet.load import devices
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun, Failed
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode, Meet, on_all
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, is_number, numbers, or_else

#: Seconds of measuring on the cores, and as much on the devices.
QUICK_S, DEEP_S = 1.0, 5.0

#: Bytes of each of the two arrays of a core. 64 MiB are more than four times what any processor of 2026 has of last-level
#: cache for each core (AMD EPYC 9684X: 1152 MiB for 96 cores, 12 MiB each), as STREAM's rules ask.
CORE_BYTES = 64 << 20

#: Least bytes of it where memory is short: still more than the cache that most processors have for a core.
LEAST_CORE_BYTES = 8 << 20

#: Of a device: a multiple of its largest cache (MI300X: 256 MiB), and an eighth of a small one's memory.
DEVICE_BYTES = 1 << 30


def run_memory(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure the cores, then the devices."""
    seconds = arguments.seconds(QUICK_S, DEEP_S)
    begun("memory of the host")
    size = core_bytes(node.threads, total_memory())
    key, value = f"memory/copy/{size >> 20}MiB", of_cores(node, seconds, size)
    exam.reading("memory_copy", key, node.cpu_model, value, round=arguments.round)
    if not node.devices:
        return
    begun("memory of the devices")

    def work(device: Device, meet: Meet) -> float:
        return of_device(device, meet, seconds)

    results = on_all(node.devices, work, begun, "memory of the devices")
    for device, value in devices.figures(exam, results):
        key, metric = f"memory/device_copy/{device_bytes(device) >> 20}MiB", "device_memory_copy"
        about: Dict[str, Any] = {"device": device.name, "floor": "memory/device", "round": arguments.round}
        exam.reading(metric, key, device.model, value, **about)


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are there for us: all of the node's, or our control group's limit."""
    machine = Machine(root=root)
    total = or_else(lambda name: memory_info(machine, name), "MemTotal", 1 << 40, Unreadable)
    limit = or_else(machine.text, "/sys/fs/cgroup/memory.max", "", Unreadable)
    return min(total, int(limit)) if is_number(limit) else total


def core_bytes(threads: int, total: int) -> int:
    """Return how large each of a core's two arrays is, so that all of them take at most a third of *total* bytes.

    Of all memory, not of what is free, so that equal nodes choose alike.

    Raises:
        Failed: there is too little even for the smallest.
    """
    size = CORE_BYTES
    while size > LEAST_CORE_BYTES and 2 * size * threads > total // 3:
        size //= 2
    if 2 * size * threads > total // 2:
        raise Failed(
            "memory", f"memory needs {2 * size * threads >> 20} MiB, there are {total >> 20} MiB for us"
        )
    return size


def of_cores(node: LoadNode, seconds: float, size: int = CORE_BYTES) -> float:
    """Return the bytes per second that all cores copy together."""

    def prepare(number: int) -> Callable[[], object]:
        source = torch.zeros(size // 4).fill_(float(number))
        target = torch.zeros_like(source).fill_(1.0)
        target.copy_(source)
        return lambda: target.copy_(source)

    times = devices.times_together(node, node.threads, prepare, seconds, node.cores)
    return devices.median_rate(2.0 * size * node.threads, times)


def device_bytes(device: Device) -> int:
    """Return how large each of a device's two arrays is."""
    size = DEVICE_BYTES
    while size > device.memory // 8:
        size //= 2  # so that equal devices choose alike, however much of their memory a driver keeps
    return max(size, 1 << 20)


def of_device(device: Device, meet: Meet, seconds: float) -> float:
    """Return the bytes per second that one device copies within itself."""
    source = torch.ones(device_bytes(device) // 4, device=device.torch)
    target = torch.empty_like(source)

    amount = 2.0 * source.numel() * 4
    return devices.rate_of(amount, lambda: target.copy_(source), device.timed, seconds, meet)


#: Seconds of measuring for each direction of each device.
COPY_QUICK_S, COPY_DEEP_S = 0.1, 0.5

#: Bytes of one copy: enough for the full rate of PCI Express 5.0 x16 and of NVLink-C2C (a few milliseconds).
COPY_BYTES = 256 << 20


def run_host_copy(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure each device after the other. Nodes without devices have nothing to copy to: nothing is said of them."""
    seconds = arguments.seconds(COPY_QUICK_S, COPY_DEEP_S)
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
                    buffers[near] = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
                values = copy_rates(device, buffers[near], seconds)
        except (RuntimeError, MemoryError) as error:
            exam.findings.append(devices.failure("host_copy", device, error))
            continue
        for direction, value in values.items():
            key = f"host_copy/{direction}/{COPY_BYTES >> 20}MiB/pinned"
            about: Dict[str, Any] = {"device": device.name, "floor": "host_copy", "round": arguments.round}
            exam.reading(f"host_copy_{direction}", key, device.model, value, **about)


def copy_rates(device: Device, host: Tensor, seconds: float) -> Dict[str, float]:
    """Return bytes per second to the device (h2d) and from it (d2h)."""
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.torch)
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
