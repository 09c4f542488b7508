"""Whether the end of a better level is told, which the nights before it hide: by what the alert itself says."""

from __future__ import annotations

import random
import statistics
import sys

from benchmarks.report import Row, machine, table
from pytest_mlhpc.alert.slower_series import KnownIncidents, Rules, regressions
from pytest_mlhpc.history.level_changes import WatchedSeries, with_causes
from pytest_mlhpc.history.series import Night, Point, Series
from pytest_mlhpc.judge.changes import Change, find_all
from pytest_mlhpc.store.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "", "a", "rate")
DAY_NS = 86_400 * 10**9
BEFORE, AFTER, RISE, SERIES = 60, 14, 1.05, 30
NOISES, LASTED = (0.002, 0.005, 0.01, 0.015), (20, 30, 40)


def run() -> list[Row]:
    """Let the level of 30 series rise by 5 % and fall back, for each noise and length."""
    choose = random.Random(1)  # noqa: S311 - test data, the same each time
    return [_row(choose, noise, lasted) for noise in NOISES for lasted in LASTED]


def _row(choose: random.Random, noise: float, lasted: int) -> Row:
    delays = [delay for _ in range(SERIES) if (delay := _delay(choose, noise, lasted)) is not None]
    share, middle = len(delays) / SERIES, statistics.median(delays) if delays else float("nan")
    what = f"5 % better for {lasted} nights, noise {noise:.1%}: its end told within {AFTER} nights"
    return Row(what, "told", f"{share:.0%}, after {middle:g} nights", share >= 0.9)


def _delay(choose: random.Random, noise: float, lasted: int) -> int | None:
    """Return how many nights after the first bad one it is told, None if never."""
    total = BEFORE + lasted + AFTER
    values = [
        (RISE if BEFORE <= night < BEFORE + lasted else 1.0) * choose.gauss(1.0, noise)
        for night in range(total)
    ]
    pasts = [values[:count] for count in range(BEFORE + lasted + 1, total + 1)]
    for delay, (past, changes) in enumerate(zip(pasts, find_all(pasts), strict=True)):
        if regressions([_watched(past, changes)], {}, KnownIncidents({}, {}), len(past) * DAY_NS, Rules()):
            return delay
    return None


def _watched(values: list[float], changes: tuple[Change, ...]) -> WatchedSeries:
    points = tuple(Point(_night(number), value) for number, value in enumerate(values))
    return with_causes(WatchedSeries(Series(KEY, "1/s", "higher", judged=True, points=points)), changes)


def _night(number: int) -> Night:
    return Night(
        id=str(number), session=str(number), node_id="t", system=KEY.system, partition=KEY.partition,
        environment=KEY.environment, device_model="EPYC", fingerprint="", benchmark=KEY.benchmark, definition="w a=1",
        attempt=0, created_ns=(number + 1) * DAY_NS, verdict="passed", purpose="nightly", branch="main",
    )  # fmt: skip


if __name__ == "__main__":
    print(f"Measured {machine()}.\n\n{table(rows := run())}")
    sys.exit(any(row.ok is False for row in rows))
