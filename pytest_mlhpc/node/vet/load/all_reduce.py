"""All-reduce within the node: over its devices by NCCL or RCCL, over a few of its cores by gloo.

One process drives all: ``torch.cuda.nccl`` works on all devices at once, as ``all_reduce_perf -g 8`` of nccl-tests does; gloo has
a thread for each rank, and meets in memory. So nothing is started, no port is opened but on loopback, and torch is loaded
once. Bus bandwidth is size / time x 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun, Failed
from pytest_mlhpc.node.vet.load.devices import (
    Device,
    LoadNode,
    by_clock,
    median_rate,
    note_unused,
    times_of,
    times_together,
)

#: Seconds of measuring.
QUICK_S, DEEP_S = 1.0, 20.0

#: Bytes of each rank's message: of devices, enough to come near the highest bandwidth in short time (nccl-tests' sweeps flatten
#: from 1 GiB); of cores, more than the sockets' buffers hold.
DEVICE_BYTES, CORE_BYTES = 1 << 30, 16 << 20

#: Most ranks on cores: this measures memory and the kernel's loopback, not at the number of cores.
MOST_RANKS = 4

#: Longest wait of one gloo rank for the others, in seconds.
GLOO_S = 8.0


def bus_factor(ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth."""
    return 2.0 * (ranks - 1) / ranks


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure the devices; where there are none, the cores. One device alone exchanges nothing."""
    seconds = arguments.seconds(QUICK_S, DEEP_S)
    note_unused(exam, node)
    if len(node.devices) > 1:
        value = of_devices(exam, node.devices, seconds, begun)
        if value is not None:
            model = f"{len(node.devices)} x {node.devices[0].model}"  # nodes with fewer are no peers
            _tell(
                exam, arguments, library(node.kind), len(node.devices), DEVICE_BYTES, model=model, value=value
            )
    elif not node.devices:
        ranks = min(MOST_RANKS, max(2, node.threads))
        begun(f"all_reduce of {ranks} ranks by gloo")
        value, right = of_cores(node, ranks, seconds)
        _require(exam, f"gloo between {ranks} threads of this node", right=right)
        _tell(exam, arguments, "gloo", ranks, CORE_BYTES, model=node.cpu_model, value=value)


def library(kind: str) -> str:
    """Return what joins devices of this kind."""
    return {"cuda": "nccl", "rocm": "rccl"}.get(kind, "gloo")


def _tell(
    exam: Examination, arguments: Arguments, name: str, ranks: int, size: int, *, model: str, value: float
) -> None:
    key, floor = f"all_reduce/{name}/{ranks}/{size >> 20}MiB", f"all_reduce/{ranks}"
    exam.reading("all_reduce_busbw", key, model, value, floor=floor, round=arguments.round)


def _require(exam: Examination, where: str, *, right: bool) -> None:
    if not right:
        text = (
            f"all-reduce by {where} gave wrong sums: what is exchanged is corrupted; take the node out of use"
        )
        exam.add(Severity.CRITICAL, text, rule="sum")


def of_devices(
    exam: Examination, devices: Tuple[Device, ...], seconds: float, begun: Begun
) -> Optional[float]:
    """Return bytes per second of bus bandwidth, where there is a figure."""
    name = library(devices[0].kind)
    nccl: Any = getattr(torch.cuda, "nccl", None)
    if devices[0].kind == "xpu" or nccl is None:
        text = f"all-reduce over {devices[0].kind} devices of one node needs oneCCL, which this version does not drive"
        exam.info(text, rule="not_supported")
        return None
    if len({device.model for device in devices}) > 1:
        text = "all-reduce is not measured over devices of several models: " + ", ".join(
            sorted({d.model for d in devices})
        )
        exam.info(text, rule="not_supported")
        return None
    size = DEVICE_BYTES
    while size > min(device.memory for device in devices) // 16:
        size //= 2
    data = [
        torch.full((size // 4,), float(number + 1), device=device.torch)
        for number, device in enumerate(devices)
    ]
    begun(f"all_reduce of {len(devices)} devices by {name}")
    nccl.all_reduce(data)
    right = sums_are_right(data, len(devices))

    def one() -> None:
        nccl.all_reduce(data)
        for device in devices:
            device.module.synchronize(device.ordinal)

    for tensor in data:
        tensor.zero_()  # sums of sums would soon be infinite
    _require(exam, f"{name} between the {len(devices)} devices of this node", right=right)
    one()
    times = times_of(lambda: by_clock(one), seconds)
    return bus_factor(len(devices)) * median_rate(float(size), times)


def sums_are_right(data: List[Tensor], ranks: int) -> bool:
    """Return whether each of these holds the sum of 1, 2, ... *ranks* everywhere."""
    wanted = float(ranks * (ranks + 1) // 2)
    return all(bool((tensor == wanted).all()) for tensor in data)


def of_cores(node: LoadNode, ranks: int, seconds: float, size: int = CORE_BYTES) -> Tuple[float, bool]:
    """Return bytes per second of bus bandwidth by gloo on loopback, and whether the sums were right.

    Raises:
        Failed: this torch has no gloo.
    """
    import torch.distributed as dist

    gloo: Any = getattr(dist, "ProcessGroupGloo", None)
    if gloo is None:
        raise Failed("not_supported", f"torch {node.torch} is built without gloo: all-reduce is not measured")
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    data = [torch.full((size // 4,), float(rank + 1)) for rank in range(ranks)]
    right: List[bool] = []

    def prepare(rank: int) -> Callable[[], object]:
        group = gloo(store, rank, ranks, loopback(gloo))
        group.allreduce([data[rank]]).wait()
        right.append(sums_are_right([data[rank]], ranks))
        data[rank].zero_()  # sums of sums would soon be infinite
        return lambda: group.allreduce([data[rank]]).wait()

    times = times_together(node, ranks, prepare, seconds)
    return bus_factor(ranks) * median_rate(float(size), times), all(right)


def loopback(gloo: Any, timeout_s: float = GLOO_S) -> Any:
    """Return gloo's options: by the loopback interface, so that it needs no name of this host that resolves."""
    options = gloo._Options()  # noqa: SLF001 - since torch 1.0 the only way to say which interface
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - as above
    options._timeout = dt.timedelta(seconds=timeout_s)  # noqa: SLF001 - as above
    options._threads = 1  # noqa: SLF001 - as above
    return options
