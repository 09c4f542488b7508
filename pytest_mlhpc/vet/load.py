"""PAYLOAD. What the killable child is asked to compute, in which order, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from pytest_mlhpc.vet.settings import BUDGET_S, Settings

#: The child's module (``child/main.py``).
CHILD = "pytest_mlhpc.vet.child.main"


@dataclass(frozen=True)
class Work:
    """One command for the child: what it does, what it may cost on a healthy node, by level, in seconds; and for what.

    The costs are those of the plan for vetting (a GEMM of 3 s quick and 120 s deep, memory and copies 2 s, votes 1 and 60 s,
    collectives 10 to 20 s); ``level`` deep means only then.
    """

    name: str
    quick_s: float
    deep_s: float
    level: str = "quick"
    purpose: str = ""

    def cost_s(self, level: str) -> float:
        """Return what it may cost."""
        return self.deep_s if level == "deep" else self.quick_s


#: In the order in which they are done: what matters most comes first, as time may run out.
WORKS: Tuple[Work, ...] = (
    Work("gemm", 3.0, 120.0),
    Work("memory", 2.0, 10.0),
    Work("host_copy", 2.0, 10.0),
    Work("hash", 1.0, 60.0),
    Work("all_reduce", 4.0, 20.0),
    Work("transport", 2.0, 5.0, purpose="job"),
    Work("checkpoint", 20.0, 60.0, level="deep"),
)

#: A command has hung when it takes so many times its cost, and at least so many seconds.
PATIENCE, LEAST_S = 4.0, 10.0

#: Time for one exchange between two nodes, in seconds, by level: measured as 0.5 s healthy over gloo, with the start of NCCL
#: about 3 s; a hung one costs its whole time in each round.
PAIR_S = {"quick": 6.0, "deep": 20.0}

#: Bytes of one exchange, and how often it is repeated within a round, by level.
PAIR_BYTES, PAIR_REPEATS = {"quick": 16 << 20, "deep": 128 << 20}, {"quick": 4, "deep": 8}

#: Share of the whole time by which the child must have imported torch: 3 to 13 s measured, far more where many nodes read it
#: from one slow file system.
READY_SHARE = 0.5


def budget_of(settings: Settings) -> float:
    """Return the whole time for vetting, in seconds."""
    return settings.budget_s or BUDGET_S[settings.level]


def works(settings: Settings) -> Tuple[List[Work], List[Work]]:
    """Return what to do, and what is left out because time is short (half of it is for computing)."""
    fitting = [
        work
        for work in WORKS
        if (work.level == "quick" or settings.level == "deep")
        and (not work.purpose or work.purpose == settings.wanted.purpose)
    ]
    if settings.no_load:
        return [], []
    room = 0.5 * budget_of(settings)
    chosen: List[Work] = []
    late: List[Work] = []
    for work in fitting:
        cost = work.cost_s(settings.level)
        (chosen if cost <= room else late).append(work)
        room -= cost if cost <= room else 0.0
    return chosen, late


def limit_of(work: Work, settings: Settings) -> float:
    """Return after how many seconds a command counts as hung."""
    return max(LEAST_S, PATIENCE * work.cost_s(settings.level))


def pair_args(settings: Settings, round_number: int) -> Dict[str, Any]:
    """Return the arguments of an exchange that both sides share."""
    return {
        "bytes": PAIR_BYTES[settings.level],
        "rounds": PAIR_REPEATS[settings.level],
        "timeout_s": PAIR_S[settings.level],
        "round": round_number,
    }
