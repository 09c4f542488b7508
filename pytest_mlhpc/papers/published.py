"""Published throughputs of our workloads, and what must be equal for two throughputs to stand in one section of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from pytest_mlhpc.node.worker.workloads.fields.arithmetic import MANNER
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import RecordedRun

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
