"""Network ports (InfiniBand, RoCE, Slingshot, Ethernet) as sysfs shows them, and what they lose under load.

Which ports a node should have, nobody says: a port without a cable is not in use. What all nodes have is compared as the fact
``fabric`` (ports that carry data, with their rates).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import socket
import struct
from dataclasses import dataclass, field
from typing import Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.check import Examination, LoadWatch
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable, or_else

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


#: Rule -> its counters, seconds that its rate is for (0: a count), and what to do.
_RULES: Dict[str, Tuple[Tuple[str, ...], float, str]] = {
    "network.link_downed": (("link_downed",), 0.0, "have cable and port checked"),
    "network.lossless": (
        ("excessive_buffer_overrun_errors", "local_link_integrity_errors"),
        0.0,
        "have cable and port checked",
    ),
    "network.retries": (
        ("rnr_nak_retry_err", "req_transport_retries_exceeded"),
        0.0,
        "look at this node's port and that of the node at the other end",
    ),
    "network.symbol_errors": (("symbol_error",), 1.0, "have the cable cleaned or replaced"),
    "network.link_recovery": (("link_error_recovery",), 60.0, "have the cable cleaned or replaced"),
    "network.receive_errors": (("port_rcv_errors",), 1.0, "have the cable cleaned or replaced"),
    "network.carrier_lost": (("carrier_down_count",), 0.0, "have cable and switch checked"),
    "network.ethernet_errors": (
        ("rx_crc_errors", "rx_frame_errors", "tx_carrier_errors"),
        0.0,
        "have cable and switch checked",
    ),
    "network.cxi_uncorrected": (("hni_pcs_uncorrected_cw",), 1.0, "have the cable cleaned or replaced"),
}


@dataclass(frozen=True)
class PortState:
    """Ports at the begin, when that was, and which were down since."""

    ports: Mapping[str, Port]
    since: float
    lost: FrozenSet[str] = frozenset()


def _start(machine: Machine, _context: Context) -> PortState:
    return PortState(read_ports(machine), machine.clock())


def _observe(machine: Machine, state: PortState) -> PortState:
    """See which ports are down under load."""
    now = read_ports(machine, counters=False)
    return PortState(state.ports, state.since, state.lost | _lost(state.ports, now))


def _judge_ports(exam: Examination, state: PortState) -> str:
    """Read them again, and judge what has changed."""
    now = read_ports(exam.machine)
    lost = state.lost | _lost(state.ports, now)
    elapsed = max(1.0, exam.machine.clock() - state.since)
    for name, port in state.ports.items():
        _judge_port(exam, port, lost)
        if name in now:
            _judge_counters(exam, port, now[name], elapsed)
    fabric = spell_fabric(state.ports)
    exam.fact("fabric", fabric, severity=Severity.CRITICAL)
    for port in state.ports.values():
        if port.kind == "Ethernet" and port.up and port.rate:
            exam.fact(f"Ethernet {port.name}", port.rate)
    ports = "1 port" if len(state.ports) == 1 else f"{len(state.ports)} ports"
    return f"{ports}, fabric {fabric}: nothing lost and no errors that count in {elapsed:.0f} s"


def _lost(before: Mapping[str, Port], now: Mapping[str, Port]) -> FrozenSet[str]:
    return frozenset(
        name for name, port in before.items() if port.up and (name not in now or not now[name].up)
    )


def _judge_port(exam: Examination, port: Port, lost: FrozenSet[str]) -> None:
    """Judge a port's state at the begin, and its loss."""
    name = port.name
    text = f"the {port.kind} port {name} was up and was lost during vetting; have cable and switch checked"
    exam.judge("network.lost", int(name in lost), text, name)
    if port.kind == "Ethernet":
        text = f"the Ethernet port {name} runs at {port.rate}; look at cable and switch"
        exam.judge("network.half_duplex", int(port.state == "half"), text, name)
        return
    text = f"the {port.kind} port {name} is {port.state} and carries no data; look at cable, switch and subnet manager"
    # Slingshot ports are all cabled; of others one without a cable is not in use.
    inactive = port.up is False and (port.linked or port.kind == "Slingshot")
    exam.judge("network.not_active", int(inactive), text, name)
    text = f"the {port.kind} port {name} runs on one lane: {port.rate}; have the cable replaced"
    exam.judge("network.narrow", int(bool(port.up) and "(1X" in port.rate), text, name)
    if port.up is False and not inactive:
        exam.info(f"the {port.kind} port {name} is {port.state}: not in use", name)


def _judge_counters(exam: Examination, before: Port, after: Port, elapsed: float) -> None:
    """Judge the counters of a port; one that is less than before was cleared, and counts from 0."""
    for rule, (names, per_s, advice) in _RULES.items():
        changes = {}
        for name in names:
            if name in before.counters and name in after.counters:
                change = after.counters[name] - before.counters[name]
                changes[name] = change if change >= 0 else after.counters[name]
        if not changes:
            continue
        count = sum(changes.values())
        value = count * per_s / max(elapsed, per_s) if per_s else count
        what = ", ".join(f"{name} +{change}" for name, change in changes.items() if change)
        meaning = exam.context.policy[rule].meaning
        text = f"{meaning} on {after.kind} port {after.name} in {elapsed:.0f} s: {what}; {advice}"
        exam.judge(rule, value, text, after.name)


WATCHES = (LoadWatch.named("network", _start, _observe, _judge_ports),)
