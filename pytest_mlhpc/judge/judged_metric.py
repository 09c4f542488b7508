"""One judged metric of one run with all that its verdict depends on, what the calibration kernel says of the machine among it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.judge import fence as fences
from pytest_mlhpc.judge.baseline_files import LOCAL_TOLERANCE, TOLERANCE, Entry
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.losses import LossLimits, limits_for
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.store import record
from pytest_mlhpc.store.record import Epoch, JudgedBy, MetricVerdict, Verdict, calibration_rate, ratio


def speed(measurement: Measurement, reference: float | None) -> float:
    """Return how fast the machine was against *reference*; 1 where that is not known."""
    return ratio(calibration_rate(measurement), reference)


#: Contention figure of ``node/telemetry/contention.py`` -> (limit, how people say it); all are shares of the run's time. Load
#: and pressure on processors are left out: the run itself, or the one before it, causes them.
LIMITS: Mapping[str, tuple[float, str]] = {
    "steal": (0.03, contention.STOLEN),
    "throttled": (0.10, "the cgroup was throttled {:.1%} of the time"),
    "memory_pressure": (0.10, "tasks waited for memory {:.1%} of the time"),
}
#: Other programs may use this much of what the run itself used.
OTHERS = 0.10


def busy(measurement: Measurement) -> str:
    """Return what else kept the machine busy during the run, as text, or an empty string."""
    figures = measurement.contention
    found = [
        text.format(figures[name]) for name, (limit, text) in LIMITS.items() if figures.get(name, 0.0) > limit
    ]
    others, own = (
        figures.get("other_cores", 0.0),
        figures.get("busy_cores", 0.0) - figures.get("other_cores", 0.0),
    )
    if others > OTHERS * max(own, 1.0):
        found.append(contention.OTHERS.format(others, own))
    return "; ".join(found)


@dataclass(frozen=True)
class Setting:
    """What holds for all metrics of a run."""

    by: JudgedBy
    epoch: Epoch  #: of the run

    def tolerance(self, entry: Entry) -> float:
        """Return what matters of a series (:func:`smallest_loss`)."""
        return smallest_loss(entry, local=self.by.local, matters=self.by.matters)


def smallest_loss(entry: Entry | None, *, local: bool, matters: float | None) -> float:
    """Return the smallest loss that fails a test, a share of the level.

    Args:
        entry: of the series; it decides where its tolerance is another than the usual one.
        local: whether the machine is a developer's.
        matters: what the partition says.
    """
    usual = LOCAL_TOLERANCE if local else TOLERANCE
    if entry is not None and entry.tolerance != usual:
        return entry.tolerance
    return usual if matters is None else matters


@dataclass(frozen=True)
class Ruling:
    """A metric's verdict and how many more re-runs it needs."""

    metric: MetricVerdict
    reruns_wanted: int = 0


@dataclass(frozen=True)
class Case:
    """One metric with a baseline: tonight's figure and the nights before it, oldest first."""

    attempts: Sequence[Measurement]
    setting: Setting
    entry: Entry
    metric: MetricValue
    nights: Sequence[Attempts]
    fence: fences.Fence

    @property
    def usual(self) -> list[Attempts]:
        """The nights for which the test did not fail."""
        return [night for night in self.nights if not night.regressed]

    @property
    def limits(self) -> LossLimits:
        """What a loss must be for the test to fail."""
        return limits_for(self.setting.by.series, self.setting.tolerance(self.entry))

    @property
    def reference(self) -> float | None:
        """The rate of the calibration kernel to which figures are corrected (1/s), on `local` only."""
        return self.entry.calibration if self.setting.by.local else None

    def tonight(self, *, excused: bool = False) -> Attempts:
        """Return tonight's figures, *excused* ones corrected for a slower machine.

        Slow re-runs on a busy machine prove nothing and are left out.
        """
        found = [self.figure(attempt, excused=excused) for attempt in self.attempts]
        again = [
            value
            for attempt, value in zip(self.attempts[1:], found[1:], strict=True)
            if value is not None and not (self.drop(value) > 0 and busy(attempt))
        ]
        return Attempts(found[0] if found[0] is not None else math.nan, tuple(again))

    def figure(self, attempt: Measurement, *, excused: bool = False) -> float | None:
        """Return the figure of one attempt, *excused* corrected for a slower machine; None where it has none."""
        value = usable(attempt.metric(self.metric.name))
        if value is None or not excused:
            return value
        return record.excused(value, self.metric.unit, speed(attempt, self.reference))

    def drop(self, value: float, level: float | None = None) -> float:
        """Return the share by which *value* is worse than *level*, or than the baseline."""
        return fences.drop(value, self.entry.value if level is None else level, self.entry.better)

    def verdict(self, verdict: Verdict, reason: str = "", *, level: float | None = None) -> MetricVerdict:
        """Return the metric's verdict against *level*, or against the baseline."""
        reruns = [usable(attempt.metric(self.metric.name)) for attempt in self.attempts[1:]]
        return MetricVerdict(
            name=self.metric.name,
            value=self.metric.value,
            unit=self.metric.unit,
            better=self.metric.better,
            baseline=self.entry.value if level is None else level,
            change=-self.drop(self.metric.value, level),
            width=self.fence.width,
            verdict=verdict,
            reruns=tuple(value for value in reruns if value is not None),
            reason=reason,
        )


def usable(metric: MetricValue | None) -> float | None:
    """Return the figure of *metric* when it is one that can be compared: finite and positive."""
    if metric is None or not math.isfinite(metric.value) or metric.value <= 0:
        return None
    return metric.value
