"""Time to train at scales that were not run: training epochs times the time of one, joined on the batch. Pure.

After the paper of MLPerf HPC (MLHPC workshop at SC'21): T = T_staging + T_epoch x epochs + T_extra. Epochs to the target depend
on batch and optimizer and not on the machine; the time of a training epoch depends on machine, devices and batch. What was
measured is taken as it is; what was not comes from the lines of ``fit.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_mlhpc.mlperf import fit
from pytest_mlhpc.mlperf.points import Place, Point, order, place_of, training_of
from pytest_mlhpc.mlperf.trained import Trained

MEASURED, FITTED = "measured", "fitted"
#: Scales are predicted up to so many times the most devices measured: beyond, the model leaves too much out.
FURTHEST = 4


@dataclass(frozen=True)
class Prediction:
    """Seconds to train at *place*, and from what: each part was measured somewhere, or fitted."""

    place: Place
    seconds: float
    staging: float
    epochs: float
    epoch_s: float
    extra: float
    epochs_from: str
    epoch_from: str


@dataclass(frozen=True)
class HeldBack:
    """A measured time to train beside the one that all other scales predict (None: they do not)."""

    place: Place
    runs: int
    measured: float
    predicted: Prediction | None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, relative to what was measured; more than zero: it was too slow."""
        return None if self.predicted is None else self.predicted.seconds / self.measured - 1


@dataclass(frozen=True)
class Model:
    """All that predictions are made from."""

    runs: tuple[Trained, ...]
    points: tuple[Point, ...]

    def without(self, place: Place) -> Model:
        """Return it as if nothing had been measured at *place*."""
        return Model(
            tuple(run for run in self.runs if place_of(run) != place),
            tuple(point for point in self.points if point.place != place),
        )

    def predict(self, place: Place) -> Prediction | None:
        """Return the time to train at *place*; None where too little was measured."""
        epochs, epoch_s = self._epochs(place), self._epoch_s(place)
        near = [run for run in self._converged(place.training) if run.phases and run.epochs]
        here = [run for run in near if (at := place_of(run)) and at.machine == place.machine]
        if epochs is None or epoch_s is None or not here:
            return None
        staging = statistics.median(run.phases.staging for run in here if run.phases)
        extra = statistics.median(_extra(run, place.devices, epochs[0]) for run in here)
        seconds = staging + epochs[0] * epoch_s[0] + extra
        return Prediction(place, seconds, staging, epochs[0], epoch_s[0], extra, epochs[1], epoch_s[1])

    def _converged(self, training: str) -> list[Trained]:
        return [run for run in self.runs if run.reached and training_of(run.key) == training]

    def _epochs(self, place: Place) -> tuple[float, str] | None:
        """Return the training epochs that the batch needs, on whatever machine."""
        by_batch: dict[int, list[float]] = {}
        for run in self._converged(place.training):
            if run.epochs and run.global_batch:
                by_batch.setdefault(run.global_batch, []).append(run.epochs)
        if place.batch in by_batch:
            return statistics.median(by_batch[place.batch]), MEASURED
        found = fit.line([(float(batch), statistics.median(some)) for batch, some in by_batch.items()])
        return None if found is None else (float(math.ceil(found.at(place.batch))), FITTED)

    def _epoch_s(self, place: Place) -> tuple[float, str] | None:
        """Return the seconds of a training epoch at *place*."""
        counts = [run.train_samples for run in self._converged(place.training) if run.train_samples]
        if not counts:
            return None
        samples = statistics.median(counts)
        mine = [
            point
            for point in self.points
            if (point.place.training, point.place.machine) == (place.training, place.machine)
        ]
        for point in mine:
            if point.place == place:
                return samples / point.rate, MEASURED
        steps = [(point.place.batch / point.place.devices, point.place.batch / point.rate) for point in mine]
        found = fit.line(steps)
        if found is None:
            return None
        return samples / place.batch * found.at(place.batch / place.devices), FITTED


def _extra(run: Trained, devices: int, epochs: float) -> float:
    """Return the seconds beside staging and training that *epochs* on so many devices would take, as they took in *run*.

    Evaluations come as often, and their work is shared by all devices; what is neither does not shrink.
    """
    if run.phases is None or not run.epochs:
        return 0.0
    evaluation = run.phases.evaluation / run.epochs * epochs * run.devices / devices
    return evaluation + run.phases.other


def times(runs: Iterable[Trained]) -> dict[Place, list[float]]:
    """Return the times to train that were measured at each place, of runs that converged."""
    found: dict[Place, list[float]] = {}
    for run in runs:
        place = place_of(run)
        if run.reached and run.time_s and place is not None:
            found.setdefault(place, []).append(run.time_s)
    return found


def held_back(model: Model) -> tuple[HeldBack, ...]:
    """Return each measured place beside what all others predict for it."""
    measured = times(model.runs)
    return tuple(
        HeldBack(
            place,
            len(measured[place]),
            statistics.median(measured[place]),
            model.without(place).predict(place),
        )
        for place in sorted(measured, key=order)
    )


def predictions(model: Model, devices: Sequence[int] = ()) -> tuple[Prediction, ...]:
    """Return what is predicted at scales without a run: of *devices*, else of all measured and their doubles."""
    measured = times(model.runs)
    found = []
    for training, machine in sorted({(place.training, place.machine) for place in measured}):
        points = [
            one.place
            for one in model.points
            if (one.place.training, one.place.machine) == (training, machine)
        ]
        places = [place for place in measured if (place.training, place.machine) == (training, machine)]
        scales = devices or _scales([place.devices for place in (*points, *places)])
        batches = {place.batch for place in (*points, *places)} | {
            place.batch for place in measured if place.training == training
        }
        for batch in sorted(batches):
            for count in scales:
                place = Place(machine, training, count, batch)
                if place not in measured and not batch % count and (one := model.predict(place)) is not None:
                    found.append(one)
    return tuple(sorted(found, key=lambda one: order(one.place)))


def _scales(known: Sequence[int]) -> list[int]:
    found = set(known)
    most = max(found)
    return sorted(found | {most * factor for factor in range(2, FURTHEST + 1) if not factor & (factor - 1)})
