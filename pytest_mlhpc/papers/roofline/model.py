"""What a roofline shows, as plain data, and the roof itself. Pure.

The model is that of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures" (Communications of the ACM 52(4), 2009): at *intensity* FLOP per byte a device attains at most
``min(peak of computing, intensity * bandwidth of memory)``. Both peaks are measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_mlhpc.report.machines import Machine


@dataclass(frozen=True)
class Peaks:
    """What one device was measured to do at most. ``flops``: precision -> FLOP/s; bandwidths are B/s.

    ``vector`` and ``cache`` are bytes: of each vector that was moved, and of the last caches; 0 where nothing told.
    """

    flops: Mapping[str, float]
    copy: float
    triad: float
    devices: int
    created_ns: int
    vector: int = 0
    cache: int = 0

    @property
    def cached(self) -> bool:
        """Whether caches held a part of what was moved. STREAM's rule: a vector is 4 times as large as all last caches."""
        return 0 < self.vector < 4 * self.cache

    @property
    def bandwidth(self) -> float:
        """The larger of copy and triad: which of them a device does faster differs."""
        return max(self.copy, self.triad)


@dataclass(frozen=True)
class Trained:
    """A recorded training run of what a point characterises: FLOP/s of one device, whole training epoch included."""

    name: str
    flops: float
    created_ns: int


@dataclass(frozen=True)
class Point:
    """One workload's step on one device.

    ``flops`` is FLOP/s achieved by one device. ``moved`` are the bytes of a step by class, by the model of
    ``node/worker/probes/traffic.py``; ``counted`` is the bandwidth that a counter of the processor told, B/s, if any.
    ``shares`` of the profiled time sum to 1.
    """

    workload: str
    label: str
    precision: str
    batch: int
    flop: float
    moved: float
    flops: float
    step_s: float
    shares: Mapping[str, float]
    created_ns: int
    counted: float | None = None
    counter: str = ""
    trained: tuple[Trained, ...] = ()

    @property
    def intensity(self) -> float:
        """FLOP per byte, by the model."""
        return self.flop / self.moved


@dataclass(frozen=True)
class Device:
    """One kind of device: its peaks, if they were measured, and its points. On CPUs ``share`` are the threads of a rank."""

    machine: Machine
    peaks: Peaks | None
    points: tuple[Point, ...]
    share: str = ""


@dataclass(frozen=True)
class Page:
    """All devices."""

    title: str
    made_ns: int
    since_ns: int
    devices: tuple[Device, ...]
    notes: tuple[str, ...] = field(default=())


def attainable(peaks: Peaks | None, point: Point) -> float | None:
    """Return the roof over *point* in FLOP/s, or None where no peak of its precision was measured."""
    if peaks is None or point.precision not in peaks.flops:
        return None
    return min(peaks.flops[point.precision], point.intensity * peaks.bandwidth)


#: Share of the roof below which neither memory nor computing is called the limit. Ours: bytes are modelled from the sizes of
#: tensors, which caches divide and fused kernels save by a factor of a few; ten is beyond that.
NEAR = 0.1


def bound(peaks: Peaks | None, point: Point) -> str:
    """Return what limits *point* by the model, or an empty string where that is not known.

    That is memory or computing; overhead, where less than :data:`NEAR` of the roof is reached: the device waits for
    something that the model does not have, such as the start of kernels, one core's work, or the exchange of gradients.
    """
    roof = attainable(peaks, point)
    if peaks is None or roof is None:
        return ""
    if point.flops < NEAR * roof:
        return "overhead"
    return "memory" if point.intensity * peaks.bandwidth < peaks.flops[point.precision] else "computing"


def si(value: float, unit: str) -> str:
    """Return *value* with three digits and a prefix: ``51.8 GFLOP/s``."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 0.9995 * 10**power:
            return f"{_digits(value / 10**power)} {prefix}{unit}"
    if 0 < value < 0.9995 and unit == "s":
        return f"{_digits(value * 1e3)} ms" if value >= 0.9995e-3 else f"{_digits(value * 1e6)} us"
    return f"{_digits(value)} {unit}".rstrip()


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
