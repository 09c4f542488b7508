"""No torch. The parameters of each workload, their defaults and its presets: read by controller and worker alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Tuple


@dataclass(frozen=True)
class Field:
    """One field of a workload. ``choices`` limits it; ``identity`` says whether it changes what is computed."""

    default: Any
    help: str
    type: str = "int"  #: int, float, str, bool, list, mapping; line (printable text), words (text or list), ranks (a number or 'all'), size (bytes, or text like 64MiB), sizes
    choices: Tuple[Any, ...] = ()
    identity: bool = True
    minimum: float = float("-inf")
    maximum: float = float("inf")


#: What any probe may report besides its own metrics.
ANY_PROBE = ("epoch_time", "peak_memory", "energy", "calibration_rate")


def nothing_wrong(_values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Find nothing: the check of a workload whose fields do not depend on each other."""
    return ()


def nothing_more(_values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Expect no metric beyond those that every run of the workload reports."""
    return ()


@dataclass(frozen=True)
class Workload:
    """One workload: its fields, its presets (which change model size, input size and step counts only).

    A ``probe`` is no training: its module has ``probe(place)`` (``node/worker/probes/measure.py``) instead of ``task(parameters)``,
    and it reads no data set.
    """

    name: str
    summary: str
    module: str  #: import path of the torch half inside the payload
    fields: Mapping[str, Field]
    presets: Mapping[str, Mapping[str, Any]]
    judged: Tuple[str, ...] = ("effective_throughput", "compute_throughput")
    expected: Tuple[str, ...] = (
        "effective_throughput", "compute_throughput", "compute_fraction", "io_time", "compute_time", "loss",
    )  # fmt: skip
    reported: Tuple[str, ...] = ()  #: all metrics that a run may report besides; empty: not known before it
    sample: str = "sample"  #: what one sample is, for people
    device_batch: int = 1  #: samples of one step on one rank where ``global_batch`` is unset
    probe: bool = False
    without: Tuple[str, ...] = ()  #: fields of every workload that mean nothing for this one
    #: All effective values -> metrics that a run with them must report besides.
    expected_of: Callable[[Mapping[str, Any]], Tuple[str, ...]] = nothing_more
    #: All effective values -> (field, what is wrong) for those that are fine alone but not together.
    contradictions: Callable[[Mapping[str, Any]], Tuple[Tuple[str, str], ...]] = nothing_wrong
    #: A field that holds fields of another workload -> what they may be, from all effective values of this one.
    within: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Field]]] = field(default_factory=dict)
    extra_modules: Tuple[str, ...] = field(
        default_factory=tuple
    )  #: third parties' modules to ship with the payload

    def may_report(self, values: Mapping[str, Any]) -> Tuple[str, ...]:
        """Return all metrics that a run with *values* may report; empty: they are not known before it."""
        return (*self.expected, *self.expected_of(values), *self.reported) if self.reported else ()
