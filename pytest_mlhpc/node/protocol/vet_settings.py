"""PAYLOAD. What is to be vetted and how: the same for `mlhpc vet`, an allocation's readiness step, and a pod's init container."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound, Wanted

#: Longest time that vetting may take, in seconds, by level.
BUDGET_S = {"quick": 60.0, "deep": 600.0}


@dataclass(frozen=True)
class Learned:
    """What this site's history says of one reading: median and 1.4826 x MAD over *count* good nodes and nights.

    With ``host`` the figures are that node's own, and may be few.
    """

    key: str
    model: str
    median: float
    mad: float
    count: int
    host: str = ""


@dataclass(frozen=True)
class Settings:
    """One vetting.

    ``need`` is how many nodes must be fit, 0: all. ``budget_s`` is the deadline, by which checks are chosen too; 0: that of the
    level. ``out`` is the folder for the verdict's files, written by the first node alone, empty: none. ``unknown`` is fail or
    warn. ``hosts`` are all nodes in order, empty: as the
    environment says. ``single`` leaves out all that takes several nodes. ``bounds`` replace those of the policy. ``python`` is the
    interpreter that has torch, empty: our own. ``no_load`` leaves out all that computes. ``require_comparison``: a figure that
    has no peers, no floor and no history makes its node unknown; else the node is fit, and the verdict NOT_COMPARED. ``as_json``: the
    verdict is printed for programs.
    """

    level: str = "quick"
    need: int = 0
    budget_s: float = 0.0
    out: str = ""
    unknown: str = "fail"
    wanted: Wanted = field(default_factory=Wanted)
    bounds: Tuple[Bound, ...] = ()
    learned: Tuple[Learned, ...] = ()
    python: str = ""
    hosts: Tuple[str, ...] = ()
    single: bool = False
    no_load: bool = False
    require_comparison: bool = True
    as_json: bool = False
