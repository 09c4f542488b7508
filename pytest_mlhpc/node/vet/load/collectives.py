"""The collective library of a node: how fast an all-reduce is, and which transport NCCL, RCCL or gloo chose here.

One process drives all: ``torch.cuda.nccl`` works on all devices at once, as ``all_reduce_perf -g 8`` of nccl-tests does; gloo has
a thread for each rank, and meets in memory. So nothing is started, no port is opened but on loopback, and torch is loaded
once. Bus bandwidth is size / time x 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md).

NCCL and RCCL are started on this node's devices, and their own log is read (``node_facts.py``); what the network between nodes will
be is decided then already. Gloo binds to the address of the interface that GLOO_SOCKET_IFNAME names, else to that of the
host's name (PyTorch, ProcessGroupGloo::createDefaultDevice).
"""

from __future__ import annotations

import datetime as dt
import os
import socket
from typing import Any, Callable, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks import job_network
from pytest_mlhpc.node.vet.checks.network import Fabric, fabric_of, ipv4_addresses
from pytest_mlhpc.node.vet.finding import Origin, Severity
from pytest_mlhpc.node.vet.load import node_facts
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
from pytest_mlhpc.node.vet.load.node_facts import ChosenTransport
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, or_else

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


def run_all_reduce(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure the devices; where there are none, the cores. One device alone exchanges nothing."""
    seconds = arguments.seconds(QUICK_S, DEEP_S)
    note_unused(exam, node)
    if len(node.devices) > 1:
        value = of_devices(exam, node.devices, seconds, begun)
        if value is not None:
            model = f"{len(node.devices)} x {node.devices[0].model}"  # nodes with fewer are no peers
            _tell_bandwidth(
                exam, arguments, library(node.kind), len(node.devices), DEVICE_BYTES, model=model, value=value
            )
    elif not node.devices:
        ranks = min(MOST_RANKS, max(2, node.threads))
        begun(f"all_reduce of {ranks} ranks by gloo")
        value, right = of_cores(node, ranks, seconds)
        _require(exam, f"gloo between {ranks} threads of this node", right=right)
        _tell_bandwidth(exam, arguments, "gloo", ranks, CORE_BYTES, model=node.cpu_model, value=value)


def library(kind: str) -> str:
    """Return what joins devices of this kind."""
    return {"cuda": "nccl", "rocm": "rccl"}.get(kind, "gloo")


def _tell_bandwidth(
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
        group = gloo(store, rank, ranks, gloo_options(gloo, "127.0.0.1", GLOO_S))
        group.allreduce([data[rank]]).wait()
        right.append(sums_are_right([data[rank]], ranks))
        data[rank].zero_()  # sums of sums would soon be infinite
        return lambda: group.allreduce([data[rank]]).wait()

    times = times_together(node, ranks, prepare, seconds)
    return bus_factor(ranks) * median_rate(float(size), times), all(right)


def gloo_options(gloo: Any, address: str, timeout_s: float, threads: int = 1) -> Any:
    """Return gloo's options: by the interface of *address*, so that it needs no name of this host that resolves."""
    options = gloo._Options()  # noqa: SLF001 - since torch 1.0 the only way to say which interface
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001 - as above
    options._timeout = dt.timedelta(seconds=timeout_s)  # noqa: SLF001 - as above
    options._threads = threads  # noqa: SLF001 - as above
    return options


#: What an interface of InfiniBand says in /sys that it is (linux/if_arp.h, ARPHRD_INFINIBAND).
INFINIBAND = "32"


def run_transport(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Start the library, and say what it chose.

    Raises:
        Failed: it said nothing that we understand.
    """
    exam.origin = Origin.USER
    try:
        fabric = fabric_of(exam.machine)
    except Unreadable as error:
        exam.unknown("job.transport", f"whether there is a fabric is unknown: {error}")
        return
    name = library(node.kind)
    begun(f"transport of {name}")
    chosen = of_gloo(os.environ, socket.gethostname()) if name == "gloo" else of_nccl(node, name)
    several = arguments.whole("nodes", 2, 1, 1 << 20) > 1
    judge_choice(exam, chosen, fabric if several else Fabric())  # one node sends over no network
    tell_choice(exam, chosen)


def tell_choice(exam: Examination, chosen: ChosenTransport) -> None:
    """Say what should be equal on all nodes."""
    interfaces = " ".join(chosen.interfaces)
    values = {
        "network": chosen.network,
        "interfaces": interfaces,
        "provider": chosen.provider,
        "version": chosen.version,
    }
    for what, value in values.items():
        if value:
            exam.fact(f"{chosen.library} {what}", value)


def of_nccl(node: LoadNode, name: str) -> ChosenTransport:
    """Start NCCL or RCCL on all devices, and return what its log says.

    Raises:
        Failed: nothing was logged.
    """
    nccl: Any = torch.cuda.nccl
    nccl.all_reduce([torch.ones(1024, device=device.torch) for device in node.devices])
    for device in node.devices:
        device.module.synchronize(device.ordinal)
    chosen = node_facts.parse_log(node_facts.log_text(os.environ), name)
    if not chosen.network:
        raise Failed(
            "no_log", f"{name} did not log which network it chose: whether it is a fast one is unknown"
        )
    return chosen


def judge_choice(exam: Examination, chosen: ChosenTransport, fabric: Fabric) -> None:
    """Judge what was chosen, beside what there is."""
    if chosen.library != "gloo":
        job_network.judge_transport(exam, chosen.observed, fabric)
        return
    message = f"{chosen.library} joins nodes by {chosen.network}"
    message += f" ({', '.join(chosen.interfaces[:8])})" if chosen.interfaces else ""
    if not _is_slow(chosen, exam.machine) or not fabric.text:
        exam.info(message if fabric.text else f"{message}; the node shows no fabric", rule="job.transport")
        return
    reason = (
        f"{message}, although there is {fabric.text}: many times slower; "
        "set GLOO_SOCKET_IFNAME to an interface of the fabric"
    )
    # Gloo knows nothing but sockets: that they do not run_transport over the fabric costs less than it does NCCL.
    exam.judge("job.transport", 1.0, reason)


def _is_slow(chosen: ChosenTransport, machine: Machine) -> bool:
    """Return whether gloo would use interfaces that are none of the fabric's."""
    return not any(_of_fabric(name, machine) for name in chosen.interfaces)


def _of_fabric(interface: str, machine: Machine) -> bool:
    """Return whether an interface is InfiniBand's or Slingshot's (``hsn0``; HPE's name for them)."""
    kind = or_else(machine.text, f"/sys/class/net/{interface}/type", "", Unreadable)
    return kind == INFINIBAND or interface.startswith("hsn")


def of_gloo(environ: Mapping[str, str], host: str) -> ChosenTransport:
    """Return by which interface gloo would go.

    Raises:
        Failed: neither a setting nor the host's name leads to one.
    """
    asked = environ.get("GLOO_SOCKET_IFNAME", "")
    if asked:
        return ChosenTransport("gloo", "TCP", tuple(filter(None, asked.split(","))))
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        address = "127.0.0.1"  # so does torch, with a warning
    interface = interface_of(address)
    if interface is None:
        text = f"this host's name, {host}, stands for {address}, which is none of its addresses; set GLOO_SOCKET_IFNAME"
        raise Failed("name", text)
    return ChosenTransport("gloo", "TCP", (interface,))


def interface_of(address: str) -> Optional[str]:
    """Return the interface that has an address, or None."""
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in ipv4_addresses().items() if own == address), None)


def _interface_of_ipv6(address: str) -> Optional[str]:
    try:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with open("/proc/net/if_inet6", encoding="ascii") as file:  # noqa: PTH123 - a path of /proc
            rows = [line.split() for line in file]
    except (OSError, ValueError):
        return None
    return next((row[5] for row in rows if len(row) > 5 and row[0] == wanted), None)
