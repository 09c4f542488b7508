"""``mlhpc changes``: which benchmarks got slower or faster to stay, since which night, and what else changed there."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.cache import cache_path
from pytest_mlhpc.history.choose import (
    add_look_arguments,
    add_source_arguments,
    chosen,
    look_of,
    state_dir_of,
)
from pytest_mlhpc.history.events import events
from pytest_mlhpc.history.nightly import Shift, watch
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import iso, minutes
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.text import clean

#: Series of one paragraph that are told by name.
_MOST = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--since``, ``--all``, ``--json`` and what says which history."""
    parser.add_argument("--since", default="30d", metavar="TIME", help="30d, 12h or a date (default: 30d)")
    parser.add_argument("--all", action="store_true", help="also metrics by which no test fails")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")
    add_look_arguments(parser)
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print them, newest first. Returns 1 where something got worse, 5 where there is no history at all."""
    since_ns = since(args.since, time.time_ns())
    state_dir = state_dir_of(args)
    shifts: list[Shift] = []
    series = 0
    with chosen(args) as source:
        look = look_of(args, judged_only=not args.all)
        for watched in watch(source, look, events(state_dir, _tell), cache_path(state_dir)):
            series += 1
            shifts += [shift for shift in watched.shifts if shift.last.created_ns >= since_ns]
    shifts.sort(
        key=lambda shift: (-shift.at.created_ns, -shift.worse_by, shift.key.benchmark, shift.key.metric)
    )
    if args.json:
        sys.stdout.writelines(json.dumps(shift_json(shift)) + "\n" for shift in shifts)
    else:
        sys.stdout.write(text_of(shifts, series, since_ns))
    if not series:
        return 5
    return 1 if any(shift.worse for shift in shifts) else 0


def text_of(shifts: Sequence[Shift], series: int, since_ns: int) -> str:
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
        for shift in group[:_MOST]
    ]
    if len(group) > _MOST:
        lines.append(f"and {len(group) - _MOST} more series; --json has them all")
    lines.append(f"  since {rendering.nights(first)}")
    lines += [f"  {line}" for line in rendering.reasons(first)]
    return [*lines, f"  next: {rendering.look_on(first.key)}"]


def shift_json(shift: Shift) -> dict[str, Any]:
    """Return a shift for programs; its nights by id and time."""
    return {
        **{name: getattr(shift.key, name) for name in shift.key.__dataclass_fields__},
        "unit": shift.unit,
        "better": shift.better,
        "judged": shift.judged,
        "before": shift.before,
        "after": shift.after,
        "worse_by": shift.worse_by if shift.before else None,
        "confidence": shift.confidence,
        **{
            name: {
                "record": night.id,
                "time": iso(night.created_ns),
                "commit": night.commit,
                "nodes": list(night.nodes),
            }
            for name, night in (("at", shift.at), ("first", shift.first), ("last", shift.last))
        },
        "causes": [to_json(cause) for cause in shift.causes],
        "events": [to_json(event) for event in shift.events],
    }


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
