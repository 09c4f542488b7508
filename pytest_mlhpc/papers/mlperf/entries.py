"""The lines of a run's log, in the words of mlperf-logging. Pure.

A log says what the record says and nothing else: what the run did not tell is left out, also where the checker demands it.
Rules that the run departs from are lines of the log too (``mlhpc_departure``), so that no log claims more than it may.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers.mlperf import timeline
from pytest_mlhpc.papers.mlperf.limits import CLOSED
from pytest_mlhpc.papers.mlperf.rules import Departure
from pytest_mlhpc.papers.mlperf.trained import Trained

INTERVAL_START: Final = "INTERVAL_START"
INTERVAL_END: Final = "INTERVAL_END"
POINT: Final = "POINT_IN_TIME"
DIVISIONS: Final = ("closed", "open")
#: What the checker takes (hpc_3.0.0/common.yaml).
STATUSES: Final = ("onprem", "cloud", "preview", "research")
#: Keys of ours, which the checker does not know and lets pass.
DEPARTURE, RECORD = "mlhpc_departure", "mlhpc_record"
_OPTIMIZERS: Final = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "LAMB", "lars": "LARS"}
_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}\Z")
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True)
class Entry:
    """One line. ``time_ms`` is UTC."""

    key: str
    value: Any
    time_ms: int
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The line's event type."""
        if self.key.endswith(timeline.START):
            return INTERVAL_START
        return INTERVAL_END if self.key.endswith(timeline.STOP) else POINT


@dataclass(frozen=True)
class Submission:
    """What no run knows: who submits which system, and in which division."""

    org: str
    platform: str
    division: str
    status: str = "research"


def entries(run: Trained, submission: Submission, found: Sequence[Departure]) -> list[Entry]:
    """Return the lines of the log of *run*.

    Raises:
        UsageError: it is of no benchmark of MLPerf HPC, told no events, or its events contradict its record.
    """
    if run.workload not in CLOSED:
        raise UsageError(f"{run.workload} is no benchmark of MLPerf HPC; those are {', '.join(CLOSED)}")
    if not run.events:
        raise UsageError(f"record {run.record} has no events: it ended before it could tell them")
    begun = run.events[0].time_ns // _NS_PER_MS
    lines = [Entry(key, value, begun) for key, value in _heading(run, submission)]
    lines += [Entry(key, value, begun) for key, value in _facts(run)]
    lines += [
        Entry(DEPARTURE, one.text, begun, {"rule": one.rule.name, "section": str(one.rule)}) for one in found
    ]
    for event in run.events:
        _checked(run, event.key, event.value, event.metadata)
        lines.append(Entry(event.key, event.value, event.time_ns // _NS_PER_MS, dict(event.metadata)))
    return lines


def _heading(run: Trained, submission: Submission) -> Iterator[tuple[str, Any]]:
    told = {event.key for event in run.events}
    for key, value in (
        ("submission_benchmark", run.workload),
        ("submission_org", submission.org),
        ("submission_division", submission.division),
        ("submission_status", submission.status),
        ("submission_platform", submission.platform),
    ):
        if key in told:
            raise UsageError(f"record {run.record}: its events hold {key}, which is not the run's to say")
        yield key, value
    yield RECORD, run.record


def _facts(run: Trained) -> Iterator[tuple[str, Any]]:
    """Yield what the record knows and no event tells.

    Raises:
        UsageError: an event tells otherwise.
    """
    parameters = run.parameters
    facts: dict[str, Any] = {
        "cache_clear": run.cache == "cold",
        "number_of_nodes": run.nodes,
        "accelerators_per_node": _accelerators(run),
        "number_of_ranks": run.ranks,
        "global_batch_size": run.global_batch,
        "seed": parameters.get("seed"),
        "opt_name": _OPTIMIZERS.get(str(parameters.get("optimizer"))),
        "dropout": parameters.get("dropout"),
        "gradient_accumulation_frequency": parameters.get("gradient_accumulation"),
    }
    for key, value in facts.items():
        told = timeline.values(run.events, key)
        if not told:
            if value is not None:
                yield key, value
            continue
        if value is not None and any(_differ(one, value) for one in told):
            raise UsageError(
                f"record {run.record} contradicts itself: its event {key} says {told[0]}, the record {value}"
            )


def _accelerators(run: Trained) -> int:
    """Return the accelerators of a node; a CPU has none (closed_common.yaml takes zero)."""
    return 0 if run.device_type == "cpu" else math.ceil(run.devices / max(1, run.nodes))


def _differ(told: Any, known: Any) -> bool:
    if isinstance(told, str) and isinstance(known, str):
        return told.casefold() != known.casefold()
    return bool(told != known)


def _checked(run: Trained, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse what would make a line that is none."""
    if not _KEY.match(key):
        raise UsageError(f"record {run.record}: an event is called {key!r:.80}, which is no key of a log")
    if not (_finite(value) and all(_finite(one) for one in metadata.values())):
        raise UsageError(f"record {run.record}: event {key} holds a figure that is not finite")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_finite, value))
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return True
