"""History from the local store, through its index: nothing is read from the record files themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.history.series import Night, NightFigure, Series, assemble
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import AGAINST, SeriesKey
from pytest_mlhpc.store.store import FOREVER_NS

#: Nights are asked for in portions of this many: a few MB each.
_PORTION = 2000

_KEY = ("system", "partition", "environment", "fingerprint", "benchmark")
_TEXTS = ("session", "node_id", *_KEY, "device_model", "definition", "verdict", "purpose", "branch")
#: Comparisons of two sides are no part of any history.
_OF_NIGHTS = f"purpose != '{AGAINST}'"
_NIGHT = f"records.id, record_id, {', '.join(_TEXTS)}, attempt, created_ns, node_hours, calibration, commit_id, more, text"
_NIGHTS = f"SELECT {_NIGHT} FROM records LEFT JOIN texts ON texts.id = surroundings"  # noqa: S608 - constants of this module


class LocalSource:
    """A :class:`~pytest_mlhpc.history.series.Source`: the records of one state directory.

    Series come one benchmark after the other, so that no more than one benchmark's figures are in memory. What the store
    cannot make sense of is reported to *on_problem*, once for each index. An *index* that is given stays its owner's to close.
    """

    def __init__(
        self, state_dir: Path, on_problem: Callable[[str], None] | None = None, index: Index | None = None
    ) -> None:
        self._index = index or Index(state_dir, on_problem)
        self._environments: dict[str, Mapping[str, str]] = {}

    def close(self) -> None:
        """Close the index. Idempotent."""
        self._index.close()

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield all records made in [since_ns, until_ns), oldest first.

        Raises:
            StoreError: the record files cannot be read.
        """
        query = (
            f"{_NIGHTS} WHERE (created_ns, record_id) > (:after, :name) AND created_ns < :until AND {_OF_NIGHTS}"
            " ORDER BY created_ns, record_id, records.id LIMIT :most"
        )
        after, name = since_ns - 1, "\U0010ffff"  # sorts after every id
        while rows := self._index.ask(
            query, {"after": after, "name": name, "until": _until(until_ns), "most": _PORTION}, since_ns
        ):
            for row in rows:
                night = self._night(row)
                if (night.created_ns, night.id) != (after, name):  # else its second copy
                    yield night
                after, name = night.created_ns, night.id

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield every series with a figure in [since_ns, until_ns), by key, of one system or benchmark where given.

        Raises:
            StoreError: the record files cannot be read.
        """
        window = {"since": since_ns, "until": _until(until_ns)}
        query = (
            f"SELECT DISTINCT {', '.join(_KEY)} FROM records WHERE created_ns >= :since AND created_ns < :until AND {_OF_NIGHTS}"  # noqa: S608 - constants of this module
            " AND (:system = '' OR system = :system) AND (:benchmark = '' OR benchmark = :benchmark)"
            f" ORDER BY {', '.join(_KEY)}"
        )
        values = {**window, "system": system, "benchmark": benchmark}
        for row in self._index.ask(query, values, since_ns, benchmark=benchmark):
            yield from self._of_benchmark({**window, **dict(zip(_KEY, row, strict=True))})

    def _of_benchmark(self, values: dict[str, Any]) -> Iterator[Series]:
        same = " AND ".join(f"{name} = :{name}" for name in _KEY)
        which = f"WHERE {same} AND created_ns >= :since AND created_ns < :until AND {_OF_NIGHTS}"
        of_points = f"SELECT metric, record, value, unit, better FROM records JOIN points ON record = id {which} ORDER BY metric"  # noqa: S608 - constants of this module
        rows, points = self._index.ask_at_once(
            [f"{_NIGHTS} {which}", of_points], values, values["since"], benchmark=values["benchmark"]
        )
        nights = {row[0]: self._night(row) for row in rows}
        metrics: dict[str, list[NightFigure]] = {}
        for metric, row, value, unit, better in points:
            metrics.setdefault(metric, []).append(NightFigure(nights[row], value, unit, better))
        for metric, figures in metrics.items():
            yield assemble(SeriesKey(**{name: values[name] for name in _KEY}, metric=metric), figures)

    def _night(self, row: tuple[Any, ...]) -> Night:
        _row, record_id, *texts, attempt, created_ns, node_hours, calibration, commit, more, text = row
        rest = json.loads(more)
        return Night(
            id=record_id,
            **dict(zip(_TEXTS, texts, strict=True)),
            attempt=attempt,
            created_ns=created_ns,
            node_hours=node_hours,
            calibration=calibration,
            commit=commit,
            failure=rest.get("failure", ""),
            nodes=tuple(rest.get("nodes", ())),
            unfit=rest.get("unfit", {}),
            judged=tuple(rest.get("judged", ())),
            changes=self._environment(text or "{}"),
            owner=rest.get("owner", ""),
            partition_owner=rest.get("partition_owner", ""),
            job_id=rest.get("job_id", ""),
            pipeline=rest.get("pipeline", ""),
        )

    def _environment(self, text: str) -> Mapping[str, str]:
        """Thousands of nights share one environment."""
        if text not in self._environments:
            self._environments[text] = json.loads(text)
        return self._environments[text]


def _until(until_ns: int | None) -> int:
    return FOREVER_NS if until_ns is None else until_ns
