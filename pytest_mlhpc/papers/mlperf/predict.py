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

from pytest_mlhpc.papers.mlperf import fit
from pytest_mlhpc.papers.mlperf.points import Place, Point, learning_of, order, place_of
from pytest_mlhpc.papers.mlperf.trained import Trained

MEASURED, FITTED = "measured", "fitted"
#: Evaluations come after whole training epochs; what is nearer to one than this is one.
_WHOLE = 1e-6
#: So many times the most devices measured are predicted; beyond that, the model leaves too much out.
FURTHER = (2, 4)


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
class Known:
    """A run that reached its target, where, and what decides how it learns."""

    run: Trained
    place: Place
    learning: str


@dataclass(frozen=True)
class Model:
    """All that predictions are made from; :func:`model_of` makes it."""

    known: tuple[Known, ...]
    points: tuple[Point, ...]

    def without(self, place: Place) -> Model:
        """Return it as if nothing had been measured at *place*."""
        return Model(
            tuple(one for one in self.known if one.place != place),
            tuple(point for point in self.points if point.place != place),
        )

    def predict(self, place: Place) -> Prediction | None:
        """Return the time to train at *place*; None where too little was measured."""
        epochs, epoch_s = self._epochs(place), self._epoch_s(place)
        here = [one.run for one in self._alike(place) if one.place.machine == place.machine]
        whole = [(run, run.phases, run.epochs) for run in here if run.phases and run.epochs]
        if epochs is None or epoch_s is None or not whole:
            return None
        staging = statistics.median(phases.staging for _run, phases, _epochs in whole)
        extra = statistics.median(
            phases.evaluation / took * epochs[0] * run.devices / place.devices + phases.other
            for run, phases, took in whole
        )  # evaluations come as often, and all devices share their work; what is neither does not shrink
        seconds = staging + epochs[0] * epoch_s[0] + extra
        return Prediction(place, seconds, staging, epochs[0], epoch_s[0], extra, epochs[1], epoch_s[1])

    def _alike(self, place: Place) -> list[Known]:
        """Return the runs that need as many training epochs as one at *place* would at their batch."""
        wanted = learning_of(place.training)
        return [one for one in self.known if one.learning == wanted]

    def _epochs(self, place: Place) -> tuple[float, str] | None:
        """Return the training epochs that the batch needs, on whatever machine."""
        by_batch: dict[int, list[float]] = {}
        for one in self._alike(place):
            if one.run.epochs:
                by_batch.setdefault(one.place.batch, []).append(one.run.epochs)
        if place.batch in by_batch:
            return statistics.median(by_batch[place.batch]), MEASURED
        found = fit.line([(float(batch), statistics.median(some)) for batch, some in by_batch.items()])
        return None if found is None else (float(math.ceil(found.at(place.batch) - _WHOLE)), FITTED)

    def _epoch_s(self, place: Place) -> tuple[float, str] | None:
        """Return the seconds of a training epoch at *place*."""
        counts = [one.run.train_samples for one in self._alike(place) if one.run.train_samples]
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


def model_of(runs: Iterable[Trained], points: Iterable[Point]) -> Model:
    """Return what predictions can be made from; runs that did not reach their target tell no epochs."""
    known = [
        Known(run, place, learning_of(place.training))
        for run in runs
        if run.reached and (place := place_of(run)) is not None
    ]
    return Model(tuple(known), tuple(points))


def times(model: Model) -> dict[Place, list[float]]:
    """Return the times to train that were measured at each place."""
    found: dict[Place, list[float]] = {}
    for one in model.known:
        if one.run.time_s:
            found.setdefault(one.place, []).append(one.run.time_s)
    return found


def held_back(model: Model) -> tuple[HeldBack, ...]:
    """Return each measured place beside what all others predict for it."""
    measured = times(model)
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
    measured = times(model)
    batches: dict[str, set[int]] = {}
    for place in measured:
        batches.setdefault(learning_of(place.training), set()).add(place.batch)
    known: dict[tuple[str, str], set[Place]] = {(place.training, place.machine): set() for place in measured}
    for place in (*measured, *(point.place for point in model.points)):
        if (place.training, place.machine) in known:
            known[place.training, place.machine].add(place)
    found = []
    for (training, machine), places in known.items():
        wanted = devices or _scales([place.devices for place in places])
        for batch in batches[learning_of(training)] | {place.batch for place in places}:
            some = [Place(machine, training, count, batch) for count in wanted if not batch % count]
            found += [model.predict(place) for place in some if place not in measured]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: order(one.place)))


def _scales(known: Sequence[int]) -> list[int]:
    most = max(known)
    return sorted({*known, *(most * factor for factor in FURTHER)})
