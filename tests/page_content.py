"""The content of a page of the report, read again as its scripts read it."""

import json
import re

from made_nights import DAY_NS, GivenSource, night

from pytest_mlhpc.report.html.page_data import PageQuery, gather

_CONTENT = re.compile(r'<script type="application/json" id="content">(.*?)</script>', re.DOTALL)


def content_of(html):
    (text,) = _CONTENT.findall(html)
    return json.loads(text)


def page_of(*series, more=(), entries=None, events=(), **wanted):
    """The page of these series, made six hours after the newest night."""
    source = GivenSource(series, more)
    now_ns = max(one.created_ns for one in source.nights()) + DAY_NS // 4
    page = gather(source, PageQuery(**{"now_ns": now_ns, **wanted}), entries or {}, events)
    assert page is not None
    return page


def nights(count, **changes):
    """The first nights of a benchmark."""
    return [night(number, **changes) for number in range(count)]
