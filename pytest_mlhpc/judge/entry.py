"""One accepted value of one series, and the key that it is found by."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.store.record import Epoch, SeriesKey

#: Width of the fence before there are enough records (the design page's figures; fractions of the baseline).
TOLERANCE = 0.05
LOCAL_TOLERANCE = 0.10


@dataclass(frozen=True)
class Entry:
    """The baseline of one series.

    ``spread`` is the robust relative deviation of the ``runs`` values behind ``value`` (their median), None for one
    run. ``date`` is when it was accepted (ISO 8601, UTC); history before it belongs to an earlier baseline epoch.
    ``definition`` and ``device_model`` are those of the runs; another run's figure is not judged by this one.
    ``environment`` is the digest of the software environment, ``calibration`` the rate of the calibration kernel at
    that time (1/s), on `local` only.
    """

    value: float
    unit: str
    better: str
    tolerance: float
    definition: str
    device_model: str = ""
    spread: float | None = None
    runs: int = 1
    accepted_by: str = ""
    reason: str = ""
    date: str = ""
    environment: str = ""
    calibration: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures that nothing can be compared with."""
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"value must be a positive number, found {self.value}")
        if not (math.isfinite(self.tolerance) and 0 < self.tolerance < 1):
            raise ValueError(f"tolerance must lie between 0 and 1, found {self.tolerance}")
        if self.better not in {"higher", "lower"}:
            raise ValueError(f"better must be higher or lower, found {self.better!r}")
        if self.runs < 1:
            raise ValueError("runs start at 1")
        if not self.definition:
            raise ValueError("definition must say what was computed")
        for name, figure in (("spread", self.spread), ("calibration", self.calibration)):
            if figure is not None and not (math.isfinite(figure) and figure >= 0):
                raise ValueError(f"{name} must be a number that is not negative, found {figure}")

    @property
    def epoch(self) -> Epoch:
        """Whose figures it may judge."""
        return Epoch(self.definition, self.device_model)


def series_of(spec: JobSpec, metric: str) -> SeriesKey:
    """Return the series of *metric* of *spec*."""
    target = spec.target
    return SeriesKey(
        system=target.partition.system,
        partition=target.partition.name,
        environment=target.environment.name,
        fingerprint=target.fingerprint,
        benchmark=spec.benchmark,
        metric=metric,
    )


#: Parts of a run's environment that say where and of which commit, not which software.
PLACE = frozenset({"host", "commit", "commit_changed"})


def environment_digest(environment: Mapping[str, str]) -> str:
    """Return a short digest of a software environment; the same on another node and for another commit."""
    software = {name: value for name, value in environment.items() if name not in PLACE}
    return hashlib.sha256(json.dumps(software, sort_keys=True).encode()).hexdigest()[:16]
