"""From recorded runs to a page: the newest accepted runs of `peaks`, `kernels` and trainings of each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.node.worker.workloads.characters import CLASSES, TRAININGS, inner_batch, inner_parameters
from pytest_mlhpc.papers.roofline.page import (
    DeviceRoofline,
    Peaks,
    RecordedTraining,
    RooflinePage,
    RooflinePoint,
    attainable,
    si,
)
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import ACCEPTED, MeasuredMachine
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import suite
from pytest_mlhpc.store.record import Record

#: Fields of a training that neither change what a step computes nor how large it is.
_ASIDE = frozenset({"global_batch", "seed", "learning_rate", "loader_workers", "text_path"})
_WORKLOADS = ("peaks", "kernels", *TRAININGS)


@dataclass(frozen=True)
class RooflineQuery:
    """What of the records to show."""

    title: str
    now_ns: int
    since_ns: int
    system: str = ""
    partition: str = ""


def gather(index: Index, wanted: RooflineQuery) -> RooflinePage | None:
    """Return the page, or None where no peaks and no kernels are recorded.

    Raises:
        StoreError: the record files cannot be read.
    """
    found: dict[tuple[MeasuredMachine, str], list[Record]] = {}
    for record in _newest(index, wanted):
        machine = MeasuredMachine(
            record.system, record.partition, record.environment, record.device_model, record.fingerprint
        )
        found.setdefault((machine, _share(record)), []).append(record)
    devices, notes = [], []
    for (machine, share), records in sorted(found.items(), key=lambda one: one[0]):
        peaks, problems = _peaks(records)
        points, more = _points(records)
        if peaks is None and not points:
            continue
        where = f"{machine.id}, {share}" if share else machine.id
        notes += [f"{where}: {text}" for text in (*problems, *more, *_doubts(peaks, points))]
        devices.append(DeviceRoofline(machine, peaks, points, share))
    if not devices:
        return None
    return RooflinePage(wanted.title, wanted.now_ns, wanted.since_ns, tuple(devices), tuple(notes))


def _newest(index: Index, wanted: RooflineQuery) -> Iterable[Record]:
    """Yield the newest accepted record of each benchmark on each machine, newest first."""
    verdicts = ", ".join(f"'{verdict}'" for verdict in ACCEPTED)
    names = " OR ".join(f"substr(definition, 1, {len(name) + 1}) = '{name} '" for name in _WORKLOADS)
    rows = index.ask(
        "SELECT path, start, record_id, system, partition, environment, device_model, fingerprint, benchmark, definition FROM records"  # noqa: S608 - constants of this module
        f" WHERE attempt = 0 AND created_ns >= :since AND verdict IN ({verdicts}) AND ({names})"
        " AND (:system = '' OR system = :system) AND (:partition = '' OR partition = :partition)"
        " ORDER BY created_ns DESC, id DESC",
        {"since": wanted.since_ns, "system": wanted.system, "partition": wanted.partition},
        wanted.since_ns,
    )
    taken: set[tuple[Any, ...]] = set()
    for path, start, record_id, *key in rows:
        if tuple(key) in taken:
            continue
        for record in index.read([(path, start, record_id)]):
            if record.measurement is not None and neutral(record.overrides):
                taken.add(tuple(key))
                yield record


def _share(record: Record) -> str:
    """Return how much of a machine's cores one rank had, empty on other devices than CPUs.

    There a device is the share of the cores that a rank owns, and shares of other sizes are other devices.
    """
    measurement = record.measurement
    threads = "" if measurement is None else measurement.environment.get("torch_threads", "")
    if not threads or measurement is None or measurement.device_type != "cpu":
        return ""
    return f"{threads} thread{'' if threads == '1' else 's'}"


def _doubts(peaks: Peaks | None, points: Sequence[RooflinePoint]) -> Iterable[str]:
    """Yield why a roof is not to be taken at its word."""
    if peaks is not None and peaks.cached:
        yield (
            f"peaks moved vectors of {si(peaks.vector, 'B')}, less than 4 times the last caches ({si(peaks.cache, 'B')}), so "
            "that copy and triad are in part those of caches: run peaks with a larger vector="
        )
    for point in points:
        roof = attainable(peaks, point)
        if roof is not None and point.flops > roof:
            yield (
                f"{point.label} is above its roof: caches keep what the model of bytes moves, or the peaks were measured on "
                "a machine that was busier, or with matrices too small"
            )


def _value(record: Record, name: str) -> float | None:
    metric = record.measurement.metric(name) if record.measurement is not None else None
    return None if metric is None else metric.value


def _best(record: Record, name: str) -> float | None:
    """Return the best repetition: a peak is what the device can do."""
    metric = record.measurement.metric(name) if record.measurement is not None else None
    return None if metric is None else max((metric.value, *metric.samples))


def _devices(record: Record) -> int:
    return max(1, record.measurement.devices if record.measurement is not None else 1)


def _workload(record: Record) -> str:
    return record.definition.partition(" ")[0]


def _peaks(records: Sequence[Record]) -> tuple[Peaks | None, list[str]]:
    """Return the peaks of one device, from the newest run of the largest matrices, and of the largest vectors."""
    runs = [record for record in records if _workload(record) == "peaks"]
    runs.sort(key=lambda record: (int(record.parameters.get("matrix") or 0), record.created_ns), reverse=True)
    flops: dict[str, float] = {}
    for record in runs:
        for precision in record.parameters.get("precisions") or ():
            best = _best(record, f"gemm_flops_{precision}")
            if best:
                flops.setdefault(str(precision), best / _devices(record))
    runs.sort(key=lambda record: (int(record.parameters.get("vector") or 0), record.created_ns), reverse=True)
    moving = [(record, _best(record, "copy_bandwidth"), _best(record, "triad_bandwidth")) for record in runs]
    whole = [(record, copy, triad) for record, copy, triad in moving if copy and triad]
    if not whole:
        return None, [
            f"no peaks are recorded, so there is no roof: run pytest {suite('characterisation')} -k peaks"
        ]
    record, copy, triad = whole[0]
    devices = _devices(record)
    environment = record.measurement.environment if record.measurement is not None else {}
    vector, cache = (_whole(environment.get(name, "")) for name in ("vector_bytes", "cache_bytes"))
    peaks = Peaks(
        flops, (copy or 0) / devices, (triad or 0) / devices, devices, record.created_ns, vector, cache
    )
    return peaks, []


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _points(records: Sequence[Record]) -> tuple[tuple[RooflinePoint, ...], list[str]]:
    found, problems = [], []
    trainings = [record for record in records if _workload(record) in TRAININGS]
    for record in records:
        if _workload(record) != "kernels":
            continue
        try:
            found.append(_point(record, trainings))
        except (KeyError, TypeError, ValueError) as error:  # fields of another version of this program
            problems.append(f"a run of {record.benchmark} is left out, its record lacks {error}")
    found.sort(key=lambda point: (TRAININGS.index(point.workload), keys.natural(point.label)))
    return tuple(found), problems


def _point(record: Record, trainings: Sequence[Record]) -> RooflinePoint:
    values = dict(record.parameters)
    inner = inner_parameters(values)
    workload, size, batch = str(values["of"]), str(values["size"]), inner_batch(values)
    flop, moved = _value(record, "step_flop"), _value(record, "step_bytes_modelled")
    achieved, step_s = _value(record, "achieved_flops"), _value(record, "step_time")
    if not flop or not moved or not achieved or not step_s:
        raise ValueError("operations, bytes or time of a step")
    precision = str(values["precision"])
    differs = [f"{name}={value}" for name, value in sorted((values.get("fields") or {}).items())]
    label = " ".join([workload, size, *differs, f"batch {batch}", precision])
    alike = [
        RecordedTraining(_name(one), _per_device(one), one.created_ns)
        for one in trainings
        if _workload(one) == workload and _same(inner, batch, one)
    ]
    environment = record.measurement.environment if record.measurement is not None else {}
    shares = {name: _value(record, f"kernel_share_{name}") or 0.0 for name in CLASSES}
    return RooflinePoint(
        workload=workload,
        label=label,
        precision=precision,
        batch=batch,
        flop=flop,
        moved=moved,
        flops=achieved / _devices(record),
        step_s=step_s,
        shares=shares,
        created_ns=record.created_ns,
        counted=(_value(record, "memory_bandwidth_counted") or 0.0) / _devices(record) or None,
        counter=str(environment.get("memory_counter", "")),
        trained=tuple(alike),
    )


def _name(record: Record) -> str:
    """Return a training's name as a test calls it, with its scale and data."""
    key = keys.parse(keys.benchmark_of(record))
    if key is None:
        return record.benchmark
    labels = {**key.rest, "name": key.name}
    return " ".join(
        [labels["name"], *(f"{one}={labels[one]}" for one in ("data", "devices") if one in labels)]
    )


def _per_device(record: Record) -> float:
    achieved = _value(record, "achieved_flops") or 0.0
    return achieved / _devices(record)


def _same(inner: Mapping[str, Any], batch: int, training: Record) -> bool:
    """Return whether a training's step on one device is the one that was characterised: same model, input and batch."""
    measured = training.measurement
    if measured is None or not _per_device(training) or not measured.steps:
        return False
    if round(measured.samples / measured.steps / _devices(training)) != batch:
        return False
    names = (set(inner) | set(training.parameters)) - _ASIDE
    return all(inner.get(name) == training.parameters.get(name) for name in names)
