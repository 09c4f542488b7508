"""The content of a page of the report, read again as its scripts read it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from made_nights import DAY_NS, GivenSource

from pytest_mlhpc.report.html.gather import Wanted, gather
from pytest_mlhpc.report.html.model import Page

_CONTENT = re.compile(r'<script type="application/json" id="content">(.*?)</script>', re.DOTALL)


def content_of(html: str) -> dict[str, Any]:
    (text,) = _CONTENT.findall(html)
    found: dict[str, Any] = json.loads(text)
    return found


def page_of(
    *series: Any, more: Sequence[Any] = (), entries: Any = None, events: Sequence[Any] = (), **wanted: Any
) -> Page:
    """The page of these series, made six hours after the newest night."""
    source = GivenSource(series, more)
    now_ns = max(one.created_ns for one in source.nights()) + DAY_NS // 4
    page = gather(source, Wanted(**{"now_ns": now_ns, **wanted}), entries or {}, events)
    assert page is not None
    return page
