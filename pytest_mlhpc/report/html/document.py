"""What stands around a page with curves, put together with it: head, style, content, uPlot, scripts. One file.

Its content security policy names its own scripts and styles by their digests and nothing else, so that a browser fetches
nothing and runs nothing that is not of this package, whatever names the content holds.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

_UPLOT = "vendor/uplot"


def html_of(title: str, body: str, styles: Sequence[str], scripts: Sequence[str], content: str) -> str:
    """Return the file's text. Its encoding is ASCII, so that it reads the same whatever a server says of it.

    Args:
        title: as it is, of whatever origin.
        body: HTML of what is seen, the texts of its *styles*, and of its *scripts*, which become one.
        styles: in the order in which they count, after uPlot's.
        scripts: in the order in which they are read.
        content: JSON that may stand inside of HTML.
    """
    uplot = read(__package__, f"{_UPLOT}/uPlot.iife.min.js")
    script = "\n".join(["(() => {", '"use strict";', *scripts, "})();"])
    style = "\n".join([read(__package__, f"{_UPLOT}/uPlot.min.css"), *styles])
    licence = "".join(f"\n  {line}".rstrip() for line in read(__package__, f"{_UPLOT}/LICENSE").splitlines())
    values = {
        "policy": f"default-src 'none'; script-src {_digest(uplot)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "body": body,
        "content": content,
        "licence": licence.replace("--", "- -"),
        "uplot": uplot,
        "script": script,
    }
    text = filled(read(__package__, "parts/document.html"), values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return *text* with *values* in place of its marks, ``@@name@@``; what is filled in may hold the marks of others."""
    return "".join(values[part] if place % 2 else part for place, part in enumerate(text.split("@@")))


def read(package: str | None, name: str) -> str:
    """Return the text of a package's file.

    Raises:
        ValueError: a style or script holds letters that are not ASCII.
    """
    text = resources.files(package or "").joinpath(name).read_text(encoding="utf-8")
    if not name.endswith(".html") and not text.isascii():
        raise ValueError(f"{name} holds letters that are not ASCII; write them as escapes")
    return text


def _digest(text: str) -> str:
    """Return the source expression of CSP for an inline element with this text (Content Security Policy 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
