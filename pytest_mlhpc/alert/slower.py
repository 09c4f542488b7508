"""Which series are worse than they were: from change points, and from tonight's quorum of re-runs. Pure.

A change of level opens a regression when it is recent and the level has not come back; it is then compared with the level
before it until that is reached again. A night that the judge called regressed after re-runs opens one on the first morning,
before there are points enough for a change of level, if it stands out from all nights before.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import DAY_NS, Bad, Subject
from pytest_mlhpc.history.nightly import Shift, Watched
from pytest_mlhpc.history.nightly import worse_by as _worse_by
from pytest_mlhpc.history.series import Point
from pytest_mlhpc.results.record import SeriesKey

#: Nights of history with which tonight is compared, as the judge does (statistics: the last 30 accepted records).
BEFORE = 30
#: Fewest nights before a quorum may open a regression by itself; below that a robust width means nothing (judge: 8).
FEWEST = 8
#: Points of a regression from which on the detector's level is believed rather than the last two points.
YOUNG = 4
#: 1.4826 * MAD estimates the standard deviation of normal noise; no series is quieter than 0.4 % (the judge's floor).
MAD_SIGMA, SIGMA_FLOOR = 1.4826, 0.004
#: One shift is not told from noise below this (the judge's smallest width).
SMALLEST = 0.015


#: A level is back when it is this near to the one before, as a fraction; half of the loss, where that is less.
BACK = 0.02

#: What stands for infinite, as JSON has none.
_MOST = 1e6


@dataclass(frozen=True)
class Rules:
    """When a series is worse. ``recent`` is how long ago a change may lie that still opens a regression, in nights."""

    recent: int = 14
    smallest: float = SMALLEST  #: fraction
    sigmas: float = 4.0  #: that a night stands out by which a quorum opens at once


def worse_by(before: float, after: float, better: str) -> float:
    """Return the relative change, positive when worse, finite also from a level of zero."""
    return max(-_MOST, min(_MOST, _worse_by(before, after, better)))


def subject_of(key: SeriesKey) -> Subject:
    """Return the subject of a series."""
    return Subject(
        Kind.REGRESSION, key.system, key.partition, key.environment, key.device_model, key.fingerprint,
        key.benchmark, key.metric,
    )  # fmt: skip


def look(one: Watched, now_ns: int, opened: Bad | None, rules: Rules, accepted_ns: int = 0) -> Bad | None:
    """Return how bad the series is now; *opened* is what was told of it when it is known as bad already.

    What changed before *accepted_ns* is as it shall be.
    """
    series = one.series
    if series.better == "none" or not series.points:
        return None
    if opened is not None:
        return _still(one, opened, rules)
    since_ns = max(accepted_ns, now_ns - rules.recent * DAY_NS)
    found = _shifted(one, since_ns, rules)
    return found or _stands_out(series.points, series.better, subject_of(series.key), series.unit, rules)


def companion(one: Watched, first_ns: int, last_ns: int, least: float, sigmas: float = 2.5) -> Bad | None:
    """Return how bad the series is if it changed in that range too, weaker evidence admitted; else None.

    Of benchmarks that one cause made slower, some are found a night after others: the first message shall name all. Runs of
    one night are hours apart, hence the half days.
    """
    series = one.series
    before = [p.value for p in series.points if p.night.created_ns <= first_ns + DAY_NS // 2][-BEFORE:]
    since = [point for point in series.points if point.night.created_ns >= last_ns - DAY_NS // 2]
    if series.better == "none" or len(before) < FEWEST or not since:
        return None
    centre, after = statistics.median(before), statistics.median(point.value for point in since)
    worse = worse_by(centre, after, series.better)
    if worse < max(least, sigmas * _sigma(before, centre) / len(since) ** 0.5):
        return None
    subject = subject_of(series.key)
    return Bad(subject, first_ns, last_ns, series.unit, centre, after, worse, nodes=_nodes(since))


def _shifted(one: Watched, since_ns: int, rules: Rules) -> Bad | None:
    """Return what the oldest change to the worse since then did that has not been undone since."""
    if not one.changes:
        return None
    points = one.series.points
    level = one.changes[-1].after
    for change, shift in zip(one.changes, one.shifts, strict=True):
        old = points[change.last].night.created_ns < since_ns
        left = worse_by(change.before, level, one.series.better)
        if old or not shift.worse or left < max(rules.smallest, shift.worse_by / 2):
            continue
        before_ns = points[change.first - 1].night.created_ns if change.first else 0
        last_ns = points[change.last].night.created_ns
        return Bad(
            subject_of(one.series.key), before_ns, last_ns, one.series.unit, change.before, level, left,
            nodes=_nodes(points[change.last :]), causes=_causes(shift),
        )  # fmt: skip
    return None


def _stands_out(
    points: Sequence[Point], better: str, subject: Subject, unit: str, rules: Rules
) -> Bad | None:
    tonight = points[-1]
    before = [point.value for point in points[:-1]][-BEFORE:]
    if tonight.night.verdict != "regressed" or len(before) < FEWEST:
        return None
    centre = statistics.median(before)
    worse = worse_by(centre, tonight.value, better)
    if worse < max(2 * rules.smallest, rules.sigmas * _sigma(before, centre)):
        return None
    range_ns = points[-2].night.created_ns, tonight.night.created_ns
    reason = "confirmed by re-runs"
    return Bad(
        subject, *range_ns, unit, centre, tonight.value, worse, nodes=_nodes([tonight]), reason=reason
    )  # fmt: skip


def _still(one: Watched, opened: Bad, rules: Rules) -> Bad | None:
    """Return how bad an open regression is by now, None when its level is back."""
    series = one.series
    since = [point for point in series.points if point.night.created_ns >= opened.last_ns]
    reference = opened.before
    if reference is None or not since:
        return opened
    shift = next((one for one in reversed(one.shifts) if _same_time(one, opened)), None)
    causes = _causes(shift) if shift else opened.causes
    told = replace(opened, nodes=_nodes(since), causes=causes)
    if shift is None and len(since) < YOUNG:
        # The detector has not seen it yet, or not any more.
        back = [worse_by(reference, point.value, series.better) < opened.worse_by / 2 for point in since[-2:]]
        return None if len(back) == 2 and all(back) else told
    level = one.changes[-1].after if one.changes else statistics.median(p.value for p in series.points)
    worse = worse_by(reference, level, series.better)
    if worse < max(rules.smallest / 2, min(opened.worse_by / 2, BACK)):
        return None
    return replace(told, after=level, worse_by=worse)


def _same_time(shift: Shift, opened: Bad) -> bool:
    return shift.worse and abs(shift.at.created_ns - opened.last_ns) <= 2 * DAY_NS


def _causes(shift: Shift) -> tuple[str, ...]:
    """Return what people noted first, then what the records say."""
    return (*(f"noted: {event.text}" for event in shift.events), *map(str, shift.causes))


def _sigma(values: Sequence[float], centre: float) -> float:
    """Return the robust relative spread."""
    if not centre:
        return SIGMA_FLOOR
    mad = statistics.median(abs(value - centre) for value in values)
    return max(SIGMA_FLOOR, MAD_SIGMA * mad / abs(centre))


def _nodes(points: Sequence[Point]) -> tuple[str, ...]:
    """Return the nodes that all these nights ran on."""
    every = [set(point.night.nodes) for point in points]
    return tuple(sorted(set.intersection(*every))) if every else ()


def regressions(
    watched: Sequence[Watched],
    now_ns: int,
    opened: Mapping[Subject, Bad],
    rules: Rules,
    accepted: Mapping[Subject, int],
) -> dict[Subject, Bad]:
    """Return all series that are worse now. *accepted*: since when changes of a series count, in ns UTC."""
    found = {}
    for one in watched:
        subject = subject_of(one.series.key)
        bad = look(one, now_ns, opened.get(subject), rules, accepted.get(subject, 0))
        if bad is not None and one.series.judged:
            found[subject] = bad
    return found
