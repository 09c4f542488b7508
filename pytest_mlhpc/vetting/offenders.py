"""Repeated offenders: nodes that vettings have found unfit again and again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pytest_mlhpc.node.vet.finding import Fitness
from pytest_mlhpc.vetting.history import is_offence
from pytest_mlhpc.vetting.journal import NodeEntry


@dataclass
class Offender:
    """A node's past: ``vettings`` it was in, how often it was unfit, in which checks, and when last (ns UTC) and why."""

    host: str
    system: str
    partition: str
    vettings: int = 0
    unfit: int = 0
    unknown: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    last_ns: int = 0
    last_reason: str = ""


def offenders(entries: Iterable[NodeEntry]) -> tuple[list[Offender], int]:
    """Return the nodes that were ever unfit by a problem of their own, repeated offenders first, and how many never were."""
    found: dict[tuple[str, str, str], Offender] = {}
    for entry in entries:
        place = (entry.system, entry.partition, entry.host)
        node = found.setdefault(place, Offender(entry.host, entry.system, entry.partition))
        node.vettings += 1
        node.unknown += entry.fitness == Fitness.UNKNOWN.value
        if is_offence(entry):
            node.unfit += 1
            node.checks[f"{entry.check} {entry.device}".strip() or "unknown"] += 1
            if entry.at_ns >= node.last_ns:
                node.last_ns, node.last_reason = entry.at_ns, entry.reason
    bad = [node for node in found.values() if node.unfit]
    bad.sort(key=lambda node: (-node.unfit, -node.unfit / node.vettings, -node.last_ns, node.host))
    return bad, len(found) - len(bad)
