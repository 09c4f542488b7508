"""The file: it holds all it needs, and names in records stay text, whatever they hold."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
from made_nights import GivenSource, a_year, benchmark, series
from page_content import content_of, nights, page_of

from pytest_mlhpc.report.html.page import SCRIPTS, html_of
from pytest_mlhpc.report.html.page_data import PageQuery, gather

HOSTILE = json.loads(Path(__file__).with_name("hostile.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_stays_text(name):
    made = nights(3, system=name, partition=name, node_id=name, nodes=(name,), commit=name, branch="main", failure=name,
                  unfit={name: name}, device_model=name, environment=name, benchmark=name)  # fmt: skip
    html = html_of(page_of(series(made, [1.0, 2.0, 3.0]), title=name))
    assert [html.count(text) for text in ("<script", "</script>", "<img")] == [3, 3, 0]
    found = content_of(html)
    assert found["benches"][0]["benchmark"] == found["systems"][0]["name"] == name
    assert name in found["texts"]


def test_the_file_is_ascii_whatever_it_says():
    html = html_of(page_of(series(nights(3, system="Größe"), [1.0, 2.0, 3.0]), title="Größe"))
    assert html.isascii()
    assert "<title>Gr&#246;&#223;e</title>" in html


@pytest.fixture(scope="module")
def html():
    return html_of(page_of(series(nights(3), [1.0, 2.0, 3.0])))


def test_nothing_is_asked_of_another_server(html):
    without_comments = re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", without_comments, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href|action)="(?!#|data:)', markup)
    assert "default-src 'none'" in markup
    assert "unsafe" not in markup


@pytest.mark.parametrize(
    "words", ["uPlot 1.6.32", "Copyright (c) 2022 Leon Sorokin", "THE SOFTWARE IS PROVIDED"]
)
def test_the_licence_of_what_is_vendored_is_in_the_file(html, words):
    assert words in html


def test_all_scripts_of_the_package_are_used():
    parts = resources.files("pytest_mlhpc.report.html").joinpath("parts")
    assert {part.name for part in parts.iterdir() if part.name.endswith(".js")} == set(SCRIPTS)


def test_figures_at_the_end_of_what_floats_hold_make_a_page():
    made = nights(4, nodes=("n1",))
    assert content_of(html_of(page_of(series(made, [1.7e308] * 4))))["hosts"][0]["deviation"] is None


def test_times_and_figures_can_be_read_back():
    (bench,) = content_of(html_of(page_of(series(nights(3), [1.23456789, 2e-9, 3e20]))))["benches"]
    assert (bench["at"], bench["watched"]) == ([1_780_279_200, 86_400, 86_400], [0, 3])
    assert bench["rows"][0]["values"] == [1.23457, 2e-9, 3e20]


def test_the_same_history_makes_the_same_file():
    assert len({html_of(page_of(series(nights(9), [1.0] * 9))) for _time in range(2)}) == 1


def test_an_empty_history_makes_no_page():
    assert gather(GivenSource([]), PageQuery(now_ns=1), {}) is None


def test_a_chosen_system_or_benchmark_leaves_out_the_others():
    source = a_year(10, names=("test_a", "test_b"), scales=(1,))
    page = gather(source, PageQuery(now_ns=2**62, system="eidf", benchmark="test_b"), {})
    assert [(bench.key.system, bench.label) for bench in page.benches] == [("eidf", "test_b")]
    assert benchmark("test_a") not in html_of(page)
