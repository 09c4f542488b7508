"""What a change did to benchmarks, as plain data: made where records are, rendered where a token is.

The two are different jobs. What comes from the first was made by the code of the change, which may be anybody's, so the
second takes figures and names, never text that GitLab would obey.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.node.protocol.schema import SCHEMA
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.record import Epoch, Record, SeriesKey

#: Nights of the default branch whose median a change is compared with.
NIGHTS = 5


@dataclass(frozen=True)
class Row:
    """One judged metric of one benchmark. ``change`` and ``nightly_change`` are shares, positive when better."""

    test: str
    metric: str
    unit: str
    verdict: str
    value: float
    accepted: float | None = None
    change: float | None = None
    nightly: float | None = None  #: median of the last nights of the default branch
    nightly_change: float | None = None
    nights: int = 0


@dataclass(frozen=True)
class Trouble:
    """A benchmark that did not pass, in the judge's words or those of its failure."""

    test: str
    verdict: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All that was measured of one commit on one system. ``verdicts`` counts tests."""

    system: str
    commit: str
    rows: tuple[Row, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    verdicts: Mapping[str, int] = field(default_factory=dict)
    schema: int = SCHEMA


def compare(
    records: Iterable[Record],
    accepted: Callable[[SeriesKey, Epoch], Entry | None],
    nights: Callable[[SeriesKey, Epoch, int], Sequence[float]],
) -> list[Comparison]:
    """Return one comparison for each system and commit of *records*.

    Args:
        records: First attempts, each benchmark once for each commit.
        accepted: Finds the accepted value of a series.
        nights: Finds so many last figures of a series and an epoch in nights of the default branch.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.system, record.commit), []).append(record)
    found = []
    for (system, commit), members in sorted(groups.items()):
        verdicts: dict[str, int] = {}
        for one in members:
            verdicts[one.verdict] = verdicts.get(one.verdict, 0) + 1
        rows = [row for one in members for row in _rows(one, accepted, nights)]
        troubles = [_trouble(one) for one in members if one.verdict not in {"passed", "unjudged"}]
        found.append(Comparison(system, commit, tuple(rows), tuple(troubles), verdicts))
    return found


def _rows(
    record: Record,
    accepted: Callable[[SeriesKey, Epoch], Entry | None],
    nights: Callable[[SeriesKey, Epoch, int], Sequence[float]],
) -> Iterable[Row]:
    for name in record.judged:
        metric = record.measurement.metric(name) if record.measurement else None
        if metric is None:
            continue
        key = record.series(name)
        entry, last = accepted(key, record.epoch), nights(key, record.epoch, NIGHTS)
        if entry is not None and changed(entry.epoch, record.epoch):
            entry = None
        middle = statistics.median(last) if last else None
        yield Row(
            test=record.node_id,
            metric=name,
            unit=metric.unit,
            verdict=record.verdict,
            value=metric.value,
            accepted=entry.value if entry else None,
            change=_better_by(metric.value, entry.value if entry else None, metric.better),
            nightly=middle,
            nightly_change=_better_by(metric.value, middle, metric.better),
            nights=len(last),
        )


def _better_by(value: float, reference: float | None, better: str) -> float | None:
    return None if not reference or better == "none" else -drop(value, reference, better)


def _trouble(record: Record) -> Trouble:
    lines = record.explanation or tuple(record.failure.splitlines())
    return Trouble(record.node_id, record.verdict, lines[:20])
