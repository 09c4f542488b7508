"""``mlhpc history changes``: which benchmarks got slower or faster to stay, since which night, and what else changed there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.events import known_events
from pytest_mlhpc.history.level_changes import Shift, cache_path, watch
from pytest_mlhpc.store.text import minutes, tell

#: Series of one paragraph that are named.
_MOST = 10


@click.command(
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
def command(
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
        text_of(shifts, series, since_ns), data, 1 if any(shift.worse for shift in shifts) else 0
    )


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
    return [*lines, f"  next: {rendering.history_command(first.key)}"]
