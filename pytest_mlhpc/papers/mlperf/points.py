"""How fast a training goes at each scale that was measured, from runs to a target and from windows of steps. Pure.

Two runs are of one *training* where they differ in nothing but scale, batch, and what the rules leave free with the batch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.node.worker.workloads.fields import quality
from pytest_mlhpc.papers.mlperf import timeline
from pytest_mlhpc.papers.mlperf.groups import machine_of
from pytest_mlhpc.papers.mlperf.trained import Trained
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
class Place:
    """What a figure is of: a training on a machine, so many devices, a batch of so many samples."""

    machine: str
    training: str
    devices: int
    batch: int


@dataclass(frozen=True)
class Point:
    """Samples per second of a training epoch, of all devices together: the median of so many runs or windows."""

    place: Place
    rate: float
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


def place_of(run: Trained) -> Place | None:
    """Return what *run* is a figure of; None where it told no scale."""
    if not 0 < run.devices < MOST_DEVICES or not run.global_batch:
        return None
    return Place(machine_of(run.key), training_of(run.benchmark), run.devices, run.global_batch)


def points(runs: Iterable[Trained], windows: Iterable[Record]) -> tuple[Point, ...]:
    """Return one point for each place; where there are whole runs, windows of steps do not count."""
    found: dict[Place, dict[str, list[float]]] = {}
    for place, rate, source in (*_of_runs(runs), *_of_windows(windows)):
        if rate > 0:
            found.setdefault(place, {}).setdefault(source, []).append(rate)
    made = []
    for place, sources in found.items():
        source = RUN if RUN in sources else WINDOW
        made.append(Point(place, statistics.median(sources[source]), len(sources[source]), source))
    return tuple(sorted(made, key=lambda one: order(one.place)))


def order(place: Place) -> tuple[str, str, int, int]:
    """Return what places are sorted by."""
    return place.training, place.machine, place.batch, place.devices


def _of_runs(runs: Iterable[Trained]) -> Iterator[tuple[Place, float, str]]:
    for run in runs:
        place, rate = place_of(run), run.samples_per_s
        if place is not None and rate is not None:
            yield place, rate, RUN


def _of_windows(windows: Iterable[Record]) -> Iterator[tuple[Place, float, str]]:
    for record in windows:
        measurement, batch = record.measurement, timeline.whole(record.parameters.get("global_batch"))
        metric = measurement.metric("effective_throughput") if measurement else None
        if (
            measurement is None
            or metric is None
            or metric.unit != "samples/s"
            or record.parameters.get("bagging")
        ):
            continue
        if not batch or not 0 < measurement.devices < MOST_DEVICES:
            continue
        training = training_of(benchmark_of(record))
        yield Place(machine_of(record.series()), training, measurement.devices, batch), metric.value, WINDOW


def by_training(found: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of each (training, machine)."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        groups.setdefault((point.place.training, point.place.machine), []).append(point)
    return groups
