"""One table of the report, in plain values. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.papers.mlperf.groups import Group
from pytest_mlhpc.papers.mlperf.trained import Trained

Value = str | float | int | None


@dataclass(frozen=True)
class Sheet:
    """One table. ``columns`` name the unit of their figures where they have one; ``notes`` are sentences above it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


def typical(group: Group) -> Trained:
    """Return a run that told its scale, if any did."""
    return next((run for run in group.runs if run.devices), group.runs[0])


def scale_of(group: Group) -> str:
    """Return how large the runs of *group* were, for people."""
    run = typical(group)
    staged = f", staging={group.staging}" if group.staging else ""
    return f"{run.devices or '?'} devices, batch {run.global_batch or '?'}{staged}"


def median(some: Sequence[float | None]) -> float | None:
    """Return the median of what is known, None where nothing is."""
    known = [one for one in some if one is not None]
    return statistics.median(known) if known else None
