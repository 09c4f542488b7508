"""No torch. The sampler beside a run (``node/telemetry/beside.py``): unset, there is none."""

from __future__ import annotations

from typing import Any, Mapping, Tuple

from pytest_mlhpc.node.worker.workloads.definitions import Field

FIELDS: Mapping[str, Field] = {
    "telemetry": Field(
        None,
        "sample processes and devices beside the run, and record cores, memory, power, clocks",
        "bool",
        identity=False,
    ),
}


def wrong(_values: Mapping[str, Any]) -> Tuple[Tuple[str, str], ...]:
    """Find nothing: it goes with everything."""
    return ()


def expected(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return what every node can tell."""
    return ("telemetry_cores", "telemetry_memory", "telemetry_cost") if values.get("telemetry") else ()
