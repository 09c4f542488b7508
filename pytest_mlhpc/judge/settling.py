"""Series without an accepted baseline: their first clean nights settle the level that later nights are judged by. Pure.

Open this to know why a series is ``new`` for eight nights and judged afterwards although nobody accepted it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.judge import fence
from pytest_mlhpc.judge.baseline_files import TOLERANCE, Entry
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import Epoch

#: Clean nights that settle a level: from as many the fence takes a width of its own.
NIGHTS = fence.ENOUGH
#: The reason of a settled entry, as ``mlhpc baseline propose`` writes it.
REASON = f"settled by {NIGHTS} nights"


@dataclass(frozen=True)
class Settling:
    """``entry`` is the settled level; None while fewer than :data:`NIGHTS` clean nights agree, of which ``nights`` are there."""

    nights: int
    entry: Entry | None = None


def settle(nights: Sequence[Attempts], metric: MetricValue, epoch: Epoch) -> Settling:
    """Return what the *nights* of a series, oldest first and all of *epoch*, say about its level.

    The level is the median of the first :data:`NIGHTS` successive clean nights whose later half is not worse or better than
    the earlier half by more than the tolerance: a loss within these nights is not taken for the usual level.
    """
    tolerance = max(TOLERANCE, metric.tolerance or 0.0)
    levels = [
        night.level for night in nights if night.level is not None and night.level > 0 and not night.regressed
    ]
    for begin in range(len(levels) - NIGHTS + 1):
        window = levels[begin : begin + NIGHTS]
        before, after = statistics.median(window[: NIGHTS // 2]), statistics.median(window[NIGHTS // 2 :])
        if abs(after - before) <= tolerance * before:
            return Settling(NIGHTS, _entry(window, metric, epoch, tolerance))
    return Settling(min(len(levels), NIGHTS))


def _entry(window: Sequence[float], metric: MetricValue, epoch: Epoch, tolerance: float) -> Entry:
    value = statistics.median(window)
    return Entry(
        value=value,
        unit=metric.unit,
        better=metric.better,
        tolerance=tolerance,
        definition=epoch.definition,
        device_model=epoch.device_model,
        spread=fence.robust_sigma(window, value),
        runs=len(window),
        reason=REASON,
    )
