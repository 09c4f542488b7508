"""``--output FILE``: the report's lines and the curves behind them in one file that asks nobody for anything.

In the frame and with the style of the report of nights (``report/html/document.py``), and content as JSON in which no name can
end its element.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pytest_mlhpc.report.html import document
from pytest_mlhpc.screen.charts import Chart

_REPORT, _OWN = "pytest_mlhpc.report.html", "pytest_mlhpc.screen"
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def html_of(lines: Sequence[str], charts: Iterable[Chart]) -> str:
    """Return the file's text, which is ASCII; *lines* are those of the report, its first the heading."""
    seen = {
        "title": escape(lines[0]),
        "lines": "\n".join(f"<li>{escape(line)}</li>" for line in lines[1:]),
    }
    body = document.filled(document.read(_OWN, "parts/curves.html"), seen)
    styles = (document.read(_REPORT, "parts/page.css"), document.read(_OWN, "parts/curves.css"))
    scripts = (document.read(_REPORT, "parts/dom.js"), document.read(_OWN, "parts/curves.js"))
    return document.html_of(lines[0], body, styles, scripts, encode(charts))


def encode(charts: Iterable[Chart]) -> str:
    """Return the charts as JSON that may stand inside of HTML."""
    content: list[dict[str, Any]] = [
        {
            "title": chart.title,
            "unit": chart.unit,
            "times": [round(time, 3) for time in chart.times],
            "names": [name for name, _ in chart.curves],
            "curves": [
                [None if value is None else float(f"{value:.5g}") for value in values]
                for _, values in chart.curves
            ],
        }
        for chart in charts
    ]
    return json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
