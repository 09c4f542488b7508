"""Network ports while the node is under load: what is lost, what flaps, what counts errors.

Which ports a node should have, nobody says: a port without a cable is not in use. What all nodes have is compared as the fact
``fabric`` (ports that carry data, with their rates). ``ports.py`` says what *not there* and *unreadable* mean for each file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, FrozenSet, Mapping, Tuple

from pytest_mlhpc.node.vet.check import Examination, LoadWatch
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.ports import Port, read_ports, spell_fabric

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


def _judge(exam: Examination, state: PortState) -> str:
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


WATCHES = (LoadWatch.named("network", _start, _observe, _judge),)
