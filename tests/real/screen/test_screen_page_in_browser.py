"""The page of curves in a real browser: drawn, without a complaint or a request, dark, and on a phone."""

import pytest

from pytest_mlhpc.node.telemetry.samples import DeviceSample, NodeSample, ProcessSample, Sample
from pytest_mlhpc.screen.hook_output import TrainingTrace
from pytest_mlhpc.screen.report import charts, html_of

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
TITLES = ["Time of a step [s]", "Wait for data in a step [s]", "Cores busy [cores]", "Memory of processes [GiB]",
          "Time in which a kernel ran [%]", "Power [W]", "Temperature [C]", "Clock [MHz]", "Device memory [GiB]"]  # fmt: skip


def look(second):
    processes = tuple(
        ProcessSample(pid, 1, 5, HOSTILE if pid == 11 else "python", second * 0.2 * (pid - 9), second * 0.2, "R", 1, 0, 3,
                      (1 << 30) + (second << 24), pid - 10)
        for pid in range(10, 14)
    )  # fmt: skip
    devices = tuple(
        DeviceSample(index, f"GPU-{index}", "H100", 0.9 - 0.01 * (second % 7), 0.4, 40 << 30, 80 << 30, 600.0 + second % 9, 700.0,
                     50.0 + second / 4, 1.7e9, 1.98e9, 4)
        for index in range(2)
    )  # fmt: skip
    return Sample(float(second), 0.001, NodeSample("n1", 8), processes, devices)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    trace = TrainingTrace(
        10,
        "n1",
        0,
        tuple(0.5 * step for step in range(100)),
        tuple(0.1 + 0.05 * (step % 3) for step in range(100)),
    )
    lines = [
        "screened train.py for 60 s: 4 ranks on 1 node",
        f"1. waiting for data 40 %: {HOSTILE} -> more loader processes",
    ]
    path = tmp_path_factory.mktemp("screen") / "curves.html"
    path.write_text(html_of(lines, charts([look(second) for second in range(60)], [trace])), encoding="ascii")
    return path


def test_every_curve_is_drawn_below_what_limits(page, open_page):
    opened = open_page(page)
    assert opened.page.locator("h3").all_inner_texts() == TITLES
    assert opened.page.locator("canvas").count() == len(TITLES)
    assert opened.text("li").startswith("1. waiting for data 40 %: </script><img")
    assert opened.page.title().startswith("screened train.py")
    drawn = opened.page.evaluate(
        "() => [...document.querySelectorAll('canvas')].every((one) =>"
        " one.getContext('2d').getImageData(0, 0, one.width, one.height).data.some((value) => value))"
    )
    assert drawn


def test_the_pointer_tells_one_moment_in_all_charts(page, open_page):
    opened = open_page(page)
    opened.page.locator(".u-over").nth(2).hover()
    opened.settle()
    assert "0.4 cores" in opened.page.locator(".u-legend").nth(2).inner_text()
    assert opened.page.locator(".u-legend").nth(5).inner_text().count(" W") == 2


@pytest.mark.parametrize(
    "size", [{"width": 360, "height": 740}, {"width": 1280, "height": 900, "dark": True}]
)
def test_it_fits_a_phone_and_follows_dark_colours(page, open_page, size):
    opened = open_page(page, **size)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 29)" if size.get("dark") else "rgb(255, 255, 255)")
