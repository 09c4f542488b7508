"""One run that trained to a quality target, as its record tells it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.node.protocol.schema import Event, Measurement
from pytest_mlhpc.papers.mlperf import timeline
from pytest_mlhpc.papers.mlperf.limits import QUALITY, Quality
from pytest_mlhpc.papers.mlperf.timeline import Interval, TimelineError
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.record import INFRASTRUCTURE, Record, SeriesKey

#: The field of a training that asks for it, and its value.
UNTIL: Final = ("until", "quality")
#: How a run ends that did not converge: missed its target, ran out of time, diverged. All other failures are no run.
LOST: Final = frozenset({"target_missed", "time_limit", "loss_nan"})

#: Less is what sums of floating-point seconds are off by.
_SHORTEST_S: Final = 1e-6


@dataclass(frozen=True)
class Phases:
    """Where the time to train went, in seconds. ``other`` is all that the three phases do not hold."""

    staging: float
    training: float
    evaluation: float
    other: float


@dataclass(frozen=True)
class Trained:
    """What one run became. ``time_s`` is from ``run_start`` to ``run_stop``.

    ``epoch_s`` is the median training epoch without the evaluations in it, ``evaluation_s`` the median evaluation.
    ``curve`` has (training epoch, quality) of each evaluation. Where the target was not reached, ``reached`` is false.
    """

    record: str
    created_ns: int
    key: SeriesKey  #: metric empty
    definition: str
    workload: str
    parameters: Mapping[str, Any]
    preset: str
    verdict: str
    reached: bool
    devices: int = 0
    nodes: int = 0
    ranks: int = 0
    device_type: str = ""
    global_batch: int | None = None
    data_kind: str = ""
    cache: str = "unknown"
    init_s: float | None = None  #: before the clock starts
    time_s: float | None = None
    phases: Phases | None = None
    epochs: float | None = None
    epoch_s: float | None = None
    evaluation_s: float | None = None
    evaluations: int = 0
    train_samples: int | None = None
    eval_samples: int | None = None
    target: float | None = None
    curve: tuple[tuple[float | None, float], ...] = ()
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def benchmark(self) -> Benchmark:
        """What was run."""
        return Benchmark(self.key.benchmark, self.definition)

    @property
    def quality(self) -> float | None:
        """The last quality that was measured."""
        return self.curve[-1][1] if self.curve else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of a training epoch per second, of all devices together."""
        return self.train_samples / self.epoch_s if self.train_samples and self.epoch_s else None


def asked_for(record: Record) -> bool:
    """Return whether *record* is of a run to a quality target."""
    name, value = UNTIL
    return {**record.asked, **record.parameters}.get(name) == value


def trained(record: Record) -> Trained | str:
    """Return what *record* says of its run, or why it says nothing of how fast the machine trains.

    A run that ended without reaching its target counts: it did not converge. One that the machine or a defect ended does not.
    """
    workload = record.measurement.workload if record.measurement else record.definition.partition(" ")[0]
    if record.verdict in INFRASTRUCTURE or record.verdict in {"cancelled", "detached"}:
        return f"not the run's fault: {record.verdict}"
    common: dict[str, Any] = {
        "record": record.id,
        "created_ns": record.created_ns,
        "key": record.series(),
        "definition": record.definition,
        "workload": workload,
        "parameters": record.parameters,
        "preset": record.preset,
        "verdict": record.verdict,
    }
    if record.measurement is None:
        if record.verdict not in LOST:
            return f"broken: {record.verdict}"
        target = timeline.number(record.parameters.get("target"))
        return Trained(**common, reached=False, global_batch=_batch(record.parameters, ()), target=target)
    try:
        return Trained(**common, **_measured(record.measurement, record.parameters, QUALITY.get(workload)))
    except TimelineError as error:
        return f"its events contradict themselves: {error}"


def _measured(
    measurement: Measurement, parameters: Mapping[str, Any], quality: Quality | None
) -> dict[str, Any]:
    events = timeline.told(measurement)
    whole = timeline.intervals(events, "run")
    if len(whole) != 1:
        raise TimelineError(f"there are {len(whole)} run_start, not one")
    (run,) = whole
    training = timeline.intervals(events, "epoch")
    evaluations = timeline.intervals(events, "eval")
    staging = timeline.intervals(events, "staging")
    init = timeline.intervals(events, "init")
    curve = _curve(events, quality)
    target = timeline.number(timeline.first(events, "quality_target"))
    return {
        "devices": measurement.devices,
        "nodes": len(measurement.nodes),
        "ranks": measurement.ranks,
        "device_type": measurement.device_type,
        "data_kind": measurement.data_kind,
        "cache": measurement.cache,
        "events": events,
        "global_batch": _batch(parameters, events),
        "init_s": timeline.total(init) if init else None,
        "reached": _reached(events, curve, quality, target),
        "time_s": run.seconds,
        "phases": _phases(run, staging, training, evaluations),
        "epochs": _epochs(measurement, training),
        "epoch_s": _median([one.seconds - _overlap(one, evaluations) for one in training]),
        "evaluation_s": _median([one.seconds for one in evaluations]),
        "evaluations": len(evaluations),
        "train_samples": timeline.count(events, "train_samples"),
        "eval_samples": timeline.count(events, "eval_samples"),
        "target": target,
        "curve": curve,
    }


def _phases(
    run: Interval, staging: Sequence[Interval], training: Sequence[Interval], evaluations: Sequence[Interval]
) -> Phases:
    """Part the run's time; what lies before ``run_start``, as staging may since rules 3.0, is no part of it."""
    staged, evaluated = (sum(one.within(run) for one in some) for some in (staging, evaluations))
    inside = sum(_overlap(one, evaluations) for one in training)
    trained_s = sum(one.within(run) for one in training) - inside
    other = run.seconds - staged - trained_s - evaluated
    return Phases(staged, trained_s, evaluated, other if other > _SHORTEST_S else 0.0)


def _overlap(one: Interval, others: Sequence[Interval]) -> float:
    return sum(other.within(one) for other in others)


def _median(some: Sequence[float]) -> float | None:
    return statistics.median(some) if some else None


def _curve(events: Sequence[Event], quality: Quality | None) -> tuple[tuple[float | None, float], ...]:
    keys = {quality.key} if quality else {one.key for one in QUALITY.values()}
    return tuple(
        (timeline.number(event.metadata.get("epoch_num")), value)
        for event in events
        if event.key in keys and (value := timeline.number(event.value)) is not None
    )


def _reached(
    events: Sequence[Event],
    curve: Sequence[tuple[float | None, float]],
    quality: Quality | None,
    target: float | None,
) -> bool:
    """Return whether the run says so, and what it measured agrees."""
    stop = next((event for event in events if event.key == "run_stop"), None)
    if stop is None or stop.metadata.get("status") != "success":  # without a stop it ended in the middle
        return False
    wanted = target if target is not None else (quality.target if quality else None)
    if quality is None or wanted is None:
        return True
    return any(quality.reached(value, wanted) for _epoch, value in curve)


def _epochs(measurement: Measurement, training: Sequence[Interval]) -> float | None:
    metric = measurement.metric("epochs")
    if metric is not None:
        return metric.value
    return float(len(training)) if training else None


def _batch(parameters: Mapping[str, Any], events: Sequence[Event]) -> int | None:
    told = timeline.count(events, "global_batch_size")
    if told is not None:
        return told
    return timeline.whole(parameters.get("global_batch"))
