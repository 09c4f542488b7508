"""Published results of MLPerf HPC's workloads: times to train, and rates of training. Data with sources.

Times: the paper of MLPerf HPC (MLHPC workshop at SC'21), its tables of the closed and the open division of round v0.7. Its
CosmoFlow was another than today's: kernel 2 and 262,144 training samples. Rates: ``papers/published.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.papers.published import PUBLISHED, SOURCES

_SC21: Final = "sc21"
#: How the sources of rates in rounds of MLPerf HPC begin.
_ROUNDS: Final = ("MLPerf HPC", "logs of MLPerf HPC")


@dataclass(frozen=True)
class Reference:
    """One published result: minutes to train, or samples per second of one device, or both."""

    source: str
    system: str
    workload: str
    division: str = ""
    devices: int | None = None
    minutes: float | None = None
    per_device: float | None = None


#: Workload, division, system, devices, minutes.
_MINUTES: Final[tuple[tuple[str, str, str, int, float], ...]] = (
    ("cosmoflow", "closed", "Piz Daint", 128, 461.01),
    ("cosmoflow", "closed", "Piz Daint", 256, 327.01),
    ("cosmoflow", "closed", "ABCI", 512, 34.42),
    ("cosmoflow", "closed", "Fugaku", 512, 268.77),
    ("cosmoflow", "closed", "Fugaku", 8192, 101.49),
    ("cosmoflow", "closed", "Cori-GPU", 64, 364.73),
    ("cosmoflow", "closed", "Cori-KNL", 512, 536.06),
    ("cosmoflow", "closed", "HAL", 64, 265.59),
    ("cosmoflow", "closed", "Frontera-RTX", 64, 602.23),
    ("cosmoflow", "open", "ABCI", 2048, 13.21),
    ("cosmoflow", "open", "Fugaku", 16384, 30.07),
    ("cosmoflow", "open", "Cori-KNL", 1024, 419.69),
    ("deepcam", "closed", "ABCI", 1024, 11.71),
    ("deepcam", "closed", "Cori-GPU", 64, 139.29),
    ("deepcam", "open", "ABCI", 1024, 10.49),
)


def references(workload: str) -> tuple[Reference, ...]:
    """Return what is published of *workload*: times first, then rates of rounds of MLPerf HPC."""
    times = [
        Reference(_SC21, system, workload, division, devices, minutes)
        for name, division, system, devices, minutes in _MINUTES
        if name == workload
    ]
    rates = [
        Reference(one.source, one.system, workload, "", one.devices, None, one.per_device)
        for one in PUBLISHED
        if one.workload == workload and one.per_device is not None and SOURCES[one.source].startswith(_ROUNDS)
    ]
    return (*times, *rates)
