"""Was it the machine? What the calibration kernel and the contention figures of a run say about its speed."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.store.record import calibration_rate, ratio


def speed(measurement: Measurement, reference: float | None) -> float:
    """Return how fast the machine was against *reference*; 1 where that is not known."""
    return ratio(calibration_rate(measurement), reference)


#: Contention figure of ``node/telemetry/contention.py`` -> (limit, how people say it); all are shares of the run's time. Load
#: and pressure on processors are left out: the run itself, or the one before it, causes them.
LIMITS: Mapping[str, tuple[float, str]] = {
    "steal": (0.03, "the hypervisor gave {:.1%} of the processor time to others"),
    "throttled": (0.10, "the cgroup was throttled {:.1%} of the time"),
    "memory_pressure": (0.10, "tasks waited for memory {:.1%} of the time"),
}
#: Other programs may use this much of what the run itself used.
OTHERS = 0.10


def busy(measurement: Measurement) -> str:
    """Return what else kept the machine busy during the run, in words, or an empty string."""
    figures = measurement.contention
    found = [
        text.format(figures[name]) for name, (limit, text) in LIMITS.items() if figures.get(name, 0.0) > limit
    ]
    others, own = (
        figures.get("other_cores", 0.0),
        figures.get("busy_cores", 0.0) - figures.get("other_cores", 0.0),
    )
    if others > OTHERS * max(own, 1.0):
        found.append(f"other programs used {others:.2g} cores beside the run's {own:.2g}")
    return "; ".join(found)
