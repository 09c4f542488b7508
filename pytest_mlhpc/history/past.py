"""What the judge takes from history: figures of the present baseline epoch, from the local store or from InfluxDB."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.history.epochs import epoch_start
from pytest_mlhpc.history.events import Event, events
from pytest_mlhpc.history.series import Night, Series, Source, feeds
from pytest_mlhpc.results.calibration import excused, ratio
from pytest_mlhpc.results.dates import minutes, nanoseconds
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record, SeriesKey
from pytest_mlhpc.results.schema import Measurement

#: Figures that a width is taken from, at most (``judge.fence.WINDOW``).
MOST = 30
#: Events that an explanation names, at most.
_NOTED = 3
#: Verdicts of a good run (as :meth:`Index.last_good`), and how far back one is looked for, in ns.
GOOD = ("passed", "improved", "new")
_LONG_AGO_NS = 180 * 86_400 * 10**9


class Past:
    """One for each session; asked by one thread at a time.

    Args:
        state_dir: where events are noted.
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

    def figures(
        self, key: SeriesKey, accepted: str, *, default_branch: str = "main", reference: float | None = None
    ) -> list[float]:
        """Return the newest figures of *key* that feed the judge, oldest first.

        They are of the present baseline epoch: since *accepted*, the date of the baseline (ISO 8601), and since the newest
        event of the partition. With *reference*, figures of a machine that was slower then are corrected for it.

        Raises:
            StoreError: the local store cannot be read.
        """
        since_ns = epoch_start(
            self.events(), key.system, key.partition, nanoseconds(accepted), time.time_ns()
        )
        if (found := self._from_source(key, since_ns)) is not None:
            return accepted_figures(found, default_branch, reference) if found.points else []
        return self._index().history(
            key, since_ns=since_ns, default_branch=default_branch, calibration_reference=reference, limit=MOST
        )

    def last_good(self, key: SeriesKey) -> Record | None:
        """Return the newest run of the benchmark of *key* that passed, or None.

        One that only InfluxDB knows has its environment, commit and nodes, but not how its steps were spent.

        Raises:
            StoreError: the local store cannot be read.
        """
        found = self._from_source(key, max(0, time.time_ns() - _LONG_AGO_NS))
        if found is None:
            return self._index().last_good(key)
        good = [
            point.night for point in found.points if point.night.verdict in GOOD and not point.night.attempt
        ]
        return _record_of(good[-1]) if good else None

    def _from_source(self, key: SeriesKey, since_ns: int) -> Series | None:
        """Return the series since then, without points where there is none; None where the local store is to be asked."""
        if self._source is None:
            return None
        try:
            found = self._source.series(since_ns, system=key.system, benchmark=key.benchmark)
            return next(
                (one for one in found if one.key == key), Series(key, "", "none", judged=False, points=())
            )
        except MlhpcError as error:
            self._tell(f"history is read from the local store, as InfluxDB failed: {error}")
            self.close()
            return None

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
            try:
                self._events = events(self._state_dir, self._tell)
            except MlhpcError as error:
                self._tell(str(error))
                self._events = ()
        return self._events


def accepted_figures(
    series: Series, default_branch: str = "main", reference: float | None = None, limit: int = MOST
) -> list[float]:
    """Return what :meth:`Index.history` returns of the same records: the last *limit* figures of runs that passed."""
    points = [
        point
        for point in series.points
        if point.night.verdict == "passed" and feeds(point.night, default_branch)
    ]
    return [
        excused(point.value, series.unit, ratio(point.night.calibration, reference))
        for point in points[-limit:]
    ]


def _record_of(night: Night) -> Record:
    """Return as much of a night's record as explanations look at."""
    measurement = Measurement(
        run_id=night.id, nonce="", attempt=night.attempt, workload="", device_type="", device_model=night.device_model,
        nodes=night.nodes, ranks=0, devices=0, steps=0, samples=0, started_ns=night.created_ns, ended_ns=night.created_ns,
        metrics=(), environment=night.changes, calibration_before=night.calibration,
    )  # fmt: skip
    return Record(
        id=night.id, session=night.session, node_id=night.node_id, benchmark=night.benchmark, system=night.system,
        partition=night.partition, environment=night.environment, device_model=night.device_model, attempt=night.attempt,
        created_ns=night.created_ns, verdict=night.verdict, fingerprint=night.fingerprint, purpose=night.purpose,
        branch=night.branch, commit=night.commit, nodes=night.nodes, measurement=measurement,
    )  # fmt: skip
