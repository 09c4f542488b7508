"""PAYLOAD. What checks say: findings that stand by themselves, readings and facts that only a comparison can judge."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Optional, Tuple


class Severity(enum.Enum):
    """From good to bad. ``UNKNOWN`` is no middle: it says that nobody can tell, and fails closed unless told otherwise."""

    PASS = "PASS"  # noqa: S105 - no password
    INFO = "INFO"
    WARNING = "WARNING"
    CRITICAL = "CRITICAL"
    UNKNOWN = "UNKNOWN"


#: ``Finding.rule`` of a figure that has no peers, no floor and no history.
UNCOMPARED = "uncompared"

#: ``Finding.rule`` of a figure that is compared with the same node's earlier ones alone.
OWN_HISTORY = "own_history"


class Origin(enum.Enum):
    """Who has to act; the value is the prefix of the reason wherever one is given (after Nebius' soperator)."""

    NODE = "node_problem"
    USER = "user_problem"


@dataclass(frozen=True)
class Finding:
    """One judgement on a node or one of its devices.

    ``check`` is the check's name, ``rule`` the policy key that decided (``nvidia.remap_failure``) or the name of a rule of
    comparison (``peers``, ``floor``, ``history``, ``vote``, ``pairs``, ``unjudged``, ``uncompared``). ``device`` is empty for the node as a whole. ``reason``
    is a sentence: what was found, where, and unless it passed what to do. ``value``, ``peer_median``, ``mad`` (1.4826 x
    MAD of the peers) and ``floor`` are in ``unit``, None where they do not apply. ``seconds`` is what the check took.
    """

    check: str
    severity: Severity
    reason: str
    device: str = ""
    rule: str = ""
    origin: Origin = Origin.NODE
    metric: str = ""
    value: Optional[float] = None
    unit: str = ""
    peer_median: Optional[float] = None
    mad: Optional[float] = None
    floor: Optional[float] = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Reading:
    """A figure that means something beside those of peers, a floor, or this site's history.

    ``metric`` with all that changes it besides the hardware makes ``key`` (``gemm/bf16/8192/random``): only equal keys are
    compared, and only between devices of one ``model`` ("" never equals ""; CPUs give their model name). ``better`` is higher
    or lower. ``floor`` names an entry of ``floors.py``, empty where there is none. ``round`` is 0, and 1 when repeated.
    """

    check: str
    metric: str
    key: str
    model: str
    value: float
    unit: str
    better: str = "higher"
    device: str = ""
    floor: str = ""
    round: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Fact:
    """Something that should be equal on all nodes (or, by ``scope``, on all devices of one model), such as a version or a hash.

    Whoever is in the minority gets a finding of ``severity`` (CRITICAL for wrong results); without a majority all get
    UNKNOWN if that is CRITICAL, else INFO.
    """

    check: str
    name: str
    value: str
    scope: str = ""  #: compared within equal scopes only: "" all nodes, else a device model
    device: str = ""
    severity: Severity = Severity.WARNING
    origin: Origin = Origin.NODE


@dataclass(frozen=True)
class Outcome:
    """All that one check says of one node."""

    findings: Tuple[Finding, ...] = ()
    readings: Tuple[Reading, ...] = ()
    facts: Tuple[Fact, ...] = ()
    seconds: float = 0.0
