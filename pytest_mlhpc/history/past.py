"""What the judge takes from history: figures of the present baseline epoch, from the local store or from InfluxDB."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.history.epochs import epoch_start
from pytest_mlhpc.history.events import Event, events
from pytest_mlhpc.history.series import Series, Source, feeds
from pytest_mlhpc.results.calibration import excused, ratio
from pytest_mlhpc.results.dates import minutes, nanoseconds
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import SeriesKey

#: Figures that a width is taken from, at most (``judge.fence.WINDOW``).
MOST = 30
#: Events that an explanation names, at most.
_NOTED = 3


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
        if self._source is not None:
            try:
                found = self._source.series(since_ns, system=key.system, benchmark=key.benchmark)
                series = next((one for one in found if one.key == key), None)
            except MlhpcError as error:
                self._tell(f"history is read from the local store, as InfluxDB failed: {error}")
                self._source = None
            else:
                return accepted_figures(series, default_branch, reference) if series else []
        return self._index().history(
            key, since_ns=since_ns, default_branch=default_branch, calibration_reference=reference, limit=MOST
        )

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
