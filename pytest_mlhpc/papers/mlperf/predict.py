"""Time to train at scales that were not run: fits through measured points, predictions, weak and strong scaling."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.node.worker.workloads.fields import quality
from pytest_mlhpc.papers.mlperf import trained
from pytest_mlhpc.papers.mlperf.results import machine_of
from pytest_mlhpc.papers.mlperf.trained import TrainedRun
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.keys import Benchmark, benchmark_of
from pytest_mlhpc.store.record import Record

#: Fields by which runs of one training may differ: how large they are, what follows from the batch (the closed division
#: leaves learning rates free), and when they end.
FREE: Final = frozenset(
    {*keys.SCALE, *keys.LENGTH, "preset", "cache", "global_batch", "learning_rate", "seed"}
    | set(quality.FIELDS)
)
#: Fields that change how fast a machine computes and not how a model learns: epochs to a target are the same with any.
ALIKE: Final = frozenset(
    {
        "channels_last", "loader_workers", "tuning", "compile", "cuda_graphs", "fused_optimizer", "threads", "binding",
        "miopen_find", "parallel", "bucket_mb",
    }
)  # fmt: skip
RUN, WINDOW = "run", "window"
#: As many no machine has.
MOST_DEVICES: Final = 10_000_000


@dataclass(frozen=True)
class ScalePlace:
    """What a figure is of: a training on a machine, so many devices, a batch of so many samples."""

    machine: str
    training: str
    devices: int
    batch: int


@dataclass(frozen=True)
class ScaleFigure:
    """One figure of a place: the median of ``count`` runs, or windows of steps."""

    place: ScalePlace
    value: float
    count: int
    source: str


def training_of(benchmark: Benchmark) -> str:
    """Return what is trained, as canonical text; its whole definition where that is none of ours."""
    parsed = keys.parse(benchmark)
    if parsed is None:
        return benchmark.definition
    fields = {name: value for name, value in parsed.fields.items() if name not in FREE}
    return json.dumps([parsed.workload, sorted(fields.items())])


def learning_of(training: str) -> str:
    """Return what of *training* decides how many training epochs it needs."""
    try:
        workload, fields = json.loads(training)
        return json.dumps([workload, [[name, value] for name, value in fields if name not in ALIKE]])
    except (ValueError, TypeError):
        return training


def labels(trainings: Iterable[str]) -> dict[str, str]:
    """Return a name for each training: its workload, and the fields by which it differs from others of that workload."""
    made: dict[str, str] = {}
    known: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for training in dict.fromkeys(trainings):
        try:
            workload, fields = json.loads(training)
            known.setdefault(workload, []).append((training, dict(fields)))
        except (ValueError, TypeError):
            made[training] = training
    for workload, some in known.items():
        for training, fields in some:
            differing = [
                f"{name}={keys.shown(value)}"
                for name, value in sorted(fields.items())
                if any(other.get(name) != value for _text, other in some)
            ]
            made[training] = " ".join([workload, *differing])
    return made


def place_of(run: TrainedRun) -> ScalePlace | None:
    """Return what *run* is a figure of; None where it reported no scale."""
    if not 0 < run.devices < MOST_DEVICES or not run.global_batch:
        return None
    return ScalePlace(machine_of(run.key), training_of(run.benchmark), run.devices, run.global_batch)


def points(runs: Iterable[TrainedRun], windows: Iterable[Record]) -> tuple[ScaleFigure, ...]:
    """Return the samples per second of a training epoch, of all devices, at each place; where there are whole runs, windows of steps do not count."""
    some = (
        (place, rate, source) for place, rate, source in (*_of_runs(runs), *_of_windows(windows)) if rate > 0
    )
    return _medians(some)


def shares(runs: Iterable[TrainedRun], windows: Iterable[Record]) -> tuple[ScaleFigure, ...]:
    """Return likewise the share of a step that waits for communication, of places where it was measured."""
    found: list[tuple[ScalePlace, float, str]] = []
    for run in runs:
        place = place_of(run)
        if place is not None and run.communication is not None:
            found.append((place, run.communication, RUN))
    for record, place in _placed(windows):
        share = trained.communication_of(record.measurement) if record.measurement else None
        if share is not None:
            found.append((place, share, WINDOW))
    return _medians(found)


def _medians(some: Iterable[tuple[ScalePlace, float, str]]) -> tuple[ScaleFigure, ...]:
    found: dict[ScalePlace, dict[str, list[float]]] = {}
    for place, value, source in some:
        found.setdefault(place, {}).setdefault(source, []).append(value)
    made = []
    for place, sources in found.items():
        source = RUN if RUN in sources else WINDOW
        made.append(ScaleFigure(place, statistics.median(sources[source]), len(sources[source]), source))
    return tuple(sorted(made, key=lambda one: order(one.place)))


def order(place: ScalePlace) -> tuple[str, str, int, int]:
    """Return what places are sorted by."""
    return place.training, place.machine, place.batch, place.devices


def _of_runs(runs: Iterable[TrainedRun]) -> Iterator[tuple[ScalePlace, float, str]]:
    for run in runs:
        place, rate = place_of(run), run.samples_per_s
        if place is not None and rate is not None:
            yield place, rate, RUN


def _of_windows(windows: Iterable[Record]) -> Iterator[tuple[ScalePlace, float, str]]:
    for record, place in _placed(windows):
        metric = record.measurement.metric("effective_throughput") if record.measurement else None
        if metric is not None and metric.unit == "samples/s":
            yield place, metric.value, WINDOW


def _placed(windows: Iterable[Record]) -> Iterator[tuple[Record, ScalePlace]]:
    """Yield the windows of plain trainings, each with its place."""
    for record in windows:
        measurement, batch = record.measurement, trained.whole_number(record.parameters.get("global_batch"))
        if measurement is None or record.parameters.get("bagging"):
            continue
        if batch and 0 < measurement.devices < MOST_DEVICES:
            training = training_of(benchmark_of(record))
            yield record, ScalePlace(machine_of(record.series()), training, measurement.devices, batch)


def by_training(found: Sequence[ScaleFigure]) -> dict[tuple[str, str], list[ScaleFigure]]:
    """Return the points of each (training, machine)."""
    groups: dict[tuple[str, str], list[ScaleFigure]] = {}
    for point in found:
        groups.setdefault((point.place.training, point.place.machine), []).append(point)
    return groups


@dataclass(frozen=True)
class FittedLine:
    """``constant + slope * x``, both at least zero. ``low`` and ``high`` are the x between which it was fitted."""

    constant: float
    slope: float
    low: float
    high: float

    def at(self, x: float) -> float:
        """Return its value at *x*."""
        return self.constant + self.slope * x


def line(points: Sequence[tuple[float, float]]) -> FittedLine | None:
    """Return the line nearest to *points* (x, y), all positive; None where they have fewer than two x.

    Squares of relative errors are least, so that the fastest scale counts as much as the slowest.
    """
    xs = {x for x, _y in points}
    if len(xs) < 2 or any(x <= 0 or y <= 0 for x, y in points):
        return None
    weights = [1 / (y * y) for _x, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _y) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_x, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _y) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    constant = mean_y - slope * mean_x
    if slope < 0:
        constant, slope = mean_y, 0.0
    elif constant < 0:
        squares = sum(w * x * x for w, (x, _y) in zip(weights, points, strict=True))
        constant, slope = 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
    return FittedLine(constant, slope, min(xs), max(xs))


MEASURED, FITTED = "measured", "fitted"
#: Evaluations come after whole training epochs; what is nearer to one than this is one.
_WHOLE = 1e-6
#: So many times the most devices measured are predicted; beyond that, the model leaves too much out.
FURTHER = (2, 4)


@dataclass(frozen=True)
class Prediction:
    """Seconds to train at *place*, and from what: each part was measured somewhere, or fitted."""

    place: ScalePlace
    seconds: float
    staging: float
    epochs: float
    epoch_s: float
    extra: float
    epochs_from: str
    epoch_from: str


@dataclass(frozen=True)
class LeaveOneOut:
    """A measured time to train beside the one that all other scales predict (None: they do not)."""

    place: ScalePlace
    runs: int
    measured: float
    predicted: Prediction | None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, relative to what was measured; more than zero: it was too slow."""
        return None if self.predicted is None else self.predicted.seconds / self.measured - 1


@dataclass(frozen=True)
class KnownRun:
    """A run that reached its target, where, and what decides how it learns."""

    run: TrainedRun
    place: ScalePlace
    learning: str


@dataclass(frozen=True)
class PredictionModel:
    """All that predictions are made from; :func:`model_of` makes it."""

    known: tuple[KnownRun, ...]
    points: tuple[ScaleFigure, ...]

    def without(self, place: ScalePlace) -> PredictionModel:
        """Return it as if nothing had been measured at *place*."""
        return PredictionModel(
            tuple(one for one in self.known if one.place != place),
            tuple(point for point in self.points if point.place != place),
        )

    def predict(self, place: ScalePlace) -> Prediction | None:
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

    def _alike(self, place: ScalePlace) -> list[KnownRun]:
        """Return the runs that need as many training epochs as one at *place* would at their batch."""
        wanted = learning_of(place.training)
        return [one for one in self.known if one.learning == wanted]

    def _epochs(self, place: ScalePlace) -> tuple[float, str] | None:
        """Return the training epochs that the batch needs, on whatever machine."""
        by_batch: dict[int, list[float]] = {}
        for one in self._alike(place):
            if one.run.epochs:
                by_batch.setdefault(one.place.batch, []).append(one.run.epochs)
        if place.batch in by_batch:
            return statistics.median(by_batch[place.batch]), MEASURED
        found = line([(float(batch), statistics.median(some)) for batch, some in by_batch.items()])
        return None if found is None else (float(math.ceil(found.at(place.batch) - _WHOLE)), FITTED)

    def _epoch_s(self, place: ScalePlace) -> tuple[float, str] | None:
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
                return samples / point.value, MEASURED
        steps = [(point.place.batch / point.place.devices, point.place.batch / point.value) for point in mine]
        found = line(steps)
        if found is None:
            return None
        return samples / place.batch * found.at(place.batch / place.devices), FITTED


def model_of(runs: Iterable[TrainedRun], points: Iterable[ScaleFigure]) -> PredictionModel:
    """Return what predictions can be made from; runs that did not reach their target tell no epochs."""
    known = [
        KnownRun(run, place, learning_of(place.training))
        for run in runs
        if run.reached and (place := place_of(run)) is not None
    ]
    return PredictionModel(tuple(known), tuple(points))


def times(model: PredictionModel) -> dict[ScalePlace, list[float]]:
    """Return the times to train that were measured at each place."""
    found: dict[ScalePlace, list[float]] = {}
    for one in model.known:
        if one.run.time_s:
            found.setdefault(one.place, []).append(one.run.time_s)
    return found


def leave_one_out(model: PredictionModel) -> tuple[LeaveOneOut, ...]:
    """Return each measured place beside what all others predict for it."""
    measured = times(model)
    return tuple(
        LeaveOneOut(
            place,
            len(measured[place]),
            statistics.median(measured[place]),
            model.without(place).predict(place),
        )
        for place in sorted(measured, key=order)
    )


def predictions(model: PredictionModel, devices: Sequence[int] = ()) -> tuple[Prediction, ...]:
    """Return what is predicted at scales without a run: of *devices*, else of all measured and their doubles."""
    measured = times(model)
    batches: dict[str, set[int]] = {}
    for place in measured:
        batches.setdefault(learning_of(place.training), set()).add(place.batch)
    known: dict[tuple[str, str], set[ScalePlace]] = {
        (place.training, place.machine): set() for place in measured
    }
    for place in (*measured, *(point.place for point in model.points)):
        if (place.training, place.machine) in known:
            known[place.training, place.machine].add(place)
    found = []
    for (training, machine), places in known.items():
        wanted = devices or _scales([place.devices for place in places])
        for batch in batches[learning_of(training)] | {place.batch for place in places}:
            some = [ScalePlace(machine, training, count, batch) for count in wanted if not batch % count]
            found += [model.predict(place) for place in some if place not in measured]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: order(one.place)))


def _scales(known: Sequence[int]) -> list[int]:
    most = max(known)
    return sorted({*known, *(most * factor for factor in FURTHER)})


@dataclass(frozen=True)
class JoinedScale:
    """What epochs and epoch time make together at one place. ``measured``: seconds that whole runs took there."""

    predicted: Prediction
    measured: float | None


def joined(model: PredictionModel, devices: Sequence[int] = ()) -> dict[tuple[str, str], list[JoinedScale]]:
    """Return for each (training, machine) its places with runs and those that are predicted, batches in order.

    Training epochs belong to the batch, epoch time to batch and devices: at each place both are known, or fitted.
    """
    known = {place: statistics.median(some) for place, some in times(model).items()}
    made = [*(model.predict(place) for place in known), *predictions(model, devices)]
    found: dict[tuple[str, str], list[JoinedScale]] = {}
    for one in sorted((one for one in made if one is not None), key=lambda one: order(one.place)):
        key = (one.place.training, one.place.machine)
        found.setdefault(key, []).append(JoinedScale(one, known.get(one.place)))
    return found


STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class ScalingStep:
    """One number of devices. ``speedup`` is over the fewest."""

    point: ScaleFigure
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class ScalingCurve:
    """One training on one machine at one batch: ``batch`` is of all devices (strong) or of one (weak)."""

    kind: str
    training: str
    machine: str
    batch: float
    steps: tuple[ScalingStep, ...]


def curves(found: Sequence[ScaleFigure]) -> tuple[ScalingCurve, ...]:
    """Return all curves with two numbers of devices or more; strong ones first."""
    made = [curve for kind in (STRONG, WEAK) for curve in _of(kind, found)]
    return tuple(curve for curve in made if len(curve.steps) > 1)


def _of(kind: str, found: Sequence[ScaleFigure]) -> Iterator[ScalingCurve]:
    for (training, machine), points in by_training(found).items():
        batches: dict[float, list[ScaleFigure]] = {}
        for point in points:
            batch = point.place.batch / (point.place.devices if kind == WEAK else 1)
            batches.setdefault(batch, []).append(point)
        for batch in sorted(batches):
            yield ScalingCurve(kind, training, machine, batch, _steps(batches[batch]))


def _steps(some: Sequence[ScaleFigure]) -> tuple[ScalingStep, ...]:
    ordered = sorted(some, key=lambda one: one.place.devices)
    first = ordered[0]
    return tuple(
        ScalingStep(
            one, one.value / first.value, one.value / first.value * first.place.devices / one.place.devices
        )
        for one in ordered
    )
