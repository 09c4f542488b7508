"""A node's network ports (InfiniBand, RoCE, Slingshot, Ethernet) and its fast fabric, as sysfs shows them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, or_else

_IB, _CXI, _NET = "/sys/class/infiniband", "/sys/class/cxi", "/sys/class/net"

#: Errors by which a driver says that it does not have a value.
_NOT_KEPT = (errno.EINVAL, errno.EOPNOTSUPP)

#: Counter -> the folder below a port of InfiniBand (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
_IB_COUNTERS = {
    "link_downed": "counters",
    "excessive_buffer_overrun_errors": "counters",
    "local_link_integrity_errors": "counters",
    "symbol_error": "counters",
    "link_error_recovery": "counters",
    "port_rcv_errors": "counters",
    "rnr_nak_retry_err": "hw_counters",
    "req_transport_retries_exceeded": "hw_counters",
}
_NET_COUNTERS = (
    "carrier_down_count",
    "statistics/rx_crc_errors",
    "statistics/rx_frame_errors",
    "statistics/tx_carrier_errors",
)
_CXI_COUNTERS = ("hni_pcs_uncorrected_cw",)

#: ioctl(2) request for an interface's IPv4 address (netdevice(7)).
SIOCGIFADDR = 0x8915

#: ARPHRD_ETHER (Linux, include/uapi/linux/if_arp.h).
_ETHERNET = "1"


@dataclass(frozen=True)
class Port:
    """A port: ``name`` for users, ``kind`` InfiniBand, RoCE, Slingshot or Ethernet.

    ``up``: it carries data; None where the driver does not say. ``linked``: it has a link. ``state`` and ``rate`` are the driver's text.
    """

    name: str
    kind: str
    up: Optional[bool]
    linked: bool = False
    state: str = ""
    rate: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


def read_ports(machine: Machine, *, counters: bool = True) -> Dict[str, Port]:
    """Return all ports by name; without *counters* only their states.

    Raises:
        Unreadable: something is there and may not be read.
    """
    found = [
        *_infiniband(machine, counters=counters),
        *_slingshot(machine, counters=counters),
        *_ethernet(machine, counters=counters),
    ]
    return {port.name: port for port in found}


def _folder(machine: Machine, name: str) -> List[str]:
    none: List[str] = []
    return or_else(machine.names_in, name, none)


def _text(machine: Machine, name: str) -> Optional[str]:
    """Return a value, None where the driver has none."""
    try:
        return machine.text(name)
    except Absent:
        return None
    except Unreadable as error:
        if error.code in _NOT_KEPT:
            return None
        raise


def _count(machine: Machine, name: str) -> Optional[int]:
    """Return a counter, None where the driver has none. Slingshot writes ``count@time``.

    Raises:
        Unreadable: it may not be read, or is no number.
    """
    text = _text(machine, name)
    if text is None:
        return None
    number = text.partition("@")[0]
    if not number.isdecimal() or len(number) > 20:
        raise Unreadable(f"{name} holds {text[:40]!r}, not a count")
    return int(number)


def _counts(machine: Machine, places: Mapping[str, str], wanted: bool) -> Dict[str, int]:
    counts = {name: _count(machine, place) for name, place in places.items()} if wanted else {}
    return {name: count for name, count in counts.items() if count is not None}


def _infiniband(machine: Machine, *, counters: bool) -> Iterator[Port]:
    for device in _folder(machine, _IB):
        for number in _folder(machine, f"{_IB}/{device}/ports"):
            folder = f"{_IB}/{device}/ports/{number}"
            state = _text(machine, f"{folder}/state")
            if state is None:
                continue  # it went while we looked: it is missed at the end
            label = state.partition(":")[2].strip() or state
            physical = _text(machine, f"{folder}/phys_state") or ""
            layer = _text(machine, f"{folder}/link_layer") or "InfiniBand"
            places = {name: f"{folder}/{below}/{name}" for name, below in _IB_COUNTERS.items()}
            yield Port(
                name=f"{device}/{number}",
                kind="RoCE" if layer == "Ethernet" else layer,
                up=label == "ACTIVE",
                linked="LinkUp" in physical,
                state=label,
                rate=re.sub(r"\s+", " ", _text(machine, f"{folder}/rate") or ""),
                counters=_counts(machine, places, counters),
            )


def _slingshot(machine: Machine, *, counters: bool) -> Iterator[Port]:
    for device in _folder(machine, _CXI):
        folder = f"{_CXI}/{device}/device"
        state = _text(machine, f"{folder}/port/0/link/state")
        places = {name: f"{folder}/telemetry/{name}" for name in _CXI_COUNTERS}
        yield Port(
            name=device,
            kind="Slingshot",
            up=None if state is None else state == "up",
            linked=state == "up",
            state=state or "",
            rate=_text(machine, f"{folder}/port/0/link/speed") or "",
            counters=_counts(machine, places, counters),
        )


def _ethernet(machine: Machine, *, counters: bool) -> Iterator[Port]:
    for name in _folder(machine, _NET):
        folder = f"{_NET}/{name}"
        if not machine.exists(f"{folder}/device") or _text(machine, f"{folder}/type") != _ETHERNET:
            continue
        carrier = _text(machine, f"{folder}/carrier")
        duplex, speed = _text(machine, f"{folder}/duplex") or "", _text(machine, f"{folder}/speed") or ""
        places = {place.rpartition("/")[2]: f"{folder}/{place}" for place in _NET_COUNTERS}
        yield Port(
            name=name,
            kind="Ethernet",
            up=carrier == "1",
            linked=carrier == "1",
            state=duplex,
            rate=f"{speed} Mb/s {duplex}".strip() if speed.isdecimal() else "",
            counters=_counts(machine, places, counters),
        )


def ipv4_addresses() -> Dict[str, str]:
    """Return the IPv4 address of each of this node's interfaces that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def spell_fabric(ports: Mapping[str, Port]) -> str:
    """Return the ports of a fabric that carry data, such as ``4 x InfiniBand 400 Gb/sec (4X NDR)``; ``none`` without any."""
    counted: Dict[Tuple[str, str], int] = {}
    for port in ports.values():
        if port.kind != "Ethernet" and port.up is not False:
            counted[port.kind, port.rate] = counted.get((port.kind, port.rate), 0) + 1
    parts = [f"{count} x {kind} {rate}".strip() for (kind, rate), count in sorted(counted.items())]
    return ", ".join(parts) or "none"


#: Where libraries lie that no variable names. Source: ld.so(8), and where distributions, CUDA and ROCm install.
FOLDERS = (
    "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib", "/usr/local/cuda/lib64", "/opt/rocm/lib",
)  # fmt: skip


@dataclass(frozen=True)
class Fabric:
    """Ports that are up: InfiniBand and its like, Slingshot, and Ethernet that could do RoCE; by device name."""

    verbs: Tuple[str, ...] = ()
    slingshot: Tuple[str, ...] = ()
    ethernet: Tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """Whether there is a fabric that is there for nothing else."""
        return bool(self.verbs or self.slingshot)

    @property
    def text(self) -> str:
        """What it is, for people."""
        kinds = (("InfiniBand", self.verbs), ("Slingshot", self.slingshot), ("RoCE", self.ethernet))
        return ", ".join(f"{kind} ({', '.join(names[:4])})" for kind, names in kinds if names)


def fabric_of(machine: Machine) -> Fabric:
    """Return the fabric.

    Raises:
        Unreadable: a port does not say whether it is up.
    """
    ports = [port for port in _infiniband(machine, counters=False) if port.up]
    verbs, ethernet = (
        tuple(port.name.partition("/")[0] for port in ports if (port.kind == "RoCE") is roce)
        for roce in (False, True)
    )
    slingshot = [path.rpartition("/")[2] for path in machine.names(f"{_CXI}/cxi*")]
    return Fabric(verbs, tuple(slingshot), ethernet)


def library_folders(machine: Machine) -> Tuple[str, ...]:
    """Return the folders that the loader searches, in its order."""
    paths = machine.environ.get("LD_LIBRARY_PATH", "").split(":")
    return tuple(dict.fromkeys([*(folder for folder in paths if folder.startswith("/")), *FOLDERS]))
