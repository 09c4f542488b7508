"""The one file: frame, style, uPlot, scripts and content put together.

Its content security policy names its own scripts and styles by their digests and nothing else, so that a browser fetches
nothing and runs nothing that is not of this package, whatever names the records hold.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources

from pytest_mlhpc.report.html.encode import encode
from pytest_mlhpc.report.html.model import Page

#: In the order in which they are read; all are one script.
SCRIPTS = (
    "dom.js", "data.js", "format.js", "tooltip.js", "chart.js", "row.js", "benchmarks.js", "overview.js", "bars.js",
    "split.js", "scaling.js", "hosts.js", "route.js", "main.js",
)  # fmt: skip
STYLES = ("page.css", "rows.css", "views.css")
_UPLOT = "vendor/uplot"


def html_of(page: Page) -> str:
    """Return the file's text. Its encoding is ASCII, so that it reads the same whatever a server says of it."""
    uplot = _read(f"{_UPLOT}/uPlot.iife.min.js")
    script = "\n".join(["(() => {", '"use strict";', *(_read(f"parts/{name}") for name in SCRIPTS), "})();"])
    style = "\n".join([_read(f"{_UPLOT}/uPlot.min.css"), *(_read(f"parts/{name}") for name in STYLES)])
    licence = "".join(f"\n  {line}".rstrip() for line in _read(f"{_UPLOT}/LICENSE").splitlines())
    policy = (
        f"default-src 'none'; script-src {_digest(uplot)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": escape(page.title),
        "style": style,
        "licence": licence.replace("--", "- -"),
        "uplot": uplot,
        "script": script,
        "content": encode(page),
    }
    text = _read("parts/page.html")
    # Split first and fill then: what is filled in may hold the marks of others.
    parts = text.split("@@")
    filled = "".join(values[part] if place % 2 else part for place, part in enumerate(parts))
    return filled.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _read(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    if not name.endswith(".html") and not text.isascii():
        raise ValueError(f"{name} holds letters that are not ASCII; write them as escapes")
    return text


def _digest(text: str) -> str:
    """Return the source expression of CSP for an inline element with this text (Content Security Policy 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
