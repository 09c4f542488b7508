"""Draws the pictures of docs/report.md: made-up nights, the page that is made of them, and a real browser. ``make pictures``."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

from browser_service import chromium
from made_nights import DAY_NS, FIRST_NS, GivenSource, a_year, benchmark, night, series

from pytest_mlhpc.history.events import new_event
from pytest_mlhpc.history.series import Series
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.report.html.page import html_of
from pytest_mlhpc.report.html.page_data import PageQuery, gather
from pytest_mlhpc.store.record import SeriesKey

DOCS = Path(__file__).parent.parent / "docs"
#: Picture -> the page it shows, what stands behind the #, width and height in pixels, dark.
PICTURES = {
    "overview": ("site", "view=overview", 1100, 900, False),
    "list": ("site", "view=list", 1100, 620, False),
    "benchmarks": ("site", "view=benchmarks&system=archer2", 1100, 660, False),
    "systems": ("site", "view=systems&q=deepcam", 1100, 520, False),
    "year": ("year", "view=benchmarks", 1280, 560, False),
    "phone": ("site", "view=list", 390, 844, True),
}
OWNERS = {"test_cosmoflow": "@hpc/training", "test_deepcam": "ada@example.org"}


def accepted(source: GivenSource) -> Mapping[SeriesKey, Entry]:
    """Return the first night's figures of judged series as accepted values."""
    first = {one.key: one.points[0] for one in source.series() if one.judged}
    units = {one.key: (one.unit, one.better) for one in source.series()}
    return {
        key: Entry(
            point.value,
            *units[key],
            0.05,
            point.night.definition,
            point.night.device_model,
            reason="first night",
        )
        for key, point in first.items()
    }


def owned(one: Series) -> Series:
    """Return the series with owners, commits and pipelines as a site has them."""
    owner = next((who for name, who in OWNERS.items() if name in one.key.benchmark), "")
    points = tuple(
        dataclasses.replace(
            point,
            night=dataclasses.replace(
                point.night, owner=owner, pipeline=str(5000 + number), job_id=f"77{number:03}"
            ),
        )
        for number, point in enumerate(one.points)
    )
    return dataclasses.replace(one, points=points)


def site() -> str:
    """Return the page of three systems; one became slower with a driver."""
    nights = 90
    made = a_year(nights, names=("test_cosmoflow", "test_deepcam"), scales=(1, 2))
    figures = [owned(one) for one in made.series()]
    measured = {point.night.id for one in figures for point in one.points}
    source = GivenSource(figures, [one for one in made.nights() if one.id not in measured])
    event = new_event("archer2", "", "driver 570 to 580", at_ns=FIRST_NS + 67 * DAY_NS, by="me", now_ns=0)
    asked = PageQuery(
        FIRST_NS + nights * DAY_NS, links={"commit": "https://git.example.org/-/commit/{commit}"}
    )
    page = gather(source, asked, accepted(source), [event])
    assert page is not None
    return html_of(page)


def year() -> str:
    """Return the page of one benchmark over a year: a driver from night 60 to 90, a file system from 150 to 185."""
    dice = random.Random(5)  # noqa: S311 - the same each time
    drivers = ["550"] * 60 + ["570"] * 30 + ["575"] * 275
    name = {
        "system": "alps",
        "benchmark": benchmark("test_resnet50"),
        "judged": ("compute_throughput", "effective_throughput"),
    }
    nights = [night(n, changes={"driver": drivers[n]}, **name) for n in range(365)]
    compute = [(117.5 if 60 <= n < 90 else 125.0) * dice.gauss(1, 0.006) for n in range(365)]
    files = [0.87 if 150 <= n < 165 else 0.7 if 165 <= n < 185 else 1.0 for n in range(365)]
    whole = [value * 0.8 * share * dice.gauss(1, 0.003) for value, share in zip(compute, files, strict=True)]
    source = GivenSource([series(nights, compute, "compute_throughput"), series(nights, whole)])
    events = [
        new_event("alps", "", text, at_ns=FIRST_NS + number * DAY_NS, by="me", now_ns=0)
        for number, text in ((60, "driver 550 to 570"), (90, "driver 575 instead of 570"))
    ]
    page = gather(
        source, PageQuery(FIRST_NS + 365 * DAY_NS, title="A simulated year"), accepted(source), events
    )
    assert page is not None
    return html_of(page)


def main() -> None:
    """Draw all of them."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for name, text in (("site", site()), ("year", year())):
            (Path(folder) / f"{name}.html").write_text(text, encoding="ascii")
        browser = playwright.chromium.launch(
            executable_path=chromium(install=False), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for picture, (name, address, width, height, dark) in PICTURES.items():
            scheme = "dark" if dark else "light"
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{(Path(folder) / f'{name}.html').as_uri()}#{address}")
            page.wait_for_selector("html[data-ready]", state="attached")
            page.wait_for_timeout(500)  # charts are drawn as they come into sight
            page.screenshot(path=str(DOCS / f"report-{picture}.png"))


if __name__ == "__main__":
    main()
