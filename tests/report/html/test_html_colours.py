"""Colours of the report: all that is read has enough contrast, in both themes (WCAG 2.2, 1.4.3 and 1.4.11)."""

import re
from importlib import resources

import pytest

CSS = resources.files("pytest_mlhpc.report.html").joinpath("parts/page.css").read_text(encoding="utf-8")
TEXT = ("text", "muted", "link", "ok", "unsure", "slow", "broken", "machine", "missing", "event")
DRAWN = ("line", "accepted", "io", "communication", "compute", *(f"curve{number}" for number in range(1, 7)))


def themes():
    blocks = re.findall(r":root[^{]*\{(.*?)\}", CSS, re.DOTALL)
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in blocks)
    return {"light": light, "dark": {**light, **dark}}


def luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    ("ground", "names", "least"), [("ground", TEXT, 4.5), ("raised", TEXT, 4.5), ("ground", DRAWN, 3.0)]
)
def test_what_is_read_or_drawn_stands_out(theme, ground, names, least):
    colours = themes()[theme]
    ratios = {name: round(contrast(colours[name], colours[ground]), 2) for name in names}
    assert not {name: ratio for name, ratio in ratios.items() if ratio < least}
