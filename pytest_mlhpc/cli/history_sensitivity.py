"""``mlhpc history sensitivity``: the smallest loss of each benchmark that fails its test within 1, 3 and 14 nights."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.cli.options import chosen, selection_of
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.history import rendering
from pytest_mlhpc.history.level_changes import WatchedSeries, watched_part
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.judged_metric import smallest_loss
from pytest_mlhpc.judge.losses import limits_for
from pytest_mlhpc.judge.sensitivity import FEWEST, SURE, WITHIN, Sensitivity, sensitivity
from pytest_mlhpc.store.record import SeriesKey
from pytest_mlhpc.store.text import count, table, tell

if TYPE_CHECKING:
    from pytest_mlhpc.config.systems import Systems

#: Rows of the table, at most.
_MOST = 40
#: Nights whose median says what a night of a benchmark costs.
_RECENT = 30
#: Seconds that a series takes, about; from so many series on that is said before.
_SERIES_S, _MANY = 0.5, 20


@dataclass(frozen=True)
class AssumedChange:
    """What is tried in place of what is: another tolerance (share), noise (factor of it), or false alarms (a month, of the site)."""

    tolerance: float | None
    noise: float | None
    false_alarms: float | None

    @property
    def any(self) -> bool:
        """Whether something shall be tried."""
        return any(one is not None for one in (self.tolerance, self.noise, self.false_alarms))


@dataclass(frozen=True)
class SeriesRow:
    """One series: its tolerance, node-hours of a night, what can be found in it, and what could be."""

    key: SeriesKey
    tolerance: float
    node_hours: float
    now: Sensitivity
    then: Sensitivity | None


@click.command(
    cls=DataCommand,
    help="Show how small a loss of each benchmark fails its test within 1, 3 and 14 nights, in nine of ten cases, and how many "
    "tests fail without a loss. Losses are planted into the benchmark's own nights, drawn anew, and judged. BENCHMARK is part "
    "of a test's id. --tolerance and --noise say what another tolerance would bring, or a benchmark that runs longer or more "
    "often and so varies less.",
    example="mlhpc history sensitivity cosmoflow --noise 0.5",
)
@click.argument("benchmark", default="")
@click.option(
    "--tolerance", type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="SHARE",
    help="Try this one: 0.02 is 2 %.",
)  # fmt: skip
@click.option(
    "--noise", type=click.FloatRange(0, 10, min_open=True), metavar="FACTOR",
    help="Try so many times the noise: 0.5 is half of it.",
)  # fmt: skip
@click.option(
    "--false-alarms", metavar="RATE", help="Try so many false losses of the whole site: '1 per week'."
)
@options.systems_file
@options.system
@options.branch
@options.baselines_dir
@options.source
def command(
    *,
    benchmark: str,
    tolerance: float | None,
    noise: float | None,
    false_alarms: str | None,
    systems_file: str | None,
    system: str,
    branch: str,
    baselines_dir: Path,
    source: str,
    state_dir: Path,
) -> CommandReport:
    """Return a row for each series, that in which least is found first."""
    systems = options.chosen_systems(systems_file)
    what_if = AssumedChange(tolerance, noise, _rate(false_alarms))
    query = selection_of(system, branch, judged_only=True)
    with chosen(source, state_dir) as opened:
        every = [
            watched_part(one, query.default_branch) for one in opened.series(system=system) if one.judged
        ]
    wanted = _matching([one for one in every if one.series.points], benchmark)
    if len(wanted) >= _MANY:
        tell(
            f"{count(len(wanted), 'series')} are simulated, which takes about {_SERIES_S * len(wanted):.0f} s"
        )
    book = BaselineBook(baselines_dir, state_dir)
    found = [row for one in wanted if (row := _row(one, book, systems, what_if))]
    found.sort(key=lambda one: (*(-(size or 1.0) for size in reversed(one.now.smallest)), one.key))
    young = [one for one in wanted if one.series.key not in {row.key for row in found}]
    return CommandReport(text_of(found, young), _json(found, young))


def _matching(every: Sequence[WatchedSeries], benchmark: str) -> list[WatchedSeries]:
    part = benchmark.casefold()
    wanted = [one for one in every if part in one.series.key.benchmark.casefold()]
    if benchmark and not wanted:
        meant = did_you_mean(benchmark, {one.series.key.benchmark for one in every})
        raise UsageError(
            f"no watched benchmark has {benchmark!r} in its name{meant}; `mlhpc records list` shows the newest"
        )
    return wanted


def _rate(text: str | None) -> float | None:
    if text is None:
        return None
    from pytest_mlhpc.config.quantities import parse_rate

    try:
        return parse_rate(text)
    except ValueError as error:
        raise UsageError(f"--false-alarms {error}") from error


def _row(
    one: WatchedSeries, book: BaselineBook, systems: Systems, what_if: AssumedChange
) -> SeriesRow | None:
    series, key, site = one.series, one.series.key, systems.false_alarms
    matters = systems.matters(key.system, key.partition)
    tolerance = smallest_loss(book.lookup(key), local=bool(key.fingerprint), matters=matters)
    values = [point.value for point in series.points]
    now = sensitivity(values, series.better, limits_for(max(book.count(), 1) / site, tolerance))
    if now is None:
        return None
    then = None
    if what_if.any:
        series_per_alarm = max(book.count(), 1) / (what_if.false_alarms or site)
        limits = limits_for(series_per_alarm, what_if.tolerance or tolerance)
        then = sensitivity(values, series.better, limits, noise=what_if.noise or 1.0)
    hours = statistics.median(point.night.node_hours for point in series.points[-_RECENT:])
    return SeriesRow(key, tolerance, hours, now, then)


def text_of(found: Sequence[SeriesRow], young: Sequence[WatchedSeries]) -> str:
    """Return the table and what it says of all series together, for people."""
    if not found and not young:
        return "no nightly run of the default branch is recorded; `mlhpc records list` shows what is\n"
    parts = []
    if found:
        within = [f"in {count(nights, 'night')}" for nights in WITHIN]
        heading = ["where", "metric", "noise", "tolerance", *within, "node-hours", "benchmark"]
        parts = [table([heading, *map(_cells, found[:_MOST])])]
        if len(found) > _MOST:
            parts.append(f"and {len(found) - _MOST} more series; --json has them all\n")
        parts += ["\n", *_summary(found)]
    if young:
        parts += _too_young(young)
    return "".join(parts)


def _cells(one: SeriesRow) -> list[str]:
    sizes = [
        _size(size) if one.then is None else f"{_size(size)} -> {_size(other)}"
        for size, other in zip(one.now.smallest, (one.then or one.now).smallest, strict=True)
    ]
    noise, place = rendering.percent(one.now.noise), rendering.place(one.key)
    tolerance = rendering.percent(one.tolerance)
    return [place, one.key.metric, noise, tolerance, *sizes, f"{one.node_hours:.3g}", one.key.benchmark]


def _size(size: float | None) -> str:
    return "none" if size is None else f"{size:.1%}"


def _summary(found: Sequence[SeriesRow]) -> list[str]:
    lines = [f"A loss of the size shown fails its test within that time in {SURE:.0%} of cases.\n"]
    lines.append(f"Without a loss, {_false([one.now for one in found])}.\n")
    if then := [one.then for one in found if one.then]:
        lines.append(f"With what is tried, {_false(then)}.\n")
    return [*lines, f"A night of these benchmarks takes {_hours(found):.3g} node-hours.\n"]


def _false(rows: Sequence[Sensitivity]) -> str:
    """Say how many tests fail that way; where none did, what that excludes with 95 % (rule of three)."""
    red, simulated = sum(one.red for one in rows), sum(one.simulated for one in rows)
    monthly = 30 * len(rows) * (red or 3) / simulated
    return (
        f"{red} of {simulated:,} simulated nights failed a test:"
        f" {'about' if red else 'less than'} {monthly:.2g} a month in {len(rows)} series"
    )


def _hours(found: Iterable[SeriesRow]) -> float:
    """Return the node-hours of one night: the metrics of one benchmark are of one run."""
    return sum({replace(one.key, metric=""): one.node_hours for one in found}.values())


def _too_young(young: Sequence[WatchedSeries]) -> list[str]:
    lines = [
        f"{count(len(young), 'series')} cannot be simulated: {FEWEST} nights with a figure above 0 are needed\n"
    ]
    lines += [
        rendering.line(
            f"  {rendering.place(key)}  {key.metric}: {count(len(one.series.points), 'night')}  {key.benchmark}"
        )
        for one in young[:_MOST]
        for key in [one.series.key]
    ]
    return lines


def _json(found: Sequence[SeriesRow], young: Sequence[WatchedSeries]) -> dict[str, Any]:
    def fields(one: Sensitivity) -> dict[str, Any]:
        sizes = {str(nights): size for nights, size in zip(WITHIN, one.smallest, strict=True)}
        return {"noise": one.noise, "smallest": sizes, "red": one.red, "simulated": one.simulated}

    rows = [
        {
            **asdict(one.key), "nights": one.now.nights, "tolerance": one.tolerance, "node_hours": one.node_hours,
            "now": fields(one.now), "then": fields(one.then) if one.then else None,
        }
        for one in found
    ]  # fmt: skip
    return {
        "sure": SURE,
        "node_hours": _hours(found),
        "series": rows,
        "young": [{**asdict(one.series.key), "nights": len(one.series.points)} for one in young],
    }
