"""Runs that trained to a quality target: read from the store, with what their events say and what MLPerf demands of each workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.node.protocol.schema import Measurement, RunEvent
from pytest_mlhpc.papers.throughput import DATA
from pytest_mlhpc.report.figures import ACCEPTED
from pytest_mlhpc.report.keys import Benchmark, benchmark_of
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import INFRASTRUCTURE, Record, SeriesKey

START, STOP = "_start", "_stop"
_NS = 1e9
#: More than this no counter holds, and no figure is.
_MOST = 2**63
_LARGEST = 1e300


class TimelineError(ValueError):
    """Events contradict themselves; the text says how."""


@dataclass(frozen=True)
class RunInterval:
    """From a start to its stop, ns UTC; ``number`` is the training epoch (``epoch_num``) where it is reported."""

    start_ns: int
    stop_ns: int
    number: float | None = None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.stop_ns - self.start_ns) / _NS

    def within(self, other: RunInterval) -> float:
        """Return the seconds of it that lie in *other*."""
        return max(0, min(self.stop_ns, other.stop_ns) - max(self.start_ns, other.start_ns)) / _NS


def events_of(measurement: Measurement) -> tuple[RunEvent, ...]:
    """Return the events of the lowest rank that reported any, by time; those of one time stay in their order.

    Raises:
        TimelineError: one is at no time that a clock tells.
    """
    for report in sorted(measurement.per_rank, key=lambda one: one.rank):
        if report.events:
            if not all(0 <= event.time_ns < _MOST for event in report.events):
                raise TimelineError("an event has an impossible time")
            return tuple(sorted(report.events, key=lambda event: event.time_ns))
    return ()


def values(events: Sequence[RunEvent], key: str) -> list[Any]:
    """Return all values of *key*, in order."""
    return [event.value for event in events if event.key == key]


def first(events: Sequence[RunEvent], key: str) -> Any:
    """Return the first value of *key*, None where there is none."""
    return next(iter(values(events, key)), None)


def last(events: Sequence[RunEvent], key: str) -> Any:
    """Return the last value of *key*, None where there is none."""
    return next(iter(reversed(values(events, key))), None)


def count(events: Sequence[RunEvent], key: str) -> int | None:
    """Return the value of *key* as a whole number, None where it is none."""
    return whole_number(first(events, key))


def whole_number(value: Any) -> int | None:
    """Return *value* as a whole number from 0 on that any machine can count to, None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None


def number(value: Any) -> float | None:
    """Return *value* as a finite figure, None where it is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) >= _LARGEST:
        return None
    return float(value) if value == value else None  # noqa: PLR0124 - not so of NaN


def intervals(events: Sequence[RunEvent], phase: str) -> list[RunInterval]:
    """Return the phases called *phase*, in order. The last one may lack its stop: the run ended in it, then so did the phase.

    Raises:
        TimelineError: a phase stops that has not started, or starts twice.
    """
    found: list[RunInterval] = []
    begun: RunEvent | None = None
    for event in events:
        if event.key == phase + START:
            if begun is not None:
                raise TimelineError(f"{phase}_start twice without {phase}_stop between them")
            begun = event
        elif event.key == phase + STOP:
            if begun is None:
                raise TimelineError(f"{phase}_stop without {phase}_start")
            found.append(RunInterval(begun.time_ns, event.time_ns, _epoch(begun, event)))
            begun = None
    if begun is not None:
        end = next((event.time_ns for event in events if event.key == "run_stop"), events[-1].time_ns)
        found.append(RunInterval(begun.time_ns, max(begun.time_ns, end), _epoch(begun)))
    return found


def _epoch(*events: RunEvent) -> float | None:
    return next((at for event in events if (at := number(event.metadata.get("epoch_num"))) is not None), None)


def total(some: Sequence[RunInterval]) -> float:
    """Return the seconds of all together."""
    return sum(one.seconds for one in some)


#: Of the logs; the newest rules of MLPerf HPC.
USAGE: Final = "hpc"
RULESET: Final = "3.0.0"
#: Seconds from ``init_start`` to ``init_stop`` (hpc_3.0.0/common.yaml).
LONGEST_INIT_S: Final = 30 * 60.0


@dataclass(frozen=True)
class Quality:
    """How well a model must do. ``key`` is that of the logs' lines; ``runs`` are repeated and averaged (None: no rule)."""

    key: str
    target: float
    lower: bool  #: less is better
    name: str
    runs: int | None = None

    def reached(self, value: float, target: float | None = None) -> bool:
        """Return whether *value* is as good as the target, or as another one."""
        wanted = self.target if target is None else target
        return value <= wanted if self.lower else value >= wanted

    def as_strict(self, target: float) -> bool:
        """Return whether a run that was to reach *target* had to do at least as well as the rules demand."""
        return self.reached(target)


#: ResNet-50: MLPerf Training up to v4.0. Language model: Llama 3.1 8B of MLPerf Training v5.1, its log perplexity.
QUALITY: Final[Mapping[str, Quality]] = {
    "cosmoflow": Quality("eval_error", 0.124, lower=True, name="mean absolute error", runs=10),
    "deepcam": Quality("eval_accuracy", 0.82, lower=False, name="mean intersection over union", runs=5),
    "resnet50": Quality("eval_accuracy", 0.759, lower=False, name="top-1 accuracy", runs=5),
    "language_model": Quality("eval_error", 3.3, lower=True, name="log perplexity"),
}


@dataclass(frozen=True)
class ClosedDivision:
    """What the closed division of MLPerf HPC demands. ``values``: key of a log line -> what it must be."""

    train_samples: int
    eval_samples: int
    model: Mapping[str, str]
    optimizers: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    positive: tuple[str, ...] = ()  #: keys of log lines whose value must be more than zero


#: The benchmarks of MLPerf HPC that are workloads of ours.
CLOSED: Final[Mapping[str, ClosedDivision]] = {
    "cosmoflow": ClosedDivision(
        524_288, 65_536, DATA["models"]["cosmoflow"], ("sgd",),
        values={"opt_momentum": 0.9},
    ),
    "deepcam": ClosedDivision(
        121_266, 15_158, DATA["models"]["deepcam"], ("adam", "adamw", "lamb"),
        values={"opt_eps": 1e-6, "opt_max_grad_norm": 1.0}, positive=("seed", "batchnorm_group_size"),
    ),
}  # fmt: skip


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
class TrainedRun:
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
    events: tuple[RunEvent, ...] = field(default=(), repr=False)
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)  #: the fields of the test
    options: tuple[str, ...] = ()  #: of pytest
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    device_model: str = ""
    communication: float | None = None  #: share of a step that waits for other ranks

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


def trained(record: Record) -> TrainedRun | str:
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
        "asked": record.asked,
        "options": record.options,
        "verdict": record.verdict,
    }
    if record.measurement is None:
        if record.verdict not in LOST:
            return f"broken: {record.verdict}"
        target = number(record.parameters.get("target"))
        return TrainedRun(**common, reached=False, global_batch=_batch(record.parameters, ()), target=target)
    try:
        return TrainedRun(**common, **_measured(record.measurement, record.parameters, QUALITY.get(workload)))
    except TimelineError as error:
        return f"its events contradict themselves: {error}"


def _measured(
    measurement: Measurement, parameters: Mapping[str, Any], quality: Quality | None
) -> dict[str, Any]:
    events = events_of(measurement)
    whole = intervals(events, "run")
    if len(whole) != 1:
        raise TimelineError(f"there are {len(whole)} run_start, not one")
    (run,) = whole
    training = intervals(events, "epoch")
    evaluations = intervals(events, "eval")
    staging = intervals(events, "staging")
    init = intervals(events, "init")
    curve = _curve(events, quality)
    target = number(first(events, "quality_target"))
    return {
        "devices": measurement.devices,
        "nodes": len(measurement.nodes),
        "ranks": measurement.ranks,
        "device_type": measurement.device_type,
        "device_model": measurement.device_model,
        "environment": measurement.environment,
        "communication": communication_of(measurement),
        "data_kind": measurement.data_kind,
        "cache": measurement.cache,
        "events": events,
        "global_batch": _batch(parameters, events),
        "init_s": total(init) if init else None,
        "reached": _reached(events, curve, quality, target),
        "time_s": run.seconds,
        "phases": _phases(run, staging, training, evaluations),
        "epochs": _epochs(measurement, training),
        "epoch_s": _median([one.seconds - _overlap(one, evaluations) for one in training]),
        "evaluation_s": _median([one.seconds for one in evaluations]),
        "evaluations": len(evaluations),
        "train_samples": count(events, "train_samples"),
        "eval_samples": count(events, "eval_samples"),
        "target": target,
        "curve": curve,
    }


def communication_of(measurement: Measurement) -> float | None:
    """Return the share of a median step in which computing waits for other ranks, 1 at most; None where it was not measured."""
    exposed, step = measurement.metric("exposed_communication_time"), measurement.metric("step_time")
    if exposed is None or step is None or not (step.value > 0 and exposed.value >= 0):
        return None
    return min(exposed.value / step.value, 1.0)


def _phases(
    run: RunInterval,
    staging: Sequence[RunInterval],
    training: Sequence[RunInterval],
    evaluations: Sequence[RunInterval],
) -> Phases:
    """Part the run's time; what lies before ``run_start``, as staging may since rules 3.0, is no part of it."""
    staged, evaluated = (sum(one.within(run) for one in some) for some in (staging, evaluations))
    inside = sum(_overlap(one, evaluations) for one in training)
    trained_s = sum(one.within(run) for one in training) - inside
    other = run.seconds - staged - trained_s - evaluated
    return Phases(staged, trained_s, evaluated, other if other > _SHORTEST_S else 0.0)


def _overlap(one: RunInterval, others: Sequence[RunInterval]) -> float:
    return sum(other.within(one) for other in others)


def _median(some: Sequence[float]) -> float | None:
    return statistics.median(some) if some else None


def _curve(events: Sequence[RunEvent], quality: Quality | None) -> tuple[tuple[float | None, float], ...]:
    keys = {quality.key} if quality else {one.key for one in QUALITY.values()}
    return tuple(
        (number(event.metadata.get("epoch_num")), value)
        for event in events
        if event.key in keys and (value := number(event.value)) is not None
    )


def _reached(
    events: Sequence[RunEvent],
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


def _epochs(measurement: Measurement, training: Sequence[RunInterval]) -> float | None:
    metric = measurement.metric("epochs")
    if metric is not None:
        return metric.value
    return float(len(training)) if training else None


def _batch(parameters: Mapping[str, Any], events: Sequence[RunEvent]) -> int | None:
    batch_size = count(events, "global_batch_size")
    if batch_size is not None:
        return batch_size
    return whole_number(parameters.get("global_batch"))


@dataclass(frozen=True)
class FoundRuns:
    """What is recorded. ``runs`` are oldest first; ``windows`` accepted records of other trainings; ``left_out`` says of whom and why."""

    runs: tuple[TrainedRun, ...]
    windows: tuple[Record, ...]
    left_out: tuple[str, ...] = ()


def find(
    state_dir: Path,
    since_ns: int,
    tell: Callable[[str], None],
    *,
    system: str = "",
    holds: Sequence[str] = (),
) -> FoundRuns:
    """Return what was recorded since then, of *system* where it is given, and of benchmarks that hold all of *holds*.

    First attempts only: whoever counted re-runs too could choose.

    Raises:
        StoreError: the record files cannot be read.
    """
    if not (state_dir / "records").is_dir():  # else an index would be made where nobody wants one
        return FoundRuns((), ())
    index = Index(state_dir, tell)
    try:
        records = index.since(since_ns)
    finally:
        index.close()
    wanted = [
        record
        for record in reversed(records)
        if record.attempt == 0
        and (not system or record.system == system)
        and all(benchmark_of(record).holds(text) for text in holds)
    ]
    return sort_out(wanted)


def sort_out(records: Iterable[Record]) -> FoundRuns:
    """Part *records* (oldest first) in runs to a quality target, windows, and what is neither. A second copy counts once."""
    runs: dict[str, TrainedRun] = {}
    windows: dict[str, Record] = {}
    left_out: dict[str, str] = {}
    for record in records:
        if not asked_for(record):
            if record.measurement is not None and record.verdict in ACCEPTED and neutral(record.overrides):
                windows[record.id] = record
            continue
        if not neutral(record.overrides):
            left_out[record.id] = "made with --mlhpc-set"
            continue
        found = trained(record)
        if isinstance(found, str):
            left_out[record.id] = found
        else:
            runs[record.id] = found
    return FoundRuns(
        tuple(runs.values()),
        tuple(windows.values()),
        tuple(f"{name}: {why}" for name, why in left_out.items()),
    )
