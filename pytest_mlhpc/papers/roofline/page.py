"""The roofline page: one HTML file without scripts, which asks for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from importlib import resources

from pytest_mlhpc.papers.roofline.chart import svg_of
from pytest_mlhpc.papers.roofline.model import Device, Page, Point, attainable, bound, si
from pytest_mlhpc.papers.roofline.text import classes_of, memory_of, name_of, peaks_of
from pytest_mlhpc.store.text import minutes

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


def html_of(page: Page) -> str:
    """Return the file's text. Its encoding is ASCII, so that it reads the same whatever a server says of it."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = escape(page.title)
    parts = [
        "<!doctype html>",
        '<html lang="en" data-ready>',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f"<h1>{title}</h1>",
        f'<p class="small">made {minutes(page.made_ns)}, from runs since {minutes(page.since_ns)}</p>',
        f"<p>{_EXPLAINED}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in page.notes),
        *(line for device in page.devices for line in _device(device)),
        "</body>",
        "</html>",
    ]
    text = "\n".join(parts) + "\n"
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _device(device: Device) -> Iterator[str]:
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


def _rows(device: Device, number: int, point: Point) -> Iterator[str]:
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
    told = "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells)
    yield f"<tr>{told}<td>{_bar(point)}{escape(classes_of(point))}</td></tr>"
    for one in point.trained:
        share = f"{one.flops / roof:.1%}" if roof else "-"
        when = f"as trained by {one.name}, {minutes(one.created_ns)}"
        yield (
            f'<tr class="trained-row"><td></td><td colspan="3">{escape(when)}</td>'
            f'<td class="n">{si(one.flops, "FLOP/s")}</td><td></td><td class="n">{share}</td><td colspan="3"></td></tr>'
        )


def _bar(point: Point) -> str:
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
