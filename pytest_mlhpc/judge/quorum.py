"""Three of four re-runs must confirm before anything is called a regression.

Early stop without a rule of its own: the runs not yet made are filled in with the best and with the worst figures; if
both say the same, the rest need not be run. Two of the first two inside the fence are thereby a pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pytest_mlhpc.judge.fence import SMALLEST

RERUNS, CONFIRMATIONS = 4, 3
#: Tries at the re-runs, broken ones counted.
MOST_TRIES = RERUNS + 2
#: A re-run confirms when it lies beyond this share of the fence's distance.
SHARE = 0.6


def confirmed(drops: Sequence[float], width: float) -> bool | None:
    """Return whether the re-runs' *drops* confirm a regression; None = more are needed."""
    missing = RERUNS - len(drops)
    if missing <= 0:
        return _verdict(drops[:RERUNS], width)
    best = _verdict([*drops, *[-math.inf] * missing], width)
    worst = _verdict([*drops, *[math.inf] * missing], width)
    return best if best == worst else None


def wanted(drops: Sequence[float], width: float) -> int:
    """Return the fewest further re-runs that may settle it, 0 when it is settled."""
    if confirmed(drops, width) is not None:
        return 0
    beyond = sum(drop > SHARE * width for drop in drops)
    inside = len(drops) - beyond
    return max(1, min(CONFIRMATIONS - beyond, RERUNS - CONFIRMATIONS + 1 - inside))


def _verdict(drops: Sequence[float], width: float) -> bool:
    beyond = sum(drop > SHARE * width for drop in drops)
    return beyond >= CONFIRMATIONS and statistics.median(drops) > SMALLEST
