"""The page of MLPerf HPC in a real browser: its pictures are drawn without a complaint or a request, wide, narrow and dark."""

import pytest
from nights_of import store
from trained_runs import sweep

from pytest_mlhpc.cli import main

SHARE, JOINED = "communication, % of a step over devices", "time to train, s over global batch"


@pytest.fixture
def page(state_dir, tmp_path):
    store(state_dir, sweep())
    path = tmp_path / "report.html"
    words = ["papers", "mlperf", "report", "--since", "2020-01-01", "--format", "html", "--output"]
    assert main([*words, str(path)]) == 0
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
@pytest.mark.parametrize(("picture", "curves", "points"), [(SHARE, 3, 6), (JOINED, 5, 14)])
def test_all_curves_and_points_are_drawn_within_their_picture(  # noqa: PLR0917 - rows
    page, open_page, width, dark, picture, curves, points
):
    opened = open_page(page, width=width, dark=dark)
    chart = opened.page.locator(f'svg[aria-label="{picture}"]')
    outside = chart.bounding_box()
    assert chart.locator("polyline.curve").count() == curves
    drawn = chart.locator("circle")
    assert drawn.count() == points
    for place in range(points):
        box = drawn.nth(place).bounding_box()
        assert outside["x"] <= box["x"] <= outside["x"] + outside["width"]
        assert outside["y"] <= box["y"] <= outside["y"] + outside["height"]
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_curves_have_the_colours_of_their_legend_and_predicted_points_are_hollow(page, open_page):
    opened = open_page(page)
    style = "getComputedStyle(document.querySelector('svg[aria-label=\"{}\"] {}')).{}"
    curve = opened.page.evaluate(style.format(JOINED, "polyline.c1", "stroke"))
    swatch = opened.page.evaluate("getComputedStyle(document.querySelector('.legend .swatch.c1')).fill")
    hollow = opened.page.evaluate(style.format(JOINED, "circle.trained", "fill"))
    assert (curve, curve == swatch, hollow) == ("rgb(194, 65, 12)", True, "rgb(255, 255, 255)")
