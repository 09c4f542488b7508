"""From a record to a :class:`Night`, and from figures to a :class:`Series`: what every source has to do in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pytest_mlhpc.history.series import Night, Point, Series
from pytest_mlhpc.store.record import (
    Record,
    SeriesKey,
    calibration_rate,
    commit_of,
    environment_of,
    nodes_of,
    unfit_of,
)


class Figure(NamedTuple):
    """One metric of one night."""

    night: Night
    value: float
    unit: str
    better: str


def night_of(record: Record) -> Night:
    """Return *record* without its figures."""
    measurement = record.measurement
    return Night(
        id=record.id,
        session=record.session,
        node_id=record.node_id,
        system=record.system,
        partition=record.partition,
        environment=record.environment,
        device_model=record.device_model,
        fingerprint=record.fingerprint,
        benchmark=record.benchmark,
        definition=record.definition,
        attempt=record.attempt,
        created_ns=record.created_ns,
        verdict=record.verdict,
        purpose=record.purpose,
        branch=record.branch,
        commit=commit_of(record),
        failure=record.failure,
        nodes=nodes_of(record),
        unfit=unfit_of(record),
        node_hours=record.node_hours,
        judged=record.judged,
        changes=environment_of(record),
        calibration=calibration_rate(measurement) if measurement else None,
    )


def assemble(key: SeriesKey, figures: Iterable[Figure]) -> Series:
    """Return the series of *figures*, of which there is at least one, in any order.

    A record that is there twice (a store that was copied into another) counts once. Unit, direction and whether it is judged
    are the newest figure's; figures in another unit are of another time and left out.
    """
    once = {figure.night.id: figure for figure in figures}
    ordered = sorted(once.values(), key=lambda figure: (figure.night.created_ns, figure.night.id))
    newest = ordered[-1]
    points = tuple(Point(figure.night, figure.value) for figure in ordered if figure.unit == newest.unit)
    return Series(key, newest.unit, newest.better, key.metric in newest.night.judged, points)
