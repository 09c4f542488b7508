"""Which nodes vetting leaves out now, and which it has taken back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.expect import Missing
from pytest_mlhpc.alert.model import DAY_NS, Bad, Subject
from pytest_mlhpc.history.series import Night
from pytest_mlhpc.store.text import one_line

#: A node that was neither blamed nor used for so long is forgotten: it may be out of service, or another's.
FORGOTTEN_NS = 7 * DAY_NS


@dataclass
class _Node:
    good_ns: int = 0
    unfit_ns: int = 0  #: first of the nights on end in which it was left out
    newest_ns: int = 0
    reason: str = ""


def unfit(nights: Iterable[Night], now_ns: int) -> Missing:
    """Return the nodes that the newest record which names them says are unfit; *nights* are oldest first."""
    nodes: dict[Subject, _Node] = {}
    for night in nights:
        for host in night.nodes:
            if host in night.unfit:
                continue
            node = nodes.setdefault(_subject(night, host), _Node())
            node.good_ns = node.newest_ns = night.created_ns
            node.unfit_ns, node.reason = 0, ""
        for host, reason in night.unfit.items():
            node = nodes.setdefault(_subject(night, host), _Node())
            node.unfit_ns = node.unfit_ns or night.created_ns
            node.newest_ns, node.reason = night.created_ns, one_line(reason, 300)
    bad, gone = {}, {}
    for subject, node in nodes.items():
        if not node.unfit_ns:
            continue
        if node.newest_ns < now_ns - FORGOTTEN_NS:
            gone[subject] = f"not seen for {FORGOTTEN_NS // DAY_NS} days"
            continue
        first_ns = node.good_ns or node.unfit_ns - DAY_NS
        bad[subject] = Bad(subject, first_ns, node.unfit_ns, nodes=(subject.node,), reason=node.reason)
    return Missing(bad, frozenset(nodes), gone)


def _subject(night: Night, host: str) -> Subject:
    return Subject(Kind.NODES, night.system, night.partition, node=host)
