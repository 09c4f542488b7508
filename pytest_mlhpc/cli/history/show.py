"""``mlhpc history BENCHMARK``: its figures over nights, with changes of level and events between them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.events import began, known_events
from pytest_mlhpc.history.level_changes import NightlyQuery, WatchedSeries, watched_part, with_causes
from pytest_mlhpc.history.series import Point, Series, Source, feeds
from pytest_mlhpc.judge.changes import find_all
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.text import from_to, iso, minutes, quantity, table, tell

#: Names are looked for in records of so long, in ns; only if there is none in older ones.
_RECENT_NS = 90 * 86_400 * 1_000_000_000


@click.command(
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
def command(
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
        pairs = {
            (night.node_id, night.benchmark) for night in nights
        }  # a test has another benchmark for each preset
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
    (changes,) = find_all([[point.value for point in shown_part.series.points]], query.detector)
    shown = [point for point in series.points if everything or feeds(point.night, query.default_branch)]
    return with_causes(shown_part, changes, known), shown


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
