"""PAYLOAD. What the leader knows when all is measured: the judge's whole input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Tuple

from pytest_mlhpc.node.vet.finding import Outcome


@dataclass(frozen=True)
class NodeReport:
    """All that one node has said.

    ``host`` is its name as the scheduler knows it. ``missing`` is why it did not say more (never came, hung in a named check,
    was lost), empty if it said all; ``unfinished`` names what it had begun. ``models`` counts its devices by model.
    """

    host: str
    boot_id: str = ""
    models: Mapping[str, int] = field(default_factory=dict)
    outcomes: Tuple[Outcome, ...] = ()
    missing: str = ""
    unfinished: str = ""


@dataclass(frozen=True)
class PairResult:
    """One exchange between two nodes in one round; ``value`` in B/s, or ``trouble`` says why there is none.

    ``stage`` is rounds or confirm. ``blamed`` is the host that did not answer, where that is known.
    """

    round: int
    first: str
    second: str
    value: float = 0.0
    trouble: str = ""
    blamed: str = ""
    stage: str = "rounds"
    key: str = ""  #: what makes exchanges comparable: back-end and size


@dataclass(frozen=True)
class Report:
    """Everything: nodes in the order of the allocation, and exchanges between them."""

    nodes: Tuple[NodeReport, ...]
    pairs: Tuple[PairResult, ...] = ()
    level: str = "quick"
    seconds: float = 0.0
