"""The three tables of the HPDC'24 paper for any machines, beside published figures: what is comparable, what is refused, and why."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from pytest_mlhpc.node.worker.workloads.fields.arithmetic import MANNER
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import (
    ACCEPTED,
    Estimate,
    MachineColumn,
    RecordedRun,
    Runs,
    VerdictCount,
    estimate,
)
from pytest_mlhpc.store.text import iso

SAME, BEST = "same", "best"
PARITIES: Final = {
    SAME: "same parameters: each section holds runs of one model, data, batch, precision and optimizer",
    BEST: "each at its best: one model and data; batch, precision, optimizer and layout are each machine's own",
}
#: What a site may tune without training another model on other data (closed division of MLPerf HPC, and what only this
#: machine's arithmetic and memory care for). All other fields belong to the model.
TUNING: Final = frozenset(
    {
        "global_batch", "precision", "optimizer", "learning_rate", "seed", "loader_workers", "channels_last",
        "gradient_accumulation", "tuning", "loss_scale", *MANNER,
    }
)  # fmt: skip
#: Fields of a definition that never put runs apart here: how long a run is, and how large, which has a line of its own.
_FREE: Final = frozenset({*keys.LENGTH, *keys.SCALE})
#: The definition's ``cache`` is what was asked for; the terms have what was measured.
_MEASURED: Final = "cache"


@dataclass(frozen=True)
class SharedTerms:
    """What all figures of one section share. ``fields`` are (name, value), sorted."""

    workload: str
    fields: tuple[tuple[str, str], ...]
    data_kind: str
    cache: str

    def __str__(self) -> str:
        """Return it for people."""
        return self.without({})

    def without(self, shared: Mapping[str, str]) -> str:
        """Return it for people who know of the fields in *shared* already."""
        said = [f"{name}={value}" for name, value in self.fields if name not in shared]
        remarks = [f"{self.data_kind} data"] if self.data_kind not in ("", "none") else []
        remarks += [f"{self.cache} cache"] if self.cache not in ("", "unknown") else []
        return ", ".join([" ".join([self.workload, *said]), *remarks])

    def sort_key(self) -> list[tuple[int, int, str]]:
        """Return what puts 4 before 16."""
        return keys.natural(str(self))


def shared(sections: Sequence[SharedTerms]) -> dict[str, str]:
    """Return the fields that have one value in all of *sections*."""
    first, *others = [dict(terms.fields) for terms in sections]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def terms_of(key: keys.Key, run: RecordedRun, parity: str) -> SharedTerms:
    """Return what a figure of *run* has in common with those it may be compared with."""
    free = _FREE | TUNING if parity == BEST else _FREE
    fields = {
        name: keys.shown(value)
        for name, value in key.fields.items()
        if name not in free and name != _MEASURED
    }
    return SharedTerms(key.workload, tuple(sorted(fields.items())), run.data_kind, run.cache)


def tuned(key: keys.Key) -> dict[str, str]:
    """Return the fields of *key* that a site may tune."""
    return {name: keys.shown(value) for name, value in sorted(key.identity.items()) if name in TUNING}


def differences(wanted: SharedTerms, other: SharedTerms) -> list[str]:
    """Return why *other* is not comparable with *wanted*, of the same workload: ``global_batch=64 (not 32)``."""
    mine, theirs = dict(wanted.fields), dict(other.fields)
    found = [
        f"{name}={theirs.get(name, 'unset')} (not {mine.get(name, 'unset')})"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    if wanted.data_kind != other.data_kind:
        found.append(f"{other.data_kind or 'no'} data (not {wanted.data_kind or 'none'})")
    if wanted.cache != other.cache:
        found.append(f"{other.cache} cache (not {wanted.cache})")
    return found


#: The figures: ``throughputs`` (fields of :class:`Published`), ``minutes`` to train, their ``sources``, and the ``models`` that these
#: ran. The precision of the paper's rows is PyTorch's default where it names no other. MLPerf's rates are worked out from its logs.
DATA: Final[Mapping[str, Any]] = json.loads(
    resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
)
#: Sources, by the names that figures use.
SOURCES: Final[Mapping[str, str]] = DATA["sources"]


@dataclass(frozen=True)
class Published:
    """What a source says of one workload on one system.

    ``compute``, ``fraction`` and ``effective`` are of the whole run, in samples/s and 1; ``per_device`` is the effective
    throughput where the source has no other. ``tuning`` holds what is known of it. ``note`` says what is odd.
    """

    source: str
    system: str
    workload: str
    model: Mapping[str, str]
    devices: int | None = None
    nodes: int | None = None
    compute: float | None = None
    fraction: float | None = None
    effective: float | None = None
    per_device: float | None = None
    data_kind: str = "real"
    tuning: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def apart(self, terms: SharedTerms, parity: str) -> list[str]:
        """Return why it is not comparable with figures of ours that share *terms*; nothing where it is."""
        ours = dict(terms.fields)
        wanted = {**self.model, **(self.tuning if parity == SAME else {})}
        found = [
            f"{name}={value} (not {ours.get(name, 'unset')})"
            for name, value in sorted(wanted.items())
            if ours.get(name) != value
        ]
        if parity == SAME and "global_batch" not in self.tuning:
            found.append("global_batch not stated")
        if self.data_kind != terms.data_kind:
            found.append(f"{self.data_kind} data (not {terms.data_kind or 'none'})")
        if terms.cache not in ("", "unknown"):
            found.append(f"state of the cache not stated (not {terms.cache})")
        return found


PUBLISHED: Final = tuple(
    Published(**{**row, "model": DATA["models"][row["model"]]}) for row in DATA["throughputs"]
)


@dataclass(frozen=True)
class Refusal:
    """Why ``who`` (machines, or systems of a published ``source``) has no figure of a workload."""

    workload: str
    who: tuple[str, ...]
    why: str
    source: str = ""


def of_machines(
    columns: Sequence[MachineColumn],
    counts: Sequence[VerdictCount],
    shown: Sequence[SharedTerms],
    measured: Collection[tuple[int, str]],
) -> list[Refusal]:
    """Return why machines have no line in any section of a workload; ``measured``: (place, workload) that have one."""
    found: dict[tuple[str, str], list[str]] = {}
    for workload in dict.fromkeys(terms.workload for terms in shown):
        for place, column in enumerate(columns):
            if (place, workload) not in measured:
                found.setdefault((workload, _why(column, workload, counts)), []).append(column.name)
    return [Refusal(workload, tuple(who), why) for (workload, why), who in found.items()]


def _why(column: MachineColumn, workload: str, counts: Sequence[VerdictCount]) -> str:
    own = [
        one for one in counts if one.machine in column.sources | column.also and _workload(one) == workload
    ]
    recent = [one for one in own if one.recent]
    failed = [one for one in recent if one.verdict not in ACCEPTED]
    if len(failed) < len(recent):
        return "only runs with other settings (--mlhpc-set), or without these figures"
    if failed:
        last = max(failed, key=lambda one: one.newest_ns)
        many = sum(one.recent for one in failed)
        return f"only failed: {many} run{'s' * (many > 1)}, the last {last.verdict} on {iso(last.newest_ns)[:10]}"
    if own:
        return f"not run since then; the last on {iso(max(one.newest_ns for one in own))[:10]}"
    return "never run"


def _workload(one: VerdictCount) -> str:
    key = keys.parse(one.benchmark)
    return key.workload if key else ""


def of_published(published: Sequence[Published], shown: Sequence[SharedTerms], parity: str) -> list[Refusal]:
    """Return published figures that no section of their workload may hold, with what differs from the nearest one."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for one in published:
        own = [one.apart(terms, parity) for terms in shown if terms.workload == one.workload]
        if own and all(own):
            nearest = min(own, key=len)
            found.setdefault((one.workload, one.source, "; ".join(nearest)), {})[one.system] = None
    return [Refusal(workload, tuple(who), why, source) for (workload, source, why), who in found.items()]


#: The paper's tables, in its order: metric, unit.
TABLES: Final = {
    "compute_throughput": "samples/s",
    "compute_fraction": "1",
    "effective_throughput": "samples/s",
}
EFFECTIVE: Final = "effective_throughput"
#: Samples by joule of the devices' own counters.
_EFFICIENCY: Final = "energy_efficiency"
#: Whose joules they are.
DEVICES, JOB = "devices", "job"


@dataclass(frozen=True)
class ThroughputLine:
    """One machine (or published system) at one scale. ``figures``: table's metric -> what the whole run did.

    ``efficiency`` is in samples/J of the training epoch, of the devices' counters, or (``energy_of`` "job") of what the
    scheduler accounts for the whole run, start and warm-up included. ``chosen`` is the tuning that served it best.
    """

    name: str
    nodes: int | None
    devices: int | None
    figures: Mapping[str, Estimate]
    efficiency: Estimate | None = None
    energy_of: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    tried: int = 1  #: settings of which it is the best
    per_device: float | None = None  #: of published figures of which only this is known
    source: str = ""  #: of a published figure
    note: str = ""

    def rate(self, metric: str, *, by: str) -> float | None:
        """Return a throughput by *node* or *device*."""
        number = {"node": self.nodes, "device": self.devices}[by]
        if metric not in self.figures or not number or TABLES[metric] == "1":
            return self.per_device if metric == EFFECTIVE and by == "device" else None
        return self.figures[metric].median / number


@dataclass(frozen=True)
class Section:
    """Figures that are comparable. ``apart``: why they are not with those of the first section of the workload."""

    terms: SharedTerms
    lines: tuple[ThroughputLine, ...]
    apart: tuple[str, ...] = ()

    @property
    def compares(self) -> bool:
        """Whether it has two lines."""
        return len(self.lines) > 1


@dataclass(frozen=True)
class Tables:
    """All three; a line stands in those for which it has a figure."""

    parity: str
    sections: tuple[Section, ...]
    refused: tuple[Refusal, ...] = ()

    @property
    def shared(self) -> dict[str, dict[str, str]]:
        """The fields that have one value in all sections of a workload, by workload."""
        workloads = dict.fromkeys(section.terms.workload for section in self.sections)
        return {
            name: shared([one.terms for one in self.sections if one.terms.workload == name])
            for name in workloads
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that are cited, in order of appearance."""
        lines = [line.source for section in self.sections for line in section.lines]
        return tuple(dict.fromkeys(name for name in [*lines, *(one.source for one in self.refused)] if name))


def tables_of(
    columns: Sequence[MachineColumn],
    runs: Runs,
    counts: Sequence[VerdictCount],
    *,
    parity: str,
    published: Sequence[Published] = PUBLISHED,
) -> Tables:
    """Return the tables.

    Args:
        columns: the machines, in the order in which they are shown.
        runs: (place of the column, benchmark) -> accepted runs, newest first.
        counts: all that was recorded on these columns; says why a machine has no figure.
        parity: ``same`` or ``best``.
        published: what may stand beside.
    """
    found: dict[SharedTerms, list[tuple[int, keys.Key, list[RecordedRun]]]] = {}
    for (place, benchmark), some in runs.items():
        key = keys.parse(benchmark)
        if key is None:
            continue
        for terms, same in _by_terms(key, some, parity).items():
            found.setdefault(terms, []).append((place, key, same))
    ours = {terms: _lines(columns, group, parity) for terms, group in found.items()}
    sections: list[Section] = []
    for workload in sorted({terms.workload for terms in ours}):
        # The section that most machines have comes first: the others say how they differ from it.
        own = [terms for terms in ours if terms.workload == workload]
        machines = {terms: len({place for place, _, _ in found[terms]}) for terms in own}
        own.sort(key=lambda terms: (-machines[terms], terms.sort_key()))
        for terms in own:
            beside = [
                _published(one)
                for one in published
                if one.workload == workload and not one.apart(terms, parity)
            ]
            apart = tuple(differences(own[0], terms))
            sections.append(Section(terms, (*ours[terms], *beside), apart))
    shown = [section.terms for section in sections]
    measured = {(place, terms.workload) for terms, group in found.items() for place, _, _ in group}
    refused = [*of_machines(columns, counts, shown, measured), *of_published(published, shown, parity)]
    return Tables(parity, tuple(sections), tuple(refused))


def _by_terms(
    key: keys.Key, runs: Iterable[RecordedRun], parity: str
) -> dict[SharedTerms, list[RecordedRun]]:
    """Return *runs* that have at least one of the tables' figures, by what they share."""
    found: dict[SharedTerms, list[RecordedRun]] = {}
    for run in runs:
        if any(_value(run, metric, unit) is not None for metric, unit in TABLES.items()):
            found.setdefault(terms_of(key, run, parity), []).append(run)
    return found


def _value(run: RecordedRun, metric: str, unit: str) -> float | None:
    """Return a figure of *run*, None where it is not there in this unit."""
    value, known, _better = run.metrics.get(metric, (0.0, "", ""))
    return value if known == unit else None


def _lines(
    columns: Sequence[MachineColumn], group: Sequence[tuple[int, keys.Key, list[RecordedRun]]], parity: str
) -> list[ThroughputLine]:
    """Return one line for each machine, scale and test; of settings that a site may choose, the best one's."""
    candidates: dict[tuple[int, int, int, str], list[ThroughputLine]] = {}
    for place, key, runs in group:
        by_scale: dict[tuple[int, int], list[RecordedRun]] = {}
        for run in runs:
            by_scale.setdefault((run.devices, run.nodes), []).append(run)
        for (devices, nodes), some in by_scale.items():
            line = _line(columns[place].name, nodes, devices, some, tuned(key) if parity == BEST else {})
            # At its best, a machine has one line for each scale, whatever its tests are called.
            test = "" if parity == BEST else key.name
            candidates.setdefault((place, devices, nodes, test), []).append(line)
    named: dict[tuple[int, int, int], int] = {}
    for place, devices, nodes, _test in candidates:
        named[place, devices, nodes] = named.get((place, devices, nodes), 0) + 1
    lines = []
    for place, devices, nodes, test in sorted(candidates):
        own = candidates[place, devices, nodes, test]
        best = max(own, key=lambda line: line.figures[EFFECTIVE].median if EFFECTIVE in line.figures else 0.0)
        # Two tests of one machine, scale and parameters are two things to whoever wrote them.
        name = f"{best.name} {test}" if named[place, devices, nodes] > 1 else best.name
        lines.append(
            ThroughputLine(
                name, best.nodes, best.devices, best.figures, best.efficiency, best.energy_of, best.chosen, len(own),
            )
        )  # fmt: skip
    return lines


def _line(
    name: str, nodes: int, devices: int, runs: Sequence[RecordedRun], chosen: Mapping[str, str]
) -> ThroughputLine:
    figures = {}
    for metric, unit in TABLES.items():
        values = [value for run in runs if (value := _value(run, metric, unit)) is not None]
        if found := estimate(values):
            figures[metric] = found
    own = [value for run in runs if (value := _value(run, _EFFICIENCY, "samples/J")) is not None]
    job = [
        run.samples / run.energy_j for run in runs if run.energy_j and run.energy_j > 0 and run.samples > 0
    ]
    efficiency, energy_of = (estimate(own), DEVICES) if own else (estimate(job), JOB if job else "")
    return ThroughputLine(name, nodes or None, devices or None, figures, efficiency, energy_of, chosen)


def _published(one: Published) -> ThroughputLine:
    figures = {
        metric: Estimate(value)
        for metric, value in zip(TABLES, (one.compute, one.fraction, one.effective), strict=True)
        if value is not None
    }
    if EFFECTIVE not in figures and one.per_device is not None and one.devices:
        figures[EFFECTIVE] = Estimate(one.per_device * one.devices)
    return ThroughputLine(
        one.system, one.nodes, one.devices, figures, per_device=one.per_device, source=one.source, note=one.note,
    )  # fmt: skip
