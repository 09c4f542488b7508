"""``mlhpc history BENCHMARK``: its figures over nights, with changes of level and events between them."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.changes_cli import shift_json
from pytest_mlhpc.history.choose import (
    add_look_arguments,
    add_source_arguments,
    chosen,
    look_of,
    state_dir_of,
)
from pytest_mlhpc.history.events import events
from pytest_mlhpc.history.nightly import Look, Watched, told, watched_part
from pytest_mlhpc.history.series import Point, Series, Source
from pytest_mlhpc.judge.changes.detect import find_all
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import iso, minutes
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.text import clean, table

#: Names are looked for in records of so long, in ns; only if there is none in older ones.
_RECENT_NS = 90 * 86_400 * 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark, what to show of it, and what says which history."""
    parser.add_argument(
        "benchmark", help="a test's id, a benchmark, or part of its name (`mlhpc records list` shows them)"
    )
    parser.add_argument(
        "--metric", default="", metavar="NAME", help="this one (default: those by which a test fails)"
    )
    parser.add_argument("--since", default="", metavar="TIME", help="30d, 12h or a date (default: all)")
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="nights in the table (default: 20; 0: none)"
    )
    parser.add_argument(
        "--all", action="store_true", help="also re-runs and runs that are not watched over nights"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object for each series")
    add_look_arguments(parser)
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print it. Returns 5 where nothing is recorded of it."""
    since_ns = since(args.since, time.time_ns()) if args.since else 0
    look = look_of(args, judged_only=not args.metric)
    known = events(state_dir_of(args), _tell)
    shown = 0
    with chosen(args) as source:
        found = _series(source, args)
        for watched in [_look(one, look, known, everything=args.all) for one in found]:
            recent = [point for point in watched.series.points if point.night.created_ns >= since_ns]
            if not recent:
                continue
            shown += 1
            if args.json:
                sys.stdout.write(json.dumps(_json(watched, recent)) + "\n")
            else:
                sys.stdout.write(("\n" if shown > 1 else "") + text_of(watched, recent, args.limit))
    if shown:
        return 0
    records = sum(len(one.points) for one in found)
    if records:
        sys.stderr.write(
            f"{records} figures are recorded, none of a night that is watched; --all shows them\n"
        )
    elif found:
        sys.stderr.write("nothing is recorded in that time\n")
    return 5


def _series(source: Source, args: argparse.Namespace) -> list[Series]:
    """Return the series that are asked for.

    Raises:
        UsageError: nothing is called that, or it has no such metric.
    """
    benchmarks = _benchmarks(source, args.benchmark, args.system)
    every = [one for name in benchmarks for one in source.series(system=args.system, benchmark=name)]
    wanted = [one for one in every if (one.key.metric == args.metric if args.metric else one.judged)]
    if every and not wanted:
        metrics = sorted({one.key.metric for one in every})
        said = f"no metric {args.metric!r}" if args.metric else "no metric by which a test fails"
        raise UsageError(f"{args.benchmark!r} has {said}; --metric takes {', '.join(metrics)}")
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
    hint = nearest(text, {word for pair in pairs for word in pair})
    meant = f" (did you mean {hint!r}?)" if hint else ""
    raise UsageError(
        f"no recorded benchmark or test has {text!r} in its name{meant}; `mlhpc records list` shows the newest"
    )


def _look(series: Series, look: Look, known: Sequence[Any], *, everything: bool) -> Watched:
    """Find the changes among the watched nights; with *everything* the other points are kept, but for show only."""
    kept = watched_part(series, look.default_branch)
    (changes,) = find_all([[point.value for point in kept.points]], look.detector)
    watched = told(kept, changes, known)
    if not everything:
        return watched
    return Watched(series, (), watched.shifts, watched.events)


def text_of(watched: Watched, points: Sequence[Point], limit: int) -> str:
    """Return a heading, a sparkline and a table of the newest *limit* nights, changes and events between them."""
    series = watched.series
    values = [point.value for point in points]
    direction = "" if series.better == "none" else f", {series.better} is better"
    finite = [value for value in values if math.isfinite(value)]
    span = f"{min(finite):.5g} to {max(finite):.5g} {series.unit}" if finite else "no figure"
    count = "1 night" if len(points) == 1 else f"{len(points)} nights"
    # The benchmark last, as it may be longer than a line.
    heading = f"{rendering.place(series.key)}  {series.key.metric} ({series.unit}{direction})  {series.key.benchmark}"
    lines = [heading, f"  {rendering.sparkline(values)}  {count}, {span}"]
    return "".join(map(rendering.line, lines)) + _table(watched, points, limit)


def _table(watched: Watched, points: Sequence[Point], limit: int) -> str:
    shown = points[len(points) - limit :] if 0 < limit < len(points) else points if limit else ()
    if not shown:
        return ""
    rows = [("night", "value", "of its level", "verdict", "nodes", "commit")]
    rows += [
        (
            minutes(point.night.created_ns), f"{point.value:.5g}", _against_level(watched, point),
            _verdict(point), rendering.where_of(point.night), point.night.commit[:12],
        )
        for point in shown
    ]  # fmt: skip
    head, *lines = table(rows).splitlines()
    told_lines = [head]
    before_ns = shown[0].night.created_ns if len(shown) < len(points) else 0
    for point, line in zip(shown, lines, strict=True):
        told_lines += _between(watched, before_ns, point.night.created_ns)
        told_lines.append(line)
        before_ns = point.night.created_ns
    told_lines += _between(watched, before_ns, None)
    return "".join(rendering.line(f"  {line}") for line in told_lines)


def _between(watched: Watched, after_ns: int, until_ns: int | None) -> Iterator[str]:
    """Yield what happened after one night and until the next: events, then a new level that begins there."""
    for event in watched.events:
        if after_ns < event.at_ns and (until_ns is None or event.at_ns <= until_ns):
            yield f"-- {rendering.event_words(event)}"
    for shift in watched.shifts:
        if until_ns is not None and after_ns < shift.at.created_ns <= until_ns:
            yield f"-- {rendering.change(shift)}"
            yield from (f"   {reason}" for reason in rendering.reasons(shift))


def _against_level(watched: Watched, point: Point) -> str:
    """Return how far a figure is from the level of its time; nothing while there is only one level, which has no name."""
    level = None
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
    words = [night.verdict]
    if night.attempt:
        words.append(f"re-run {night.attempt}")
    if night.purpose != "nightly":
        words.append(night.purpose)
    return ", ".join(words)


def _json(watched: Watched, points: Sequence[Point]) -> dict[str, Any]:
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
        "changes": [shift_json(shift) for shift in watched.shifts],
        "events": [to_json(event) for event in watched.events],
    }


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
