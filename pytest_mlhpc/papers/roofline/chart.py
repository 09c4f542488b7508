"""The roofline of one device as SVG: both axes logarithmic, roofs from measured peaks. Styles are classes of page.css."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from pytest_mlhpc.papers.roofline.model import Device, Peaks, si

WIDTH, HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 16, 48
#: Lines and points have the class ``c0`` to ``c5``, by workload.
_COLOURS = 6


@dataclass(frozen=True)
class Scale:
    """One logarithmic axis: from *low* to *high* on pixels *start* to *end*."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of *value*, which is kept within the axis."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[float]:
        """Yield the powers of ten on the axis, on a short one 2 and 5 times those too."""
        between = (1.0, 2.0, 5.0) if self.high / self.low < 2e3 else (1.0,)
        for power in range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1):
            for times in between:
                if self.low <= times * 10.0**power <= self.high:
                    yield times * 10.0**power


def axes(device: Device, peaks: Peaks) -> tuple[Scale, Scale]:
    """Return the axes that hold all points and the ridges of all roofs."""
    ridges = [value / peaks.bandwidth for value in peaks.flops.values()]
    across = [*ridges, *(point.intensity for point in device.points)]
    trained = [one.flops for point in device.points for one in point.trained]
    up = [*peaks.flops.values(), *(point.flops for point in device.points), *trained]
    left, right = min(across) / 4, max(across) * 6
    lowest = min(*up, left * peaks.bandwidth) / 1.6
    return Scale(left, right, _LEFT, WIDTH - _RIGHT), Scale(lowest, max(up) * 2.2, HEIGHT - _BOTTOM, _TOP)


def colours(device: Device) -> dict[str, str]:
    """Return workload -> its class."""
    names = dict.fromkeys(point.workload for point in device.points)
    return {name: f"c{place % _COLOURS}" for place, name in enumerate(names)}


def svg_of(device: Device) -> str:
    """Return the chart, or an empty text where the device has no peak of computing to draw a roof from."""
    peaks = device.peaks
    if peaks is None or not peaks.flops:
        return ""
    x, y = axes(device, peaks)
    parts = [*_grid(x, y), *_roofs(peaks, x, y), *_points(device, x, y)]
    label = (
        f"Roofline of {device.machine.device_model or device.machine.id}: FLOP per second over FLOP per byte"
    )
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *parts, "</svg>"])


def _grid(x: Scale, y: Scale) -> Iterator[str]:
    for value in x.ticks():
        at = f"{x.at(value):.1f}"
        yield f'<line class="grid" x1="{at}" x2="{at}" y1="{y.end}" y2="{y.start}"/>'
        yield f'<text class="tick" x="{at}" y="{y.start + 18}" text-anchor="middle">{value:g}</text>'
    for value in y.ticks():
        at = f"{y.at(value):.1f}"
        yield f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at}" y2="{at}"/>'
        yield f'<text class="tick" x="{x.start - 8}" y="{at}" dy="0.32em" text-anchor="end">{si(value, "FLOP/s")}</text>'
    middle = (x.start + x.end) / 2
    yield f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">FLOP per byte (modelled)</text>'


def _roofs(peaks: Peaks, x: Scale, y: Scale) -> Iterator[str]:
    highest = max(peaks.flops.values())
    ridge = highest / peaks.bandwidth
    yield _line("roof", x.at(x.low), y.at(x.low * peaks.bandwidth), x.at(ridge), y.at(highest))
    text = f"memory {si(peaks.bandwidth, 'B/s')}"
    start = x.low * 1.3
    yield _text("roofname", x.at(start) + 14, y.at(start * peaks.bandwidth) + 12, text)  # below the line
    for precision, value in sorted(peaks.flops.items(), key=lambda one: -one[1]):
        at = y.at(value)
        yield _line("roof", x.at(value / peaks.bandwidth), at, x.end, at)
        name = f"{precision} {si(value, 'FLOP/s')}"
        yield f'<text class="roofname" x="{x.end - 4:.1f}" y="{at - 6:.1f}" text-anchor="end">{escape(name)}</text>'


def _points(device: Device, x: Scale, y: Scale) -> Iterator[str]:
    kinds = colours(device)
    for number, point in enumerate(device.points, 1):
        across = x.at(point.intensity)
        told = f"{point.label}: {si(point.flops, 'FLOP/s')} at {point.intensity:.3g} FLOP/byte"
        yield (
            f'<circle class="point {kinds[point.workload]}" cx="{across:.1f}" cy="{y.at(point.flops):.1f}" r="6">'
            f"<title>{escape(told)}</title></circle>"
        )
        yield _text("number", across + 9, y.at(point.flops) + 4, str(number))
        for one in point.trained:
            trained = f"as trained by {one.name}: {si(one.flops, 'FLOP/s')}"
            at = y.at(one.flops)
            yield (
                f'<rect class="trained {kinds[point.workload]}" x="{across - 4:.1f}" y="{at - 4:.1f}" width="8" height="8">'
                f"<title>{escape(trained)}</title></rect>"
            )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
