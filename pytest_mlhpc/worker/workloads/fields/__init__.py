"""PAYLOAD, no torch. The fields that every training workload has, a module for each matter.

Each module has ``FIELDS``, ``wrong(values)`` (values that are fine alone but not together, or not on so many devices:
``values`` holds ``devices`` and ``nodes`` too) and ``expected(values)`` (metrics that a run with these values must report
besides). A field that was added later is unset (None) by default, so that the keys of older benchmarks stay as they are.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

from pytest_mlhpc.worker.workloads.definitions import Field
from pytest_mlhpc.worker.workloads.fields import (
    arithmetic,
    bagging,
    basic,
    ipu,
    parallel,
    quality,
    telemetry,
    wholly,
    wse,
)

Wrong = Tuple[Tuple[str, str], ...]

_MATTERS = (basic, arithmetic, wholly, ipu, wse, parallel, quality, bagging, telemetry)


def training(optimizer: str, learning_rate: float) -> Dict[str, Field]:
    """Return the fields that every training workload has, with these two defaults."""
    return {
        **basic.fields(optimizer, learning_rate),
        **arithmetic.FIELDS,
        **wholly.FIELDS,
        **ipu.FIELDS,
        **wse.FIELDS,
        **parallel.FIELDS,
        **quality.FIELDS,
        **bagging.FIELDS,
        **telemetry.FIELDS,
    }


def wrong(values: Mapping[str, Any]) -> Wrong:
    """Return (field, what is wrong) for values that do not go together."""
    return tuple(found for matter in _MATTERS for found in matter.wrong(values))


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return the metrics that a run with *values* must report beyond those of every run of its workload."""
    return tuple(name for matter in _MATTERS for name in matter.expected(values))
