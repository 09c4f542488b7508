"""The roofline page: the chart of each device as SVG, one HTML file without scripts, and a table for a terminal."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from pytest_mlhpc.node.files import clean
from pytest_mlhpc.report.figures import MeasuredMachine
from pytest_mlhpc.store.text import iso, minutes, one_line, table


@dataclass(frozen=True)
class Peaks:
    """What one device was measured to do at most. ``flops``: precision -> FLOP/s; bandwidths are B/s.

    ``vector`` and ``cache`` are bytes: of each vector that was moved, and of the last caches; 0 where nothing reported them.
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
        """Whether caches had a part of what was moved. STREAM's rule: a vector is 4 times as large as all last caches."""
        return 0 < self.vector < 4 * self.cache

    @property
    def bandwidth(self) -> float:
        """The larger of copy and triad: which of them a device does faster differs."""
        return max(self.copy, self.triad)


@dataclass(frozen=True)
class RecordedTraining:
    """A recorded training run of what a point characterises: FLOP/s of one device, whole training epoch included."""

    name: str
    flops: float
    created_ns: int


@dataclass(frozen=True)
class RooflinePoint:
    """One workload's step on one device.

    ``flops`` is FLOP/s achieved by one device. ``moved`` are the bytes of a step by class, by the model of
    ``node/worker/probes/kernels.py``; ``counted`` is the bandwidth that a counter of the processor gave, B/s, if any.
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
    trained: tuple[RecordedTraining, ...] = ()

    @property
    def intensity(self) -> float:
        """FLOP per byte, by the model."""
        return self.flop / self.moved


@dataclass(frozen=True)
class DeviceRoofline:
    """One kind of device: its peaks, if they were measured, and its points. On CPUs ``share`` are the threads of a rank."""

    machine: MeasuredMachine
    peaks: Peaks | None
    points: tuple[RooflinePoint, ...]
    share: str = ""


@dataclass(frozen=True)
class RooflinePage:
    """All devices."""

    title: str
    made_ns: int
    since_ns: int
    devices: tuple[DeviceRoofline, ...]
    notes: tuple[str, ...] = field(default=())


def attainable(peaks: Peaks | None, point: RooflinePoint) -> float | None:
    """Return the roof over *point* in FLOP/s, or None where no peak of its precision was measured."""
    if peaks is None or point.precision not in peaks.flops:
        return None
    return min(peaks.flops[point.precision], point.intensity * peaks.bandwidth)


#: Share of the roof below which neither memory nor computing is called the limit. Ours: bytes are modelled from the sizes of
#: tensors, which caches divide and fused kernels save by a factor of a few; ten is beyond that.
NEAR = 0.1


def bound(peaks: Peaks | None, point: RooflinePoint) -> str:
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


WIDTH, HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 24, 16, 48
#: Lines and points have the class ``c0`` to ``c5``, by workload.
COLOURS = 6


@dataclass(frozen=True)
class AxisScale:
    """One logarithmic axis: from *low* to *high* on pixels *start* to *end*."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of *value*, limited to the axis."""
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


def axes(device: DeviceRoofline, peaks: Peaks) -> tuple[AxisScale, AxisScale]:
    """Return the axes that hold all points and the ridges of all roofs."""
    ridges = [value / peaks.bandwidth for value in peaks.flops.values()]
    across = [*ridges, *(point.intensity for point in device.points)]
    trained = [one.flops for point in device.points for one in point.trained]
    up = [*peaks.flops.values(), *(point.flops for point in device.points), *trained]
    left, right = min(across) / 4, max(across) * 6
    lowest = min(*up, left * peaks.bandwidth) / 1.6
    return AxisScale(left, right, _LEFT, WIDTH - _RIGHT), AxisScale(
        lowest, max(up) * 2.2, HEIGHT - _BOTTOM, _TOP
    )


def colours(device: DeviceRoofline) -> dict[str, str]:
    """Return workload -> its class."""
    names = dict.fromkeys(point.workload for point in device.points)
    return {name: f"c{place % COLOURS}" for place, name in enumerate(names)}


def svg_of(device: DeviceRoofline) -> str:
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


def _grid(x: AxisScale, y: AxisScale) -> Iterator[str]:
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


def _roofs(peaks: Peaks, x: AxisScale, y: AxisScale) -> Iterator[str]:
    highest = max(peaks.flops.values())
    ridge = highest / peaks.bandwidth
    yield line_of("roof", x.at(x.low), y.at(x.low * peaks.bandwidth), x.at(ridge), y.at(highest))
    text = f"memory {si(peaks.bandwidth, 'B/s')}"
    start = x.low * 1.3
    yield _text("roofname", x.at(start) + 14, y.at(start * peaks.bandwidth) + 12, text)  # below the line
    for precision, value in sorted(peaks.flops.items(), key=lambda one: -one[1]):
        at = y.at(value)
        yield line_of("roof", x.at(value / peaks.bandwidth), at, x.end, at)
        name = f"{precision} {si(value, 'FLOP/s')}"
        yield f'<text class="roofname" x="{x.end - 4:.1f}" y="{at - 6:.1f}" text-anchor="end">{escape(name)}</text>'


def _points(device: DeviceRoofline, x: AxisScale, y: AxisScale) -> Iterator[str]:
    kinds = colours(device)
    for number, point in enumerate(device.points, 1):
        across = x.at(point.intensity)
        markup = f"{point.label}: {si(point.flops, 'FLOP/s')} at {point.intensity:.3g} FLOP/byte"
        yield (
            f'<circle class="point {kinds[point.workload]}" cx="{across:.1f}" cy="{y.at(point.flops):.1f}" r="6">'
            f"<title>{escape(markup)}</title></circle>"
        )
        yield _text("number", across + 9, y.at(point.flops) + 4, str(number))
        for one in point.trained:
            trained = f"as trained by {one.name}: {si(one.flops, 'FLOP/s')}"
            at = y.at(one.flops)
            yield (
                f'<rect class="trained {kinds[point.workload]}" x="{across - 4:.1f}" y="{at - 4:.1f}" width="8" height="8">'
                f"<title>{escape(trained)}</title></rect>"
            )


def line_of(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line of SVG, in pixels."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


_COLUMNS = ("workload", "FLOP/byte", "achieved", "of attainable", "bound by", "memory moved", "time in")
#: Classes of kernels that a line names.
_MOST = 3


def text_of(page: RooflinePage) -> str:
    """Return the page's text, safe to print."""
    parts = [f"since {minutes(page.since_ns)}; bytes are modelled where nothing else is said\n"]
    parts += [_device_lines(device) for device in page.devices]
    parts += [f"note: {one_line(note, 400)}\n" for note in page.notes]
    return clean("\n".join(parts))


def data_of(page: RooflinePage | None) -> dict[str, Any]:
    """Return the page for programs: rates of one device in FLOP/s and B/s, times in seconds. Without a page it has no devices."""
    return {
        "devices": [_device_data(device) for device in page.devices] if page else [],
        "notes": list(page.notes) if page else [],
    }


def _device_data(device: DeviceRoofline) -> dict[str, Any]:
    machine, peaks = device.machine, device.peaks
    return {
        "machine": machine.id,
        "environment": machine.environment,
        "device_model": machine.device_model,
        "share": device.share,
        "peaks": {
            "flops": dict(peaks.flops),
            "copy": peaks.copy,
            "triad": peaks.triad,
            "cached": peaks.cached,
            "at": iso(peaks.created_ns),
        }
        if peaks
        else None,
        "points": [
            {
                "workload": point.workload,
                "label": point.label,
                "precision": point.precision,
                "batch": point.batch,
                "intensity": point.intensity,
                "flops": point.flops,
                "attainable": attainable(peaks, point),
                "bound_by": bound(peaks, point) or None,
                "step_s": point.step_s,
                "modelled": point.moved / point.step_s,
                "counted": point.counted,
                "shares": dict(point.shares),
                "trained": [{"name": one.name, "flops": one.flops} for one in point.trained],
            }
            for point in device.points
        ],
    }


def name_of(device: DeviceRoofline) -> str:
    """Return how a device is called."""
    machine = device.machine
    labels = [machine.id, machine.device_model, machine.environment, device.share]
    return one_line(", ".join(word for word in labels if word))


def peaks_of(device: DeviceRoofline) -> str:
    """Return the peaks in one line."""
    if device.peaks is None:
        return "no peaks are recorded"
    products = [
        f"{precision} {si(value, 'FLOP/s')}" for precision, value in sorted(device.peaks.flops.items())
    ]
    moved = [f"copy {si(device.peaks.copy, 'B/s')}", f"triad {si(device.peaks.triad, 'B/s')}"]
    shared = f" (share of one of {device.peaks.devices})" if device.peaks.devices > 1 else ""
    return f"measured peaks{shared}: {', '.join([*products, *moved])}, {minutes(device.peaks.created_ns)}"


def _device_lines(device: DeviceRoofline) -> str:
    lines = f"{name_of(device)}\n  {peaks_of(device)}\n"
    if not device.points:
        return lines
    rows = [row for point in device.points for row in _table_rows(device, point)]
    return lines + "".join(f"  {line}\n" for line in table([_COLUMNS, *rows]).splitlines())


def _table_rows(device: DeviceRoofline, point: RooflinePoint) -> Iterator[tuple[str, ...]]:
    roof = attainable(device.peaks, point)
    share = f"{point.flops / roof:.1%}" if roof else "-"
    yield (
        point.label,
        f"{point.intensity:.3g}",
        si(point.flops, "FLOP/s"),
        share,
        bound(device.peaks, point) or "-",
        memory_of(point),
        classes_of(point),
    )
    for one in point.trained:
        whole = f"{one.flops / roof:.1%}" if roof else "-"
        yield (f"  as trained by {one.name}", "", si(one.flops, "FLOP/s"), whole, "", "", "")


def memory_of(point: RooflinePoint) -> str:
    """Return the bandwidth to memory: as counted where a counter was read, else by the model, and which of them it is."""
    if point.counted:
        return f"{si(point.counted, 'B/s')} counted"
    return f"{si(point.moved / point.step_s, 'B/s')} modelled"


def classes_of(point: RooflinePoint) -> str:
    """Return the classes of kernels that take most of the time."""
    largest = sorted(point.shares.items(), key=lambda one: -one[1])[:_MOST]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= 0.005)


_EXPLAINED = (
    "A circle is a training step by itself, on a batch that lies on the device; a square is the same step within a recorded "
    "training run, reading and communication included. Above it, the roof is what the device can do at most: moving bytes "
    "on the left, computing on the right, both as measured there. Bytes are a model unless a counter is named: every "
    "operator reads its tensors once and writes its results once. So a point can lie above the slanted roof: caches kept what "
    "the model moves. Above the level one, the peak is too low: measure peaks again, with larger matrices or on a quiet machine."
)
_HEAD = (
    ("", "n"), ("workload", ""), ("FLOP/byte", "n"), ("step", "n"), ("achieved", "n"), ("attainable", "n"), ("share", "n"),
    ("bound by", ""), ("memory traffic", ""), ("time in", ""),
)  # fmt: skip
#: Classes that a bar tells apart; the rest is grey.
_TOLD = 6


def html_of(page: RooflinePage) -> str:
    """Return the file's text."""
    return document(
        page.title,
        [
            f'<p class="small">made {minutes(page.made_ns)}, from runs since {minutes(page.since_ns)}</p>',
            f"<p>{_EXPLAINED}</p>",
            *(f'<p class="note">{escape(note)}</p>' for note in page.notes),
            *(line for device in page.devices for line in _device(device)),
        ],
    )


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of one file with *body*, lines of HTML, under *title*, without scripts.

    Its encoding is ASCII, so that it reads the same whatever a server says of it.
    """
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en" data-ready>',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        *body,
        "</body>",
        "</html>",
    ]
    text = "\n".join(parts) + "\n"
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _device(device: DeviceRoofline) -> Iterator[str]:
    yield "<section>"
    yield f"<h2>{escape(name_of(device))}</h2>"
    yield f'<p class="small">{escape(peaks_of(device))}</p>'
    yield svg_of(device)
    if device.points:
        yield '<div class="scroll"><table>'
        cells = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in _HEAD)
        yield f"<thead><tr>{cells}</tr></thead><tbody>"
        for number, point in enumerate(device.points, 1):
            yield from _rows(device, number, point)
        yield "</tbody></table></div>"
    yield "</section>"


def _rows(device: DeviceRoofline, number: int, point: RooflinePoint) -> Iterator[str]:
    roof = attainable(device.peaks, point)
    cells = (
        (str(number), "n"),
        (point.label, ""),
        (f"{point.intensity:.3g}", "n"),
        (si(point.step_s, "s"), "n"),
        (si(point.flops, "FLOP/s"), "n"),
        (si(roof, "FLOP/s") if roof else f"no {point.precision} peak", "n"),
        (f"{point.flops / roof:.1%}" if roof else "-", "n"),
        (bound(device.peaks, point) or "-", ""),
        (memory_of(point), ""),
    )
    markup = "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells)
    yield f"<tr>{markup}<td>{_bar(point)}{escape(classes_of(point))}</td></tr>"
    for one in point.trained:
        share = f"{one.flops / roof:.1%}" if roof else "-"
        when = f"as trained by {one.name}, {minutes(one.created_ns)}"
        yield (
            f'<tr class="trained-row"><td></td><td colspan="3">{escape(when)}</td>'
            f'<td class="n">{si(one.flops, "FLOP/s")}</td><td></td><td class="n">{share}</td><td colspan="3"></td></tr>'
        )


def _bar(point: RooflinePoint) -> str:
    """Return the shares of kernels as one bar, the largest first."""
    ordered = sorted(((share, name) for name, share in point.shares.items() if share > 0), reverse=True)
    parts, at = [], 0.0
    for place, (share, name) in enumerate(ordered):
        title = f"<title>{escape(name)} {share:.1%}</title>"
        kind = f"s{min(place, _TOLD)}"
        parts.append(
            f'<rect class="{kind}" x="{at:.2f}" y="0" width="{share * 100:.2f}" height="10">{title}</rect>'
        )
        at += share * 100
    label = escape(f"shares of time: {', '.join(f'{name} {share:.1%}' for share, name in ordered)}")
    inner = "".join(parts)
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{label}">{inner}</svg>'
