"""The one file: what is seen, its style, scripts and content, in the frame of all pages with curves (``document.py``)."""

from __future__ import annotations

from html import escape

from pytest_mlhpc.report.html import document
from pytest_mlhpc.report.html.encode import encode
from pytest_mlhpc.report.html.model import Page

#: In the order in which they are read; all are one script.
SCRIPTS = (
    "dom.js", "data.js", "format.js", "tooltip.js", "chart.js", "row.js", "benchmarks.js", "overview.js", "bars.js",
    "split.js", "scaling.js", "hosts.js", "route.js", "main.js",
)  # fmt: skip
STYLES = ("page.css", "rows.css", "views.css")


def html_of(page: Page) -> str:
    """Return the file's text, which is ASCII."""
    body = document.filled(_read("page.html"), {"title": escape(page.title)})
    return document.html_of(
        page.title, body, list(map(_read, STYLES)), list(map(_read, SCRIPTS)), encode(page)
    )


def _read(name: str) -> str:
    return document.read(__package__, f"parts/{name}")
