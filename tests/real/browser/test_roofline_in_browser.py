"""The roofline page in a real browser: drawn without a complaint or a request, wide, narrow and dark."""

import pytest
from nights_of import store
from roofline_records import kernels, peaks, training

from pytest_mlhpc.cli import main


@pytest.fixture
def page(state_dir, tmp_path):
    bf16 = {
        "of": "language_model",
        "precision": "bf16",
        "measures": {"step_flop": 40e9, "achieved_flops": 90e9},
    }
    store(state_dir, [peaks(), kernels(), training(), kernels(4, **bf16)])
    path = tmp_path / "page.html"
    assert main(["papers", "roofline", "--output", str(path)]) == 0
    return path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (1280, True)])
def test_all_points_and_roofs_are_drawn_within_the_chart(page, open_page, width, dark):
    opened = open_page(page, width=width, dark=dark)
    chart = opened.page.locator("section > svg")
    outside = chart.bounding_box()
    for kind, count in (("circle.point", 2), ("rect.trained", 1), ("line.roof", 3)):
        drawn = chart.locator(kind)
        assert drawn.count() == count
        for place in range(count):
            box = drawn.nth(place).bounding_box()
            assert outside["x"] <= box["x"] <= outside["x"] + outside["width"]
            assert outside["y"] <= box["y"] <= outside["y"] + outside["height"]
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_style_of_the_page_is_applied(page, open_page):
    opened = open_page(page)
    colours = [
        opened.page.evaluate(f"getComputedStyle(document.querySelector('{one}')).fill")
        for one in (".c0", ".c1")
    ]
    assert colours == ["rgb(31, 95, 168)", "rgb(194, 65, 12)"]
