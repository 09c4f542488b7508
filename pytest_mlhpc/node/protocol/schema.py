"""The closed schema of what a run measured, and its strict JSON form."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Tuple, Type, TypeVar


@dataclass(frozen=True)
class Rate:
    """A metric that is an amount over a time, such as ``write_bandwidth`` in ``B/s``.

    ``amount`` is what one repetition did, in the unit without ``/s``: of this rank, to be added up, or, where ``together``
    is set, of all ranks, who then all name the same. ``tolerance``: see :class:`pytest_mlhpc.node.protocol.schema.MetricValue`.
    """

    metric: str
    unit: str
    amount: float
    together: bool = False
    tolerance: Optional[float] = None


@dataclass(frozen=True)
class TimedOperation:
    """One operation: how long each repetition took on this rank, in seconds, and the metrics that this makes.

    ``times`` are names of metrics that are the time itself. ``ranks`` time it (empty: all).
    """

    name: str
    seconds: Tuple[float, ...] = ()
    rates: Tuple[Rate, ...] = ()
    times: Tuple[str, ...] = ()
    ranks: Tuple[int, ...] = ()
    tolerance: Optional[float] = None  #: of the times


#: Version of every JSON object defined here. Readers take older ones and refuse newer ones by name.
SCHEMA = 2

#: Base units; anything else is refused. ``1`` is a ratio or a count without a unit.
UNITS = (
    "1", "s", "B", "B/s", "FLOP", "FLOP/s", "J", "W", "Hz", "K",
    "samples", "samples/s", "samples/J", "items", "items/s", "tokens", "tokens/s",
)  # fmt: skip

#: Which direction of a metric is an improvement. ``none``: it is never judged.
BETTER = ("higher", "lower", "none")

#: How the samples of a program's metric become its value.
REDUCE = ("median", "min", "max", "first", "last", "sum", "mean")

#: What a metric may be called.
METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")

#: ``Optional[X]``, and ``X | None`` as the controller's dataclasses spell it (Python >= 3.10).
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))

T = TypeVar("T")


class SchemaError(ValueError):
    """A JSON object is not what the schema says; the text names the field and what was wrong."""


class NewerSchemaError(SchemaError):
    """A JSON object was written by a newer version of this program, which can read it."""


@dataclass(frozen=True)
class MetricValue:
    """One named figure of a run.

    ``samples`` are the single observations behind ``value`` in the order in which they were made (at most 4,096;
    ``first`` and ``last`` are of the whole run, also where ``samples`` was thinned). Of old records that were pruned only the best
    one is there, if any. ``tolerance`` is how far the figure differs between equal runs by its nature, as a share, where that is
    more than of most figures.
    """

    name: str
    value: float
    unit: str
    better: str
    samples: Tuple[float, ...] = ()
    first: Optional[float] = None
    last: Optional[float] = None
    tolerance: Optional[float] = None

    def __post_init__(self) -> None:
        """Refuse names, units and directions outside the closed lists, and figures that are no numbers."""
        if not METRIC_NAME.match(self.name):
            raise SchemaError(f"metric name {self.name!r} is not snake_case of at most 64 characters")
        if self.unit not in UNITS:
            raise SchemaError(f"metric {self.name}: unit {self.unit!r} is not one of {', '.join(UNITS)}")
        if self.better not in BETTER:
            raise SchemaError(f"metric {self.name}: better={self.better!r} is not one of {', '.join(BETTER)}")
        for what, figure in (("value", self.value), ("first", self.first), ("last", self.last)):
            if figure is not None and not math.isfinite(figure):
                raise SchemaError(f"metric {self.name}: {what} is {figure}")
        if not all(math.isfinite(sample) for sample in self.samples):
            raise SchemaError(f"metric {self.name}: samples hold a figure that is not finite")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise SchemaError(f"metric {self.name}: tolerance is {self.tolerance}, not between 0 and 1")


#: How a :class:`Figure` of several ranks becomes one metric.
OVER = ("sum", "mean", "max", "min", "first")


@dataclass(frozen=True)
class Figure:
    """One figure of one rank beyond the window's, which a mode of running adds; ``over`` says how ranks are combined.

    ``first`` takes the value of the lowest rank that tells it. ``samples`` are those of the rank whose value is taken.
    """

    name: str
    value: float
    unit: str
    better: str
    over: str = "max"
    samples: Tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an unknown way of combining; the rest is checked as of a :class:`MetricValue`."""
        if self.over not in OVER:
            raise SchemaError(f"figure {self.name}: over={self.over!r} is not one of {', '.join(OVER)}")
        MetricValue(self.name, self.value, self.unit, self.better, self.samples)


@dataclass(frozen=True)
class RunEvent:
    """Something that happened at one time of a run, as MLPerf's logs tell it: ``eval_accuracy`` at ``time_ns`` (UTC)."""

    key: str
    time_ns: int
    value: Any = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class RankReport:
    """What one rank measured in its timed window. Durations are seconds summed over the window unless said.

    ``epoch_s`` is the wall time of the window from the common start barrier to this rank's last synchronise;
    ``wait_s`` blocked in the loader after the first batch, ``first_batch_s`` the wait for the window's first batch
    (zero when warm-up already paid it), ``read_s`` work done inside loader workers, ``copy_s`` host to device;
    ``arrival_s`` the median lateness of this rank at synchronising steps against the earliest rank (rank skew).
    ``step_times_s`` has one entry for each timed step. Fields that the device cannot tell are None, never zero.
    """

    rank: int
    local_rank: int
    host: str
    device_type: str
    device_index: int
    device_model: str
    steps: int
    samples: int
    started_ns: int
    ended_ns: int
    epoch_s: float
    wait_s: float
    copy_s: float
    warmup_s: float
    step_times_s: Tuple[float, ...]
    losses: Tuple[float, ...]
    first_batch_s: float = 0.0
    read_s: Optional[float] = None
    forward_s: Optional[float] = None
    backward_s: Optional[float] = None
    optimizer_s: Optional[float] = None
    exposed_communication_s: Optional[float] = None
    arrival_s: Optional[float] = None
    peak_memory_bytes: Optional[int] = None
    energy_j: Optional[float] = None
    calibration_before: Optional[float] = None
    calibration_after: Optional[float] = None
    forward_flop_per_sample: Optional[float] = None
    train_flop_per_sample: Optional[float] = None
    peak_flops_per_s: Optional[float] = None
    parameters: Optional[int] = None
    data_kind: str = "synthetic"
    data_source: str = "memory"
    cache: str = "unknown"
    environment: Optional[Mapping[str, str]] = None
    contention: Optional[Mapping[str, float]] = None
    exposed_copy_s: Optional[float] = None  #: part of copy_s for which computation waited; None: all of it
    loader_start_s: Optional[float] = None  #: wait for the run's very first batch, also when warm-up paid it
    tokens_per_sample: Optional[int] = None  #: language models only
    timed: Tuple[TimedOperation, ...] = ()  #: operations that were repeated, where the run is no training
    figures: Tuple[Figure, ...] = ()  #: what a mode of running measured besides
    events: Tuple[
        RunEvent, ...
    ] = ()  #: in the order of time; sent by rank 0, or by the first rank of each group
    failed: Optional[str] = None  #: why its base model failed, where the others' figures still count


@dataclass(frozen=True)
class Measurement:
    """What one attempt of one run measured, all ranks together.

    ``steps`` and ``samples`` were really done, in the timed window (steps of one rank, samples of all ranks).
    ``step_times_s`` holds, for each step, the slowest rank's time. ``environment`` says what software and hardware
    produced the figures; ``contention`` what else the node was doing (load, pressure, steal, throttling);
    ``calibration_*`` is the rate of the fixed kernel before and after (unit 1/s), None where it was not run.
    """

    run_id: str
    nonce: str
    attempt: int
    workload: str
    device_type: str
    device_model: str
    nodes: Tuple[str, ...]
    ranks: int
    devices: int
    steps: int
    samples: int
    started_ns: int
    ended_ns: int
    metrics: Tuple[MetricValue, ...]
    step_times_s: Tuple[float, ...] = ()
    data_kind: str = "none"
    data_source: str = "none"
    cache: str = "unknown"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    contention: Mapping[str, float] = dataclasses.field(default_factory=dict)
    calibration_before: Optional[float] = None
    calibration_after: Optional[float] = None
    per_rank: Tuple[RankReport, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse two metrics with one name."""
        names = [metric.name for metric in self.metrics]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(f"metric reported twice: {', '.join(twice)}")

    def metric(self, name: str) -> Optional[MetricValue]:
        """Return the metric called *name*, or None."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        return None


#: Types that JSON has itself. Most of a record are numbers of these: they are looked for first, and a list at once.
_PLAIN = frozenset({float, int, str, bool, type(None)})


def to_json(instance: Any) -> Any:
    """Turn a schema object (or a container of such) into plain JSON types; fields that are None are left out.

    A member of an enumeration becomes its value.
    """
    if type(instance) in _PLAIN:
        return instance
    if isinstance(instance, (list, tuple)):
        return (
            list(instance)
            if _PLAIN.issuperset(map(type, instance))
            else [to_json(value) for value in instance]
        )
    if dataclasses.is_dataclass(instance) and not isinstance(instance, type):
        pairs = ((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance))
        return {name: to_json(value) for name, value in pairs if value is not None}
    if isinstance(instance, Mapping):
        return {str(key): to_json(value) for key, value in instance.items()}
    if isinstance(instance, enum.Enum):
        return instance.value
    return instance


def from_json(cls: Type[T], data: Any, where: str = "") -> T:
    """Build the dataclass *cls* from parsed JSON, strictly.

    Raises:
        NewerSchemaError: ``schema`` is newer than ours.
        SchemaError: a field is unknown, missing, of the wrong type or not finite.
    """
    where = where or cls.__name__
    if not isinstance(data, dict):
        raise SchemaError(f"{where}: expected an object, got {type(data).__name__}")
    hints, required = _fields_of(cls)  # type: ignore[arg-type]  # classes are hashable, mypy does not see it for a TypeVar
    found = data.get("schema", SCHEMA) if "schema" in hints else SCHEMA
    if not isinstance(found, int) or isinstance(found, bool):
        raise SchemaError(f"{where}: schema is {found!r}, not an integer")
    if found > SCHEMA:
        raise NewerSchemaError(
            f"{where}: schema {found} is newer than {SCHEMA}, the newest this version reads"
        )
    unknown = sorted(data.keys() - hints.keys())
    if unknown:
        raise SchemaError(f"{where}: unknown field {', '.join(map(repr, unknown))}")
    values = {name: _field(hints[name], value, where, name) for name, value in data.items()}
    missing = [name for name in required if name not in values]
    if missing:
        raise SchemaError(f"{where}: missing field {', '.join(map(repr, missing))}")
    return cls(**values)


@functools.cache  # one entry for each dataclass; evaluating annotations is most of the reading
def _fields_of(cls: Type[Any]) -> Tuple[Mapping[str, Any], Tuple[str, ...]]:
    """Return the types of all fields, and the names of those without a default."""
    required = [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}, tuple(required)


@functools.cache  # one entry for each type of a field
def _generic(hint: Any) -> Tuple[Any, Tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _field(hint: Any, value: Any, where: str, name: str) -> Any:
    """Convert a field; most are plain, and what is exactly of their type needs neither conversion nor the text of its place."""
    if type(value) is hint and (hint is not float or math.isfinite(value)):
        return value
    return _convert(hint, value, f"{where}.{name}")


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = _generic(hint)
    if origin in _UNIONS:
        if value is None:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(inner, value, where)
    if origin is tuple:
        return _convert_list(arguments[0], value, where)
    if origin is not None:  # the only other generic in use is Mapping[str, X]
        if not isinstance(value, dict):
            raise SchemaError(f"{where}: expected an object, got {type(value).__name__}")
        if arguments[1] is not str or not {*map(type, value.values())} <= {
            str
        }:  # else the surroundings of a run
            value = {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
        return value
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("Type[Any]", hint), value, where)
    return _scalar(hint, value, where)


def _convert_list(hint: Any, value: Any, where: str) -> Tuple[Any, ...]:
    if not isinstance(value, list):
        raise SchemaError(f"{where}: expected a list, got {type(value).__name__}")
    if hint is float and {*map(type, value)} <= {float} and all(map(math.isfinite, value)):
        return tuple(value)  # thousands of samples
    return tuple(_convert(hint, item, f"{where}[{i}]") for i, item in enumerate(value))


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if isinstance(value, bool) and hint is not bool:
        raise SchemaError(f"{where}: expected {hint.__name__}, got a boolean")
    if issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            valid = ", ".join(str(member.value) for member in hint)
            raise SchemaError(f"{where}: {value!r:.80} is not one of {valid}") from None
    if hint is float and isinstance(value, (int, float)):
        number = float(value)
        if not math.isfinite(number):
            raise SchemaError(f"{where}: {number} is not a finite number")
        return number
    if not isinstance(value, hint):
        raise SchemaError(f"{where}: expected {hint.__name__}, got {type(value).__name__}")
    return value


#: Most samples that a metric carries (node/protocol/schema.py).
MOST_SAMPLES = 4096


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which *share* of *values* lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    # Weights instead of a difference: the result never leaves the two neighbours, whatever rounding does.
    weight = place - below
    return min(max(ordered[below] * (1.0 - weight) + ordered[above] * weight, ordered[below]), ordered[above])


def thin(values: Sequence[float], most: int = MOST_SAMPLES) -> Tuple[float, ...]:
    """Return at most *most* of *values* in their order, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return tuple(values)
    last = len(values) - 1
    return tuple(values[place * last // (most - 1)] for place in range(most))
