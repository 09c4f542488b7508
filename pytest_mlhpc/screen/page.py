"""``--html FILE``: the report's lines and the curves behind them in one file that asks nobody for anything.

Made as the report of nights is (``report/html/page.py``): its style, its uPlot, a content security policy that names the
file's own scripts and nothing else, and content as JSON in which no name can end its element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from pytest_mlhpc.screen.charts import Chart

_REPORT, _OWN = "pytest_mlhpc.report.html", "pytest_mlhpc.screen"
_UPLOT = "vendor/uplot"
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def html_of(lines: Sequence[str], charts: Iterable[Chart]) -> str:
    """Return the file's text, which is ASCII; *lines* are those of the report, its first the heading."""
    uplot = _read(_REPORT, f"{_UPLOT}/uPlot.iife.min.js")
    parts = (_read(_REPORT, "parts/dom.js"), _read(_OWN, "parts/curves.js"))
    script = "\n".join(["(() => {", '"use strict";', *parts, "})();"])
    style = "\n".join(
        (
            _read(_REPORT, f"{_UPLOT}/uPlot.min.css"),
            _read(_REPORT, "parts/page.css"),
            _read(_OWN, "parts/curves.css"),
        )
    )
    policy = (
        f"default-src 'none'; script-src {_digest(uplot)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    licence = "".join(f"\n  {line}".rstrip() for line in _read(_REPORT, f"{_UPLOT}/LICENSE").splitlines())
    values = {
        "policy": policy,
        "title": escape(lines[0]),
        "style": style,
        "lines": "\n".join(f"<li>{escape(line)}</li>" for line in lines[1:]),
        "licence": licence.replace("--", "- -"),
        "uplot": uplot,
        "script": script,
        "content": encode(charts),
    }
    text = _read(_OWN, "parts/curves.html").split("@@")
    filled = "".join(values[part] if place % 2 else part for place, part in enumerate(text))
    return filled.encode("ascii", "xmlcharrefreplace").decode("ascii")


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


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the source expression of CSP for an inline element with this text (Content Security Policy 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
