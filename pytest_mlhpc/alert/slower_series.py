"""Which series are worse than they were, and which of those that were are so no more. Pure.

A regression opens with a loss that is certain at the rate of the site (:mod:`pytest_mlhpc.judge.losses`), however small.
From then on it is compared with the level before it, until enough nights on end are as good as that again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import DAY_NS, Bad, Subject
from pytest_mlhpc.history import events
from pytest_mlhpc.history.level_changes import Shift, WatchedSeries, causes
from pytest_mlhpc.history.level_changes import worse_by as _worse_by
from pytest_mlhpc.history.series import Point
from pytest_mlhpc.judge import losses
from pytest_mlhpc.judge.changes import Attempts, Change, lasting_drops
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, SIGMA_FLOOR, SMALLEST, DropLimits
from pytest_mlhpc.judge.losses import Loss, LossLimits
from pytest_mlhpc.store.record import SeriesKey, Verdict

#: Fewest and most nights that say what the level was before a loss.
FEWEST, BEFORE = 8, 30
#: Standard errors at which the same benchmark on another system is a sign that the code is to blame.
ELSEWHERE = 4.0
#: A level is back when it is this near to the one before, as a fraction; half of the loss, where that is less.
BACK = 0.02
#: Nights whose mean says that it is: at least, at most; so many that it is this many standard errors away from the loss.
#: Four, as neighbouring nights resemble each other, which makes the error larger than it appears.
FEWEST_BACK, MOST_BACK, SURE = 2, 12, 4.0
#: Nights, at least, whose median says where a level is now.
LEVEL = 5
#: Points by which the first night of a drop may differ from what the judge says.
NEAR = 2
#: Nights on one node, at least, before it is named; it must be on fewer than half of those before.
ON_NODE = 3
#: What stands for infinite, as JSON has none.
_MOST = 1e6

#: The re-runs of each night of a series, by session.
Reruns = Mapping[tuple[SeriesKey, str], Sequence[float]]


@dataclass(frozen=True)
class Rules:
    """When a series is worse. ``recent`` is how long ago a change may lie that a new book still takes in, in nights."""

    recent: int = 60
    smallest: float = SMALLEST  #: fraction; nothing below it is a regression


@dataclass(frozen=True)
class KnownIncidents:
    """What the book says: how bad series were when it was announced; since when accepted ones count; whether it has just begun."""

    opened: Mapping[Subject, Bad]
    accepted: Mapping[Subject, int]
    fresh: bool = False


def worse_by(before: float, after: float, better: str) -> float:
    """Return the relative change, positive when worse, finite also from a level of zero."""
    return max(-_MOST, min(_MOST, _worse_by(before, after, better)))


def subject_of(key: SeriesKey) -> Subject:
    """Return the subject of a series."""
    return Subject(
        Kind.REGRESSION,
        key.system,
        key.partition,
        key.environment,
        key.fingerprint,
        key.benchmark,
        key.metric,
    )


def regressions(  # noqa: PLR0917 - what is watched, what is known, what is asked
    watched: Sequence[WatchedSeries],
    reruns: Reruns,
    known: KnownIncidents,
    now_ns: int,
    rules: Rules,
    false_alarms: float = 1.0,
) -> dict[Subject, Bad]:
    """Return all series that are worse now. *false_alarms* is how many a month the site accepts, all its series together."""
    judged = [one for one in watched if one.series.judged and one.series.better != "none"]
    since = [known.accepted.get(subject_of(one.series.key), 0) for one in judged]
    histories = [
        (_attempts(one, reruns, begin), one.series.better) for one, begin in zip(judged, since, strict=True)
    ]
    per_alarm = max(len(judged), 1) / false_alarms
    limits = losses.limits_for(per_alarm, rules.smallest / losses.SEVERAL)
    found: dict[Subject, Bad] = {}
    for one, begin, loss, (history, _better) in zip(
        judged, since, _losses(histories, limits), histories, strict=True
    ):
        subject = subject_of(one.series.key)
        if opened := known.opened.get(subject):
            bad = _still(one, opened, rules)
        elif begin and len(history) <= losses.ENOUGH:
            # With so little history the judge alone would decide, who compares with what was accepted before.
            bad = None
        else:
            # A new book has to date what began long ago: by change points, as the judge of drops reads back twelve nights.
            old = _shifted(one, max(begin, now_ns - rules.recent * DAY_NS), rules) if known.fresh else None
            new = _dropped(one, loss.nights, loss.level) if loss is not None else None
            if loss is not None and new is not None:
                new = replace(new, reason=_certainty(history[-1], loss, len(judged), per_alarm))
            bad = old or new
        if bad is not None:
            found[subject] = bad
    return found


def _losses(histories: Sequence[tuple[Sequence[Attempts], str]], limits: LossLimits) -> list[Loss | None]:
    found: list[Loss | None] = [None] * len(histories)
    rows = [row for row, (history, _better) in enumerate(histories) if history]
    for row, loss in zip(rows, losses.incident_losses([histories[row] for row in rows], limits), strict=True):
        found[row] = loss
    return found


def _certainty(tonight: Attempts, loss: Loss, series: int, per_alarm: float) -> str:
    """Return what speaks for a loss, and how often noise alone would say the same at this site."""
    again = ["confirmed by re-runs"] if tonight.reruns or tonight.regressed else []
    if not math.isfinite(loss.score):
        return ", ".join(again)
    made = len(tonight.finite)
    rate = losses.chance_a_month(per_alarm, loss.score, confirmed=bool(again), attempts=made)
    often = (
        f"about {rate:.2g} times a month" if rate >= 0.1 else f"less than once in {_round(1 / rate)} months"
    )
    return ", ".join([*again, f"noise looks like this {often} in {series:,} series"])


def _round(months: float) -> int:
    """Return *months* to one digit, downwards: more is not known."""
    unit = 10 ** int(math.log10(months))
    return int(months // unit * unit)


def elsewhere(
    watched: Sequence[WatchedSeries], reruns: Reruns, bads: Sequence[Bad], smallest: float
) -> list[Bad]:
    """Return the same benchmarks' losses of that time on other systems, on weaker evidence, as few series are asked."""
    wanted: dict[str, list[Bad]] = {}
    for bad in bads:
        wanted.setdefault(bad.subject.benchmark, []).append(bad)
    others = [
        one
        for one in watched
        if any(
            bad.subject.system != one.series.key.system for bad in wanted.get(one.series.key.benchmark, ())
        )
    ]
    limits = DropLimits(ELSEWHERE, smallest)
    drops = lasting_drops([(_attempts(one, reruns, 0), one.series.better) for one in others], limits)
    return [
        found
        for one, drop in zip(others, drops, strict=True)
        if drop is not None and (found := _dropped(one, drop.nights))
    ]


def _attempts(one: WatchedSeries, reruns: Reruns, since_ns: int) -> list[Attempts]:
    return [
        Attempts(
            point.value,
            tuple(reruns.get((one.series.key, point.night.session), ())),
            regressed=point.night.verdict in {Verdict.REGRESSED, Verdict.DRIFTED},
        )
        for point in one.series.points
        if point.night.created_ns >= since_ns
    ]


def _dropped(one: WatchedSeries, nights: int, level: float = math.nan) -> Bad | None:
    """Return a drop below *level*, where that is known, that lasts since about *nights*; None when tonight is good again, whatever the nights before say.

    None, too, where no night before was better: the judge, who has an accepted value, fails the test; history cannot say more.
    """
    points, better = one.series.points, one.series.better
    if len(points) < 2:
        return None
    start = first = last = _onset(points, nights, better, level)
    known = _change_at(one, start, nights)
    if known is not None:  # it knows what nights without a figure leave open
        start, first, last = known.index, known.first, known.last
    before = level
    if math.isnan(level):
        before = statistics.median(point.value for point in points[max(0, first - BEFORE) : first])
    after = statistics.median(point.value for point in points[last:])
    worse = worse_by(before, after, better)
    undone = any(
        change.index > start and worse_by(change.before, change.after, better) < 0 for change in one.changes
    )
    if undone or worse <= 0 or worse_by(before, points[-1].value, better) < worse / 3:
        return None
    noted = (f"noted: {event.text}" for event in events.events_near(one.events, points, first, last))
    found = causes(points, first, last)
    if len(points) - last < ON_NODE:  # a scheduler gives other nodes each night
        found = tuple(cause for cause in found if cause.name != "nodes")
    return Bad(
        subject_of(one.series.key),
        points[first - 1].night.created_ns,
        points[last].night.created_ns,
        one.series.unit,
        before,
        after,
        worse,
        nodes=_nodes(points, points[last].night.created_ns),
        causes=(*noted, *map(str, found)),
    )


def _change_at(one: WatchedSeries, start: int, nights: int) -> Change | None:
    """Return the change point that a drop is; for one that may have begun before the judge's nights, the newest to the worse."""
    for change in one.changes:
        if change.first <= start <= change.last:
            return change
    if nights < max(DropLimits().nights) or not one.changes:
        return None
    newest = one.changes[-1]
    worse = worse_by(newest.before, newest.after, one.series.better) > 0
    return newest if worse and newest.index < start else None


def _onset(points: Sequence[Point], nights: int, better: str, level: float) -> int:
    """Return the index of the likeliest first night of a drop that lasts since about *nights*.

    That is where a step from the level before explains most: nights times the square of their mean loss.
    """
    start = max(len(points) - nights, 1)
    past = [point.value for point in points[max(0, start - BEFORE) : start]]
    centre = statistics.median(past) if math.isnan(level) else level
    losses = [worse_by(centre, point.value, better) for point in points]
    candidates = range(max(1, start - NEAR), len(points))
    return max(candidates, key=lambda at: len(losses[at:]) * max(0.0, statistics.mean(losses[at:])) ** 2)


def _shifted(one: WatchedSeries, since_ns: int, rules: Rules) -> Bad | None:
    """Return what the oldest change to the worse since then did that has not been undone."""
    points = one.series.points
    for change, shift in zip(one.changes, one.shifts, strict=True):
        level = one.changes[-1].after
        left = worse_by(change.before, level, one.series.better)
        old = points[change.last].night.created_ns < since_ns
        if old or not shift.worse or left < max(rules.smallest, shift.worse_by / 2):
            continue
        first_ns = points[change.first - 1].night.created_ns if change.first else 0
        last_ns = points[change.last].night.created_ns
        return Bad(
            subject_of(one.series.key), first_ns, last_ns, one.series.unit, change.before, level, left,
            nodes=_nodes(points, last_ns), causes=_causes(shift),
        )  # fmt: skip
    return None


def _still(one: WatchedSeries, opened: Bad, rules: Rules) -> Bad | None:
    """Return how bad an open regression is by now, None when its level is back."""
    series = one.series
    since = [point for point in series.points if point.night.created_ns >= opened.last_ns]
    reference = opened.before
    if reference is None or not since:
        return opened
    shift = next((one for one in reversed(one.shifts) if _same_time(one, opened)), None)
    losses = [worse_by(reference, point.value, series.better) for point in since]
    limit = max(rules.smallest / 2, min(opened.worse_by / 2, BACK))
    nights = _nights(series.points, opened, limit)
    newest = losses[-nights:]
    # Of two nights both must be good: the mean of a bad one and a lucky one says nothing.
    if len(losses) > nights and max(statistics.mean(newest), statistics.median_high(newest)) < limit:
        return None
    level = since[-max(LEVEL, nights) :]
    return replace(
        opened,
        after=statistics.median(point.value for point in level),
        worse_by=statistics.median(losses[-len(level) :]),
        nodes=_nodes(series.points, opened.last_ns),
        causes=_causes(shift) if shift else opened.causes,
    )


def _nights(points: Sequence[Point], opened: Bad, limit: float) -> int:
    """Return how many good nights on end are believed: so many that noise alone would hardly make their mean."""
    before = [point.value for point in points if point.night.created_ns < opened.last_ns][-BEFORE:]
    sigma = _sigma(before, statistics.median(before)) if len(before) >= FEWEST else BACK
    distance = max(opened.worse_by - limit, limit / 4)
    return max(FEWEST_BACK, min(MOST_BACK, math.ceil((SURE * sigma / distance) ** 2)))


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
    return max(SIGMA_FLOOR, MAD_TO_SIGMA * mad / abs(centre))


def _nodes(points: Sequence[Point], since_ns: int) -> tuple[str, ...]:
    """Return the nodes that all nights since then ran on, and most nights before did not."""
    since = [set(point.night.nodes) for point in points if point.night.created_ns >= since_ns]
    before = [point.night.nodes for point in points if point.night.created_ns < since_ns][-BEFORE:]
    if len(since) < ON_NODE:
        return ()
    common = set.intersection(*since)
    return tuple(sorted(n for n in common if sum(n in nodes for nodes in before) < len(before) / 2))
