"""``mlhpc history``: the figures of a benchmark over nights, where levels changed, and what was done to systems.

``bisect`` and ``sensitivity`` are modules of their own, imported when they are asked for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, LazyGroup, NounGroup
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.errors import UsageError, did_you_mean, nearest
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.events import Event, Removal, add, began, events, known_events, new_event, remove
from pytest_mlhpc.history.level_changes import (
    NightlyQuery,
    Shift,
    WatchedSeries,
    cache_path,
    watch,
    watched_part,
    with_causes,
)
from pytest_mlhpc.history.series import Point, Series, Source, feeds
from pytest_mlhpc.judge.changes import find_all
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import user_name
from pytest_mlhpc.store.text import from_to, iso, minutes, nanoseconds, quantity, table, tell

command = LazyGroup(
    "history",
    prefix=f"{__name__}_",
    default="show",
    summaries={
        "show": "one benchmark over nights; `show` may be left out",
        "changes": "what became slower or faster to stay, since which night, and what else changed there",
        "bisect": "which commit or set-up made a benchmark slower, by paired runs of today",
        "sensitivity": "how small a loss fails its test, and how many tests fail without one",
        "event": "note what was done to a system, so that alerts can name it",
    },
    help="History: the figures of a benchmark over nights, where their level changed, and what was done to systems.",
    example="mlhpc history cosmoflow --since 30d",
)

#: Names are looked for in records of so long, in ns; only if there is none in older ones.
_RECENT_NS = 90 * 86_400 * 1_000_000_000


@command.command(
    "show",
    cls=DataCommand,
    help="Show the figures of BENCHMARK over nights, with changes of level and events between them. BENCHMARK is a test's "
    "id, a benchmark, or part of its name; `mlhpc records list` shows them.",
    example="mlhpc history cosmoflow --system cirrus --since 30d",
)
@click.argument("benchmark")
@click.option(
    "--metric", default="", metavar="NAME", help="This one.  [default: those by which a test fails]"
)
@options.since()
@click.option(
    "--limit", type=int, default=20, metavar="N", show_default=True, help="Nights in the table; 0: none."
)
@click.option(
    "--all", "everything", is_flag=True, help="Also re-runs and runs that are not watched over nights."
)
@options.system
@options.branch
@options.source
def show(
    *,
    benchmark: str,
    metric: str,
    since_ns: int,
    limit: int,
    everything: bool,
    system: str,
    branch: str,
    source: str,
    state_dir: Path,
) -> CommandReport:
    """Return a table for each series."""
    query = selection_of(system, branch, judged_only=not metric)
    texts, data = [], []
    with chosen(source, state_dir) as opened:
        known = known_events(state_dir, opened, tell)
        found = series_of(opened, benchmark, system, metric)
        for one in found:
            watched, points = _shown_points(one, query, known, everything=everything)
            recent = [point for point in points if point.night.created_ns >= since_ns]
            if recent:
                data.append(_json(watched, recent))
                texts.append(text_of(watched, recent, limit))
    text = "\n".join(texts)
    if not texts:
        records = sum(len(one.points) for one in found)
        unwatched = f"{records} figures are recorded, none of a night that is watched; --all shows them"
        text = f"{unwatched if records else 'nothing is recorded in that time'}\n"
    return CommandReport(text, {"series": data})


def series_of(source: Source, benchmark: str, system: str, metric: str) -> list[Series]:
    """Return the series that are asked for.

    Raises:
        UsageError: nothing is called that, or it has no such metric.
    """
    benchmarks = _benchmarks(source, benchmark, system)
    every = [one for name in benchmarks for one in source.series(system=system, benchmark=name)]
    wanted = [one for one in every if (one.key.metric == metric if metric else one.judged)]
    if every and not wanted:
        metrics = sorted({one.key.metric for one in every})
        said = f"no metric {metric!r}" if metric else "no metric by which a test fails"
        raise UsageError(f"{benchmark!r} has {said}; --metric takes {', '.join(metrics)}")
    return wanted


def _benchmarks(source: Source, text: str, system: str) -> list[str]:
    """Return the benchmarks that *text* means: of that name or test, else those with it in their name."""
    if next(iter(source.series(system=system, benchmark=text)), None):
        return [text]
    for since_ns in (time.time_ns() - _RECENT_NS, 0):
        nights = (night for night in source.nights(since_ns) if not system or night.system == system)
        # a test has another benchmark for each preset
        pairs = {(night.node_id, night.benchmark) for night in nights}
        part = text.casefold()
        exact = {name for test, name in pairs if test == text}
        found = {name for test, name in pairs if part in name.casefold() or part in test.casefold()}
        if exact or found:
            return sorted(exact or found)
    names = {word for pair in pairs for word in pair}
    names |= {name.rpartition("::")[2].partition("[")[0] for name in names}
    meant = did_you_mean(text, {"bisect", "changes", "event", "sensitivity", *names})
    raise UsageError(
        f"no recorded benchmark or test has {text!r} in its name{meant}; `mlhpc records list` shows the newest"
    )


def _shown_points(
    series: Series, query: NightlyQuery, known: Sequence[Any], *, everything: bool
) -> tuple[WatchedSeries, Sequence[Point]]:
    """Find the changes among the watched nights; return with them the points to show.

    Those are of earlier epochs, too, and with *everything* of nights that are not watched.
    """
    shown_part = watched_part(series, query.default_branch)
    (found,) = find_all([[point.value for point in shown_part.series.points]], query.detector)
    shown = [point for point in series.points if everything or feeds(point.night, query.default_branch)]
    return with_causes(shown_part, found, known), shown


def text_of(watched: WatchedSeries, points: Sequence[Point], limit: int) -> str:
    """Return a heading, a sparkline and a table of the newest *limit* nights, changes and events between them."""
    series = watched.series
    values = [point.value for point in points]
    direction = "" if series.better == "none" else f", {series.better} is better"
    finite = [value for value in values if math.isfinite(value)]
    span = from_to(min(finite), max(finite), series.unit, " to ") if finite else "no figure"
    count = "1 night" if len(points) == 1 else f"{len(points)} nights"
    # The test last, as it may be longer than a line.
    heading = f"{rendering.place(series.key)}  {series.key.metric} ({series.unit}{direction})  {series.key.benchmark}"
    lines = [heading, f"  {rendering.sparkline(values)}  {count}, {span}"]
    return "".join(map(rendering.line, lines)) + _table(watched, points, limit)


def _table(watched: WatchedSeries, points: Sequence[Point], limit: int) -> str:
    series = watched.series
    shown = points[len(points) - limit :] if 0 < limit < len(points) else points if limit else ()
    if not shown:
        return ""
    rows = [("night", "value", "of its level", "verdict", "nodes", "commit")]
    rows += [
        (
            minutes(point.night.created_ns), quantity(point.value, series.unit), _against_level(watched, point),
            _verdict(point), rendering.where_of(point.night), point.night.commit[:12],
        )
        for point in shown
    ]  # fmt: skip
    head, *lines = table(rows).splitlines()
    lines_of_night = [head]
    before = shown[0] if len(shown) < len(points) else None
    for point, line in zip(shown, lines, strict=True):
        lines_of_night += _between(watched, before, point)
        lines_of_night.append(line)
        before = point
    lines_of_night += _between(watched, before, None)
    return "".join(rendering.line(f"  {line}") for line in lines_of_night)


def _between(watched: WatchedSeries, before: Point | None, after: Point | None) -> Iterator[str]:
    """Yield what happened after one night and until the next: events, then an epoch or a level that begins there."""
    after_ns = before.night.created_ns if before else 0
    until_ns = after.night.created_ns if after else None
    if before and after and (what := began(before.night, after.night)):
        yield f"-- new epoch: {what}"
    for event in watched.events:
        if after_ns < event.at_ns and (until_ns is None or event.at_ns <= until_ns):
            yield f"-- {rendering.event_line(event)}"
    for shift in watched.shifts:
        if until_ns is not None and after_ns < shift.at.created_ns <= until_ns:
            yield f"-- {rendering.change(shift)}"
            yield from (f"   {reason}" for reason in rendering.reasons(shift))


def _against_level(watched: WatchedSeries, point: Point) -> str:
    """Return how far a figure is from the level of its time; nothing while there is only one level, which has no name."""
    level, newest = None, watched.series.points[-1:]
    if not newest or began(newest[0].night, point.night):
        return ""
    for shift in watched.shifts:
        if shift.at.created_ns <= point.night.created_ns:
            level = shift.after
        elif level is None:
            level = shift.before
            break
    if level is None or not level or not math.isfinite(point.value):
        return ""
    return f"{point.value / level - 1.0:+.1%}"


def _verdict(point: Point) -> str:
    night = point.night
    remarks = [night.verdict]
    if night.attempt:
        remarks.append(f"re-run {night.attempt}")
    if night.purpose != "nightly":
        remarks.append(night.purpose)
    return ", ".join(remarks)


def _json(watched: WatchedSeries, points: Sequence[Point]) -> dict[str, Any]:
    series = watched.series
    return {
        **to_json(series.key),
        "unit": series.unit,
        "better": series.better,
        "judged": series.judged,
        "points": [
            {
                "time": iso(point.night.created_ns),
                "value": point.value if math.isfinite(point.value) else None,
                "record": point.night.id,
                "verdict": point.night.verdict,
                "attempt": point.night.attempt,
                "purpose": point.night.purpose,
                "nodes": list(point.night.nodes),
                "commit": point.night.commit,
            }
            for point in points
        ],
        "epochs": [
            {"time": iso(after.night.created_ns), "changed": what}
            for before, after in itertools.pairwise(points)
            if (what := began(before.night, after.night))
        ],
        "changes": [rendering.shift_json(shift) for shift in watched.shifts],
        "events": [to_json(event) for event in watched.events],
    }


#: Series of one paragraph that are named.
_MOST_NAMED = 10


@command.command(
    "changes",
    cls=DataCommand,
    help="Show which benchmarks became slower or faster to stay, since which night, and what else changed there. Exit "
    "code 1 if something became worse.",
    example="mlhpc history changes --since 30d --system cirrus",
)
@options.since("30d")
@click.option("--all", "everything", is_flag=True, help="Also metrics by which no test fails.")
@options.system
@options.branch
@options.source
def changes(
    *, since_ns: int, everything: bool, system: str, branch: str, source: str, state_dir: Path
) -> CommandReport:
    """Return a paragraph for each change, newest first."""
    shifts: list[Shift] = []
    series = 0
    with chosen(source, state_dir) as opened:
        query = selection_of(system, branch, judged_only=not everything)
        for watched in watch(opened, query, known_events(state_dir, opened, tell), cache_path(state_dir)):
            series += 1
            shifts += [shift for shift in watched.shifts if shift.last.created_ns >= since_ns]
    shifts.sort(
        key=lambda shift: (-shift.at.created_ns, -shift.worse_by, shift.key.benchmark, shift.key.metric)
    )
    data = {"series": series, "changes": [rendering.shift_json(shift) for shift in shifts]}
    return CommandReport(
        changes_text(shifts, series, since_ns), data, 1 if any(shift.worse for shift in shifts) else 0
    )


def changes_text(shifts: Sequence[Shift], series: int, since_ns: int) -> str:
    """Return a paragraph for each shift, for people."""
    if not series:
        return "no nightly run of the default branch is recorded; `mlhpc records list` shows what is\n"
    watched = "1 series is watched" if series == 1 else f"{series} series are watched"
    if not shifts:
        return f"{watched}, the level of none has changed since {minutes(since_ns)}\n"
    lines = [f"{watched}, since {minutes(since_ns)} a level has changed {len(shifts)}x"]
    for group in grouped(shifts):
        lines += ["", *paragraph(group)]
    return "".join(map(rendering.line, lines))


def grouped(shifts: Sequence[Shift]) -> list[list[Shift]]:
    """Put together what changed on one partition in one night and has one explanation, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[Shift]] = {}
    for shift in shifts:
        same = (
            shift.key.system,
            shift.key.partition,
            shift.at.session,
            shift.worse,
            shift.causes,
            shift.events,
        )
        groups.setdefault(same, []).append(shift)
    return list(groups.values())


def paragraph(group: Sequence[Shift]) -> list[str]:
    """Return shifts of one partition and night for people: what, since when, why perhaps, and where to look on."""
    first = group[0]
    lines = [
        f"{rendering.place(shift.key)}  {shift.key.metric}: {rendering.change(shift)}  {shift.key.benchmark}"
        for shift in group[:_MOST_NAMED]
    ]
    if len(group) > _MOST_NAMED:
        lines.append(f"and {len(group) - _MOST_NAMED} more series; --json has them all")
    lines.append(f"  since {rendering.nights(first)}")
    lines += [f"  {line}" for line in rendering.reasons(first)]
    return [*lines, f"  next: {rendering.history_command(first.key)}"]


SECOND = 1_000_000_000


@command.group(
    "event",
    cls=NounGroup,
    help="Events: what was done to a system, such as a new driver. A new baseline epoch begins there, and alerts name it.",
    example="mlhpc history event add --system cirrus 'driver 570 to 580'",
)
def event_() -> None:
    """Hold the verbs."""


@event_.command(
    "add",
    cls=DataCommand,
    help="Note a change of a system, in one line; from then on a new baseline epoch. With --until, a maintenance.",
    example="mlhpc history event add --system cirrus:gpu --on 2026-11-21 'driver 570 to 580'",
)
@click.argument("text")
@click.option("--system", "place", required=True, metavar="NAME[:PARTITION]", help="Where.")
@click.option("--on", default="", metavar="DATE", help="2026-11-21 or 2026-11-21T14:00Z.  [default: now]")
@click.option("--until", default="", metavar="DATE", help="The end of a maintenance, in which nothing runs.")
@options.state_dir
def add_(text: str, place: str, on: str, until: str, state_dir: Path) -> CommandReport:
    """Add one."""
    system, _, partition = place.partition(":")
    now_ns = time.time_ns()
    event = new_event(
        system, partition, text, at_ns=_moment(on, now_ns), by=user_name(), now_ns=now_ns,
        until_ns=_moment(until, now_ns, "--until") if until else 0,
    )  # fmt: skip
    add(state_dir, event)
    options.publish_events(state_dir)
    if doubt := unknown_place(state_dir, event):
        tell(doubt)
    since = minutes(event.at_ns)
    meaning = f"a new baseline epoch from {since} on"
    if event.is_maintenance:
        meaning = f"maintenance from {since} until {minutes(event.until_ns)}"
    return CommandReport(f"{event.id}: {event.text}, {_place(event)}, {meaning}\n", {"event": to_json(event)})


@event_.command(
    "list", cls=DataCommand, help="List all events, newest last.", example="mlhpc history event list"
)
@click.option("--system", "place", default="", metavar="NAME[:PARTITION]", help="Only of this one.")
@options.state_dir
def list_(place: str, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    system, _, partition = place.partition(":")
    known = events(state_dir, tell)
    shown = [one for one in known if not system or one.concerns(system, partition or one.partition)]
    data = {"events": [to_json(event) for event in shown]}
    if not shown:
        how = "mlhpc history event add --system NAME 'driver 570 to 580'"
        return CommandReport(f"no event is noted; note one: {how}\n", data)
    rows = [("id", "since", "until", "system", "by", "event")]
    for event in shown:
        until = minutes(event.until_ns) if event.is_maintenance else "-"
        rows.append((event.id, minutes(event.at_ns), until, _place(event), event.by, event.text))
    return CommandReport(table(rows), data)


@event_.command(
    "remove",
    cls=DataCommand,
    help="Take back an event that was a mistake, by its ID or how that begins.",
    example="mlhpc history event remove 01932f6a",
)
@click.argument("name", metavar="ID")
@options.state_dir
def remove_(name: str, state_dir: Path) -> CommandReport:
    """Remove one."""
    found = [one for one in events(state_dir, tell) if name and one.id.startswith(name)]
    if not found:
        raise UsageError(f"no event's id starts with {name!r}; `mlhpc history event list` shows all")
    if len(found) > 1:
        raise UsageError(f"several events' ids start with {name!r}: {', '.join(one.id for one in found)}")
    [event] = found
    remove(state_dir, Removal(event.id, user_name(), time.time_ns()))
    options.publish_events(state_dir)
    return CommandReport(f"{event.id} is removed: {event.text}, {_place(event)}\n", {"event": to_json(event)})


def unknown_place(state_dir: Path, event: Event) -> str:
    """Return a warning if nothing was ever recorded where *event* happened, though something was elsewhere."""
    index = Index(state_dir)
    try:
        places = {tuple(row) for row in index.ask("SELECT DISTINCT system, partition FROM records", {})}
    finally:
        index.close()
    if not places or any(event.concerns(*place) for place in places):
        return ""
    known = sorted({place[0] for place in places} | {":".join(place) for place in places})
    hint = nearest(":".join(filter(None, (event.system, event.partition))), known)
    meant = f" (did you mean {hint!r}? then: mlhpc history event remove {event.id})" if hint else ""
    return f"nothing was ever recorded on {_place(event)}{meant}"


def _moment(text: str, now_ns: int, option: str = "--on") -> int:
    """Return since when an event holds: whole seconds, as all dates that are written."""
    try:
        return nanoseconds(text) if text else now_ns // SECOND * SECOND
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is no date like 2026-11-21 or 2026-11-21T14:00Z") from None


def _place(event: Event) -> str:
    return ":".join(filter(None, (event.system, event.partition)))
