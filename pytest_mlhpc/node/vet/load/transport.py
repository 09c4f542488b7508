"""Which transport NCCL, RCCL or gloo chose here, with this user's settings: sockets beside a fabric are far slower.

NCCL and RCCL are started on this node's devices, and their own log is read (``node_facts.py``); what the network between nodes will
be is decided then already. Gloo binds to the address of the interface that GLOO_SOCKET_IFNAME names, else to that of the
host's name (PyTorch, ProcessGroupGloo::createDefaultDevice).
"""

from __future__ import annotations

import os
import socket
from typing import Any, Mapping, Optional

import torch

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks import job_network
from pytest_mlhpc.node.vet.finding import Origin
from pytest_mlhpc.node.vet.load import node_facts
from pytest_mlhpc.node.vet.load.all_reduce import library
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun, Failed
from pytest_mlhpc.node.vet.load.devices import LoadNode
from pytest_mlhpc.node.vet.load.node_facts import ChosenTransport
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, or_else
from pytest_mlhpc.node.vet.ports import Fabric, fabric_of, ipv4_addresses

#: What an interface of InfiniBand says in /sys that it is (linux/if_arp.h, ARPHRD_INFINIBAND).
INFINIBAND = "32"


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
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
    judge(exam, chosen, fabric if several else Fabric())  # one node sends over no network
    tell(exam, chosen)


def tell(exam: Examination, chosen: ChosenTransport) -> None:
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


def judge(exam: Examination, chosen: ChosenTransport, fabric: Fabric) -> None:
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
    # Gloo knows nothing but sockets: that they do not run over the fabric costs less than it does NCCL.
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
        text = f"this host's name, {node_facts}, stands for {address}, which is none of its addresses; set GLOO_SOCKET_IFNAME"
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
