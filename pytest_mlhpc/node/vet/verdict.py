"""PAYLOAD. The verdict on an allocation, as the judge gives it and ``files.py`` writes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Tuple

from pytest_mlhpc.node.vet.finding import Finding

#: Version of verdict.json.
VERDICT_SCHEMA = 1


class Exit(enum.IntEnum):
    """Exit codes of `mlhpc vet`."""

    READY = 0  #: enough nodes are fit
    TOO_FEW = 1  #: fewer are fit than are needed
    USAGE = 2
    UNKNOWN = 3  #: could not be judged; fails closed
    INTERNAL = 4  #: a defect of ours, or the deadline
    NOT_COMPARED = 5  #: enough nodes are healthy, and figures of theirs had nothing to be compared with


class Fitness(enum.Enum):
    """What is said of a node."""

    FIT = "fit"
    UNFIT = "unfit"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class NodeVerdict:
    """A node with all findings on it, the worst first.

    ``reason`` is that of the worst, with its ``[node_problem]`` or ``[user_problem]`` unless nobody can judge; empty for a node
    without trouble.
    """

    host: str
    fitness: Fitness
    reason: str = ""
    findings: Tuple[Finding, ...] = ()


@dataclass(frozen=True)
class LinkVerdict:
    """A connection between two nodes that is slow although both are fit (deep only)."""

    first: str
    second: str
    reason: str
    value: float = 0.0
    peer_median: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What `mlhpc vet` says.

    ``good`` are hosts to use, in order; ``exclude`` those not to use, unknown ones among them unless
    ``--unknown warn``. ``need`` is how many are needed. ``seconds`` is what vetting took.
    """

    exit: Exit
    need: int
    nodes: Tuple[NodeVerdict, ...]
    good: Tuple[str, ...]
    exclude: Tuple[str, ...]
    links: Tuple[LinkVerdict, ...] = ()
    level: str = "quick"
    seconds: float = 0.0
    text: str = ""  #: why there is no judgement (exit 3 and 4) or what was not compared (exit 5), or empty
    schema: int = VERDICT_SCHEMA
