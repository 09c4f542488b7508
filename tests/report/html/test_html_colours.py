"""Colours of the report: all that is read has enough contrast, in both themes (WCAG 2.2, 1.4.3 and 1.4.11)."""

from __future__ import annotations

import re
from importlib import resources

import pytest

CSS = resources.files("pytest_mlhpc.report.html").joinpath("parts/page.css").read_text(encoding="utf-8")
TEXT = ("text", "muted", "link", "ok", "unsure", "slow", "broken", "machine", "missing", "event")
DRAWN = (
    "line",
    "accepted",
    "io",
    "communication",
    "compute",
    "curve1",
    "curve2",
    "curve3",
    "curve4",
    "curve5",
    "curve6",
)


def themes():
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root[^{]*\{(.*?)\}", CSS, re.DOTALL)
    )
    return {"light": light, "dark": {**light, **dark}}


def luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["ground", "raised"])
def test_text_stands_out(theme, ground):
    colours = themes()[theme]
    faint = {name: round(contrast(colours[name], colours[ground]), 2) for name in TEXT}
    assert not {name: ratio for name, ratio in faint.items() if ratio < 4.5}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_drawn_stands_out(theme):
    colours = themes()[theme]
    faint = {name: round(contrast(colours[name], colours["ground"]), 2) for name in DRAWN}
    assert not {name: ratio for name, ratio in faint.items() if ratio < 3.0}
