"""Weak and strong scaling with efficiency, from measured points. Pure.

Strong: the whole batch stays; weak: the batch of one device does. The efficiency of N devices is their rate per device over
that of the fewest devices measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_mlhpc.papers.mlperf.points import Point, by_training

STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True)
class Step:
    """One number of devices. ``speedup`` is over the fewest."""

    point: Point
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Curve:
    """One training on one machine at one batch: ``batch`` is of all devices (strong) or of one (weak)."""

    kind: str
    training: str
    machine: str
    batch: float
    steps: tuple[Step, ...]


def curves(found: Sequence[Point]) -> tuple[Curve, ...]:
    """Return all curves with two numbers of devices or more; strong ones first."""
    made = [curve for kind in (STRONG, WEAK) for curve in _of(kind, found)]
    return tuple(curve for curve in made if len(curve.steps) > 1)


def _of(kind: str, found: Sequence[Point]) -> Iterator[Curve]:
    for (training, machine), points in by_training(found).items():
        batches: dict[float, list[Point]] = {}
        for point in points:
            batch = point.place.batch / (point.place.devices if kind == WEAK else 1)
            batches.setdefault(batch, []).append(point)
        for batch in sorted(batches):
            yield Curve(kind, training, machine, batch, _steps(batches[batch]))


def _steps(some: Sequence[Point]) -> tuple[Step, ...]:
    ordered = sorted(some, key=lambda one: one.place.devices)
    first = ordered[0]
    return tuple(
        Step(one, one.rate / first.rate, one.rate / first.rate * first.place.devices / one.place.devices)
        for one in ordered
    )
