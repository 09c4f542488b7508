"""The levels that nights have settled and nobody has accepted yet: what ``mlhpc baseline propose`` writes for git."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_mlhpc.history.epochs import epoch_start
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.past import nights_of
from pytest_mlhpc.history.series import Series, Source
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.settling import settle
from pytest_mlhpc.node.protocol.schema import Metric
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.record import SeriesKey, user_name
from pytest_mlhpc.store.text import iso


def settled_entries(
    source: Source, book: BaselineBook, events: Sequence[Event], *, default_branch: str, now_ns: int
) -> Iterator[tuple[SeriesKey, Entry]]:
    """Yield each series whose present epoch has no accepted baseline but settled nights, with the entry to accept.

    Series of `local` are left out: there the first run makes a provisional baseline.

    Raises:
        StoreError: the history cannot be read.
        ConfigError: a baseline file is damaged.
    """
    for series in source.series():
        if series.key.fingerprint or not series.judged or series.better == "none" or not series.points:
            continue
        entry = _settled(series, book, events, default_branch, now_ns)
        if entry is not None:
            yield series.key, replace(entry, accepted_by=user_name(), date=iso(now_ns))


def _settled(
    series: Series, book: BaselineBook, events: Sequence[Event], default_branch: str, now_ns: int
) -> Entry | None:
    key, epoch = series.key, series.points[-1].night.epoch
    accepted = book.lookup(key, epoch, provisional=False)
    if accepted is not None and not changed(accepted.epoch, epoch):
        return None
    since_ns = epoch_start(events, key.system, key.partition, 0, now_ns)
    points = tuple(point for point in series.points if point.night.created_ns >= since_ns)
    nights = nights_of(replace(series, points=points), epoch, default_branch)
    metric = Metric(key.metric, series.points[-1].value, series.unit, series.better)
    return settle(nights, metric, epoch).entry
