"""The morning page on the first screen of the report, in a real browser."""

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture
from twelve_nights import NIGHTS, TONIGHT, night_world, stop_clocks  # noqa: F401 - a fixture


@pytest.fixture
def report(night_world, monkeypatch, tmp_path):
    """Return what makes the page of one of the nights, and its lines in the terminal."""
    stop_clocks(monkeypatch, TONIGHT)

    def make(name):
        NIGHTS[name](night_world)
        path = tmp_path / "out.html"
        night_world.mlhpc("report", "html", "--output", path)
        return path, night_world.mlhpc("status", "--night").out.splitlines()

    return make


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (360, False), (360, True)])
def test_the_first_screen_has_the_lines_of_the_terminal_and_fits_its_width(report, open_page, width, dark):
    path, lines = report("forty-incidents")
    opened = open_page(path, width=width, dark=dark)
    assert opened.page.locator("#morning p").all_inner_texts() == [line.strip() for line in lines]
    assert opened.page.locator("#morning").bounding_box()["y"] < 200
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_lines_are_those_of_the_overview_alone_and_are_there_without_scripts(report, open_page):
    path, lines = report("half-of-the-night-missing")
    opened = open_page(path)
    assert opened.page.locator("#morning").is_visible()
    opened.go("#view=nodes")
    assert not opened.page.locator("#morning").is_visible()
    plain = open_page(path, java_script_enabled=False)
    assert plain.page.locator("#morning p").count() == len(lines)


def test_a_line_leads_to_its_benchmark_system_or_node(report, open_page):
    path, _lines = report("one-node-slow")
    opened = open_page(path)
    for name, view, shown in (("test_stream", "benchmarks", "1 benchmark"), ("n3", "nodes", "1 node")):
        opened.go("#view=overview")
        opened.page.locator("#morning").get_by_role("link", name=name, exact=True).click()
        opened.settle()
        assert opened.page.locator("nav a[aria-current=page]").get_attribute("data-view") == view
        assert opened.text("#found").startswith(shown)
