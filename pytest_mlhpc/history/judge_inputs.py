"""What the judge takes from history: nights of the present baseline epoch, levels that nights have settled; and a session judged again from both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.history.events import Event, epoch_start, known_events
from pytest_mlhpc.history.series import LocalSource, Night, Point, Series, Source, day_of, feeds
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge.baseline_files import Entry, series_of
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.evidence import headline
from pytest_mlhpc.judge.judge import JudgeInputs, failure_of, judge
from pytest_mlhpc.judge.rules import corrected, settle
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, from_json
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import (
    GOOD,
    WORSE,
    Epoch,
    JudgedBy,
    Judgement,
    Record,
    SeriesKey,
    Verdict,
    excused,
    ratio,
    user_name,
)
from pytest_mlhpc.store.text import iso, minutes, nanoseconds

#: Events that an explanation names, at most.
_NOTED = 3
#: How far back a good run is looked for, in ns.
_LONG_AGO_NS = 180 * 86_400 * 10**9


class JudgeHistory:
    """One for each session; asked by one thread at a time.

    Args:
        state_dir: where events are noted, beside those of *source*.
        index: opens the local store's index; called when it is needed first.
        source: where figures come from instead. It is asked until it fails; from then on the local store is.
        tell: hears what went wrong; never the reason for which a benchmark fails.
    """

    def __init__(
        self, state_dir: Path, index: Callable[[], Index], source: Source | None, tell: Callable[[str], None]
    ) -> None:
        self._state_dir = state_dir
        self._index = index
        self._source = source
        self._tell = tell
        self._events: tuple[Event, ...] | None = None
        self._days: set[int] = set()
        #: Whether nights were asked for, and whether all of them came from *source*.
        self.was_asked, self.all_from_source = False, source is not None

    @property
    def night_count(self) -> int:
        """How many nights the judge was given, of all series together."""
        return len(self._days)

    def inputs(self, spec: JobSpec, epoch: Epoch, entries: Mapping[str, Entry], by: JudgedBy) -> JudgeInputs:
        """Return what the runs of *spec* in *epoch* are judged by: *entries*, and the nights of each metric.

        Raises:
            StoreError: the local store cannot be read.
        """
        nights = {
            metric: self.nights(
                series_of(spec, metric), epoch, since_ns,
                default_branch=by.default_branch, reference=_reference(by, entries.get(metric)),
            )
            for metric, since_ns in by.since_ns.items()
        }  # fmt: skip
        return JudgeInputs(entries, nights, by)

    def explaining(
        self, judgement: Judgement, inputs: JudgeInputs, spec: JobSpec, epoch: Epoch
    ) -> JudgeInputs:
        """Return *inputs* with what explains *judgement*: of a loss, the last good run and what people noted since.

        Of metrics without baseline, it is the newest epoch. Most verdicts need none, and *inputs* is returned as it is.

        Raises:
            StoreError: the local store cannot be read.
        """
        key, partition = series_of(spec, spec.judged[0]), spec.target.partition
        if judgement.verdict in WORSE:
            last_good = self.last_good(key, epoch)
            since_ns = last_good.created_ns if last_good else 0
            noted = self.noted(partition.system, partition.name, since_ns)
            if last_good or noted:
                inputs = replace(inputs, last_good=last_good, noted=tuple(noted))
        if not judgement.epoch and any(metric.baseline is None for metric in judgement.metrics):
            newest = self.newest(key)
            if newest is not None and changed(newest, epoch):
                inputs = replace(inputs, newest=newest)
        return inputs

    def nights(
        self,
        key: SeriesKey,
        epoch: Epoch,
        since_ns: int,
        *,
        default_branch: str = "main",
        reference: float | None = None,
    ) -> list[Attempts]:
        """Return the nights of *key* that feed the judge, oldest first, each with its re-runs.

        They are of *epoch*, and of the present baseline epoch (:meth:`since_ns`). With *reference*, figures of a machine that was slower then are corrected for it.

        Raises:
            StoreError: the local store cannot be read.
        """
        found = self._from_source(key, since_ns)
        if found is None:
            found = _one(LocalSource(self._state_dir, index=self._index()), key, since_ns)
            self.all_from_source = False
        self.was_asked = True
        fed = (point.night for point in found.points if feeds(point.night, default_branch))
        self._days |= {day_of(night.created_ns) for night in fed if night.epoch == epoch}
        return nights_of(found, epoch, default_branch, reference)

    def since_ns(self, key: SeriesKey, accepted: str) -> int:
        """Return when the present baseline epoch of *key* began: at *accepted*, the date of the baseline (ISO 8601), or with the newest event of the partition."""
        return epoch_start(self.events(), key.system, key.partition, nanoseconds(accepted), time.time_ns())

    def newest(self, key: SeriesKey) -> Epoch | None:
        """Return the epoch of the newest figure of *key*, or None where nothing was measured.

        Raises:
            StoreError: the local store cannot be read.
        """
        if (found := self._from_source(key, max(0, time.time_ns() - _LONG_AGO_NS))) is not None:
            return found.points[-1].night.epoch if found.points else None
        return self._index().newest_epoch(key)

    def last_good(self, key: SeriesKey, epoch: Epoch) -> Record | None:
        """Return the newest run of the benchmark of *key* in *epoch* that passed, or None.

        One that only InfluxDB knows has its environment, commit and nodes, but not how its steps were spent.

        Raises:
            StoreError: the local store cannot be read.
        """
        found = self._from_source(key, max(0, time.time_ns() - _LONG_AGO_NS))
        if found is None:
            return self._index().last_good(key, epoch)
        nights = (point.night for point in found.points if point.night.epoch == epoch)
        good = [night for night in nights if night.verdict in GOOD and not night.attempt]
        return _record_of(good[-1]) if good else None

    def _from_source(self, key: SeriesKey, since_ns: int) -> Series | None:
        """Return the series since then, without points where there is none; None where the local store is to be asked."""
        if self._source is None:
            return None
        try:
            return _one(self._source, key, since_ns)
        except MlhpcError as error:
            self._give_up_source(error)
            return None

    def _give_up_source(self, error: MlhpcError) -> None:
        self._tell(f"history is read from the local store, as InfluxDB failed: {error}")
        self.close()

    def noted(self, system: str, partition: str, since_ns: int) -> list[str]:
        """Return a line for each event of a partition since then, the newest few: people want to know before they look on."""
        lines = [
            f"noted on {minutes(event.at_ns)}: {event.text} (event {event.id})"
            for event in self.events()
            if event.concerns(system, partition) and since_ns < event.at_ns <= time.time_ns()
        ]
        return lines[-_NOTED:]

    def close(self) -> None:
        """Close the source of history if it was another than the local store."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
        self._source = None

    def events(self) -> Sequence[Event]:
        """Return all events, as they were when they were asked for first."""
        if self._events is None:
            self._events = self._known_events()
        return self._events

    def _known_events(self) -> tuple[Event, ...]:
        while True:
            try:
                return known_events(self._state_dir, self._source, self._tell)
            except MlhpcError as error:
                if self._source is None:
                    self._tell(str(error))
                    return ()
                self._give_up_source(error)


def nights_of(
    series: Series, epoch: Epoch, default_branch: str = "main", reference: float | None = None
) -> list[Attempts]:
    """Return what :meth:`JudgeHistory.nights` returns of a series. A machine that was busy says nothing about its night."""
    points = [point for point in series.points if point.night.epoch == epoch]

    def figure(point: Point) -> float:
        return excused(point.value, series.unit, ratio(point.night.calibration, reference))

    again: dict[str, list[float]] = {}
    for point in points:
        if point.night.attempt:
            again.setdefault(point.night.session, []).append(figure(point))
    return [
        Attempts(
            figure(point),
            tuple(again.get(point.night.session, ())),
            regressed=point.night.verdict == Verdict.REGRESSED.value,
        )
        for point in points
        if feeds(point.night, default_branch) and point.night.verdict != Verdict.INCONCLUSIVE.value
    ]


@dataclass(frozen=True)
class _RecordedTest:
    """A test as its record has it: :class:`pytest_mlhpc.judge.judge.JudgedTest`."""

    node_id: str
    judged: tuple[str, ...]
    definition: str
    references: Mapping[str, float]


@dataclass(frozen=True)
class Rejudged:
    """A first attempt that was judged again: ``verdict`` is the new one, ``differs`` says what is not as it was recorded."""

    record: Record
    verdict: str
    differs: tuple[str, ...]
    reruns_wanted: int = 0  #: more than were made


def rejudged(records: Sequence[Record], source: Source) -> Iterator[Rejudged]:
    """Judge each run of *records*, all of one session, again: from the records and *source*, and nothing else.

    Runs that broke, and tests that are not judged, are left out.

    Raises:
        StoreError: the history cannot be read.
        SchemaError: a record's baseline is damaged.
    """
    for first in sorted(records, key=lambda one: (one.created_ns, one.id)):
        if first.judged_by is not None and first.measurement is not None:
            again = [one for one in records if one.attempt and _same_run(one, first) and not one.failure]
            reruns = [
                one.measurement for one in sorted(again, key=lambda one: one.attempt) if one.measurement
            ]
            yield _rejudged(first, [first.measurement, *reruns], first.judged_by, source)


def _same_run(one: Record, first: Record) -> bool:
    return (one.session, one.node_id, one.series()) == (first.session, first.node_id, first.series())


def _rejudged(first: Record, attempts: Sequence[Measurement], by: JudgedBy, source: Source) -> Rejudged:
    entries = {metric: from_json(Entry, dict(entry)) for metric, entry in by.entries.items()}
    test = _RecordedTest(first.node_id, first.judged, first.definition, by.references)
    nights = {}
    for metric, since_ns in by.since_ns.items():
        known = _one(source, first.series(metric), since_ns, first.created_ns)
        others = tuple(point for point in known.points if point.night.session != first.session)
        reference = _reference(by, entries.get(metric))
        nights[metric] = nights_of(replace(known, points=others), first.epoch, by.default_branch, reference)
    judgement = judge(attempts, test, JudgeInputs(entries, nights, by))
    failure = failure_of(judgement)
    verdict = failure.outcome if failure else judgement.verdict.value
    differs = [f"verdict: recorded {first.verdict}, now {verdict}"] if verdict != first.verdict else []
    if judgement.reruns_wanted:
        differs.append(f"{judgement.reruns_wanted} more re-runs would be asked for")
    notable = [headline(one) for one in judgement.metrics if one.verdict is not Verdict.PASSED]
    differs += [f"now: {line}" for line in notable if line not in first.explanation]
    return Rejudged(first, verdict, tuple(differs), judgement.reruns_wanted)


def _reference(by: JudgedBy, entry: Entry | None) -> float | None:
    """Return the rate of the calibration kernel that figures of `local` are corrected to, where the baseline has it."""
    return entry.calibration if by.local and entry is not None else None


def _one(source: Source, key: SeriesKey, since_ns: int, until_ns: int | None = None) -> Series:
    found = source.series(since_ns, until_ns, system=key.system, benchmark=key.benchmark)
    return next((one for one in found if one.key == key), Series(key, "", "none", judged=False, points=()))


def _record_of(night: Night) -> Record:
    """Return as much of a night's record as explanations look at."""
    measurement = Measurement(
        run_id=night.id, nonce="", attempt=night.attempt, workload="", device_type="", device_model=night.device_model,
        nodes=night.nodes, ranks=0, devices=0, steps=0, samples=0, started_ns=night.created_ns, ended_ns=night.created_ns,
        metrics=(), environment=night.changes, calibration_before=night.calibration,
    )  # fmt: skip
    return Record(
        id=night.id, session=night.session, node_id=night.node_id, benchmark=night.benchmark, definition=night.definition,
        system=night.system, partition=night.partition, environment=night.environment, device_model=night.device_model, attempt=night.attempt,
        created_ns=night.created_ns, verdict=night.verdict, fingerprint=night.fingerprint, purpose=night.purpose,
        branch=night.branch, commit=night.commit, nodes=night.nodes, measurement=measurement,
    )  # fmt: skip


def settled_entries(
    source: Source, book: BaselineBook, events: Sequence[Event], *, default_branch: str, now_ns: int
) -> Iterator[tuple[SeriesKey, Entry]]:
    """Yield each series whose present epoch has no accepted baseline but settled nights, or a wrong one, with the entry to accept.

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
    judged_by = None if accepted is None or changed(accepted.epoch, epoch) else accepted
    accepted_ns = nanoseconds(judged_by.date) if judged_by else 0
    since_ns = epoch_start(events, key.system, key.partition, accepted_ns, now_ns)
    points = tuple(point for point in series.points if point.night.created_ns >= since_ns)
    nights = nights_of(replace(series, points=points), epoch, default_branch)
    if judged_by:
        return corrected(judged_by, nights) if judged_by.unit == series.unit else None
    metric = MetricValue(key.metric, series.points[-1].value, series.unit, series.better)
    return settle(nights, metric, epoch).entry
