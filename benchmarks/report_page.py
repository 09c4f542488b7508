"""The report with 288 rows and 200,000 figures, in Debian's Chromium: size, first paint, scrolling, heap.

Wall times are the browser's own; beside them stands the processor time that the page's process took, as the wall says
little of a machine that does other things.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.report import Row
from pytest_mlhpc.report.html.page import html_of
from pytest_mlhpc.report.html.page_data import PageQuery, gather

_TESTS = Path(__file__).resolve().parents[1] / "tests"

#: 3 systems x 24 benchmarks x 4 metrics, 694 nights each.
BENCHMARKS, NIGHTS = 24, 694
_REACH = {"size": 7.0, "paint": 1.0, "scroll": 3.0, "heap": 40.0}

_PAINTED = """() => new Promise((done) => {
  const look = () => (document.querySelector('.chart canvas') ? requestAnimationFrame(() => requestAnimationFrame(
    () => done(performance.now() / 1000))) : requestAnimationFrame(look));
  look();
})"""

#: A screen a frame, to the end, and until nothing more is drawn.
_SCROLLED = """() => new Promise((done) => {
  const began = performance.now();
  let drawn = new Set();
  const step = () => {
    for (const chart of document.querySelectorAll('.chart')) if (chart.plot) drawn.add(chart);
    if (scrollY + innerHeight < document.documentElement.scrollHeight - 1) {
      scrollBy(0, innerHeight);
      requestAnimationFrame(step);
    } else {
      requestAnimationFrame(() => requestAnimationFrame(() => done([(performance.now() - began) / 1000, drawn.size])));
    }
  };
  requestAnimationFrame(step);
})"""


def run() -> list[Row]:
    """Make the page, open it, scroll it."""
    with tempfile.TemporaryDirectory(prefix="mlhpc-report-") as folder:
        path = Path(folder) / "report.html"
        rows, figures, began = _make(path)
        size = path.stat().st_size / 1e6
        found = _measure(path)
    return [
        Row(
            f"made of {figures:,} figures in {rows} rows",
            "-",
            f"{began:.1f} s of CPU, change points included",
            None,
        ),
        Row("size of the file", "<= 7 MB", f"{size:.2f} MB", size <= _REACH["size"]),
        _timed("first charts painted after opening", found["paint"], _REACH["paint"]),
        _timed(f"scrolling through all, {found['drawn']} charts drawn", found["scroll"], _REACH["scroll"]),
        Row("heap after that", "<= 40 MB", f"{found['heap']:.1f} MB", found["heap"] <= _REACH["heap"]),
        Row("complaints on the console", "0", str(len(found["errors"])), not found["errors"]),
        Row("requests beside the file's own", "0", str(found["requests"] - 1), found["requests"] == 1),
    ]


def _timed(what: str, measured: tuple[float, float], reach: float) -> Row:
    wall, cpu = measured
    return Row(what, f"<= {reach:.0f} s", f"{wall:.2f} s ({cpu:.2f} s of CPU)", wall <= reach)


def _make(path: Path) -> tuple[int, int, float]:
    """Write the page; return its rows, its figures, and the CPU seconds that it took."""
    made = _of_tests("made_nights")
    names = [f"test_benchmark_{number:02}" for number in range(BENCHMARKS)]
    source = made.a_year(NIGHTS, names=names, scales=(1,))
    began = time.process_time()
    page = gather(source, PageQuery(now_ns=made.FIRST_NS + NIGHTS * made.DAY_NS), {})
    if page is None:
        raise RuntimeError("nothing was gathered")
    path.write_text(html_of(page), encoding="ascii")
    took = time.process_time() - began
    rows = [row for bench in page.benches for row in bench.rows]
    return len(rows), sum(value is not None for row in rows for value in row.values), took


def _measure(path: Path) -> dict[str, Any]:
    service = _of_tests("browser_service")
    errors: list[str] = []
    requests: list[str] = []
    with sync_playwright() as playwright:
        browser = service.launch(playwright, service.chromium(install=False))
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(service.LIMIT_S * 1000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.goto(f"{path.as_uri()}#view=benchmarks&metric=*", wait_until="commit")
        paint = page.evaluate(_PAINTED)
        painted = _cpu(session)
        scroll, drawn = page.evaluate(_SCROLLED)
        scrolled = _cpu(session)
        heap = page.evaluate("() => { gc(); return performance.memory.usedJSHeapSize / 1e6; }")
        browser.close()
    return {
        "paint": (paint, painted),
        "scroll": (scroll, scrolled - painted),
        "drawn": drawn,
        "heap": heap,
        "errors": errors,
        "requests": len(requests),
    }


def _of_tests(name: str) -> Any:
    """Return a module of the tests: what is measured is what they test."""
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))
    return importlib.import_module(name)


def _cpu(session: Any) -> float:
    """Return the CPU seconds of the page's process so far."""
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["ProcessTime"])
