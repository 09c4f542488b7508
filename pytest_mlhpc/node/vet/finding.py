"""What checks report (findings, readings, facts), the report of all nodes, and the verdict on an allocation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Dict, Mapping, Optional, Tuple


class Severity(enum.Enum):
    """From good to bad. ``UNKNOWN`` is no middle: it says that nobody can tell, and fails closed by default."""

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

    @property
    def labelled_reason(self) -> str:
        """The reason after ``[node_problem]`` or ``[user_problem]``; of what nobody knows, nobody is blamed."""
        labelled = any(self.reason.startswith(f"[{origin.value}]") for origin in Origin)
        if labelled or self.severity is Severity.UNKNOWN:
            return self.reason
        return f"[{self.origin.value}] {self.reason}"


@dataclass(frozen=True)
class Reading:
    """A figure that means something beside those of peers, a floor, or this site's history.

    ``metric`` with all that changes it besides the hardware makes ``key`` (``gemm/bf16/8192/random``): only equal keys are
    compared, and only between devices of one ``model`` ("" never equals ""; CPUs give their model name). ``better`` is higher
    or lower. ``floor`` names one of the ``floors`` of ``policy.json``, empty where there is none. ``round`` is 0, and 1 when repeated.
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
class CheckOutcome:
    """All that one check says of one node."""

    findings: Tuple[Finding, ...] = ()
    readings: Tuple[Reading, ...] = ()
    facts: Tuple[Fact, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """All that one node has said.

    ``host`` is its name as the scheduler knows it. ``missing`` is why it did not say more (never came, hung in a named check,
    was lost), empty if it said all; ``unfinished`` names what it had begun. ``models`` counts its devices by model.
    """

    host: str
    boot_id: str = ""
    models: Mapping[str, int] = field(default_factory=dict)
    outcomes: Tuple[CheckOutcome, ...] = ()
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
class VetVerdict:
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


def joined(one: CheckOutcome, other: CheckOutcome) -> CheckOutcome:
    """Return one outcome of a check that ran twice: of each figure the better, each finding and fact once."""
    best: Dict[Tuple[str, str], Reading] = {}
    for reading in (*one.readings, *other.readings):
        key = (reading.key, reading.device)
        known = best.get(key)
        if known is None or (reading.value > known.value) == (reading.better == "higher"):
            best[key] = reading
    return CheckOutcome(
        tuple(dict.fromkeys((*one.findings, *other.findings))),
        tuple(best.values()),
        tuple(dict.fromkeys((*one.facts, *other.facts))),
        one.seconds + other.seconds,
    )
