"""The report in a real browser: drawn, without a complaint, a request or a mouse, on a phone, and for a screen reader."""

import csv
import re
import urllib.parse

import pytest
from made_nights import DAY_NS, FIRST_NS, GivenSource, a_year, benchmark, night, series

from pytest_mlhpc.history.events import new_event
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.report.grafana import cell_links
from pytest_mlhpc.report.html.page import html_of
from pytest_mlhpc.report.html.page_data import PageQuery, gather

VIEWS = ("overview", "list", "benchmarks", "systems", "time", "scaling", "nodes")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"> Größe \N{PILE OF POO} & 'quoted'"
NIGHTS = 60
NOW_NS = FIRST_NS + NIGHTS * DAY_NS


def write(path, source, entries=None, events=(), **wanted):
    page = gather(source, PageQuery(**{"now_ns": NOW_NS, **wanted}), entries or {}, events)
    assert page is not None
    path.write_text(html_of(page), encoding="ascii")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Sixty nights of three systems: one became slower with a driver, one benchmark is slow since six nights."""
    source = a_year(NIGHTS, names=("test_cosmoflow", "test_deepcam"), scales=(1, 2))
    entries = {
        one.key: Entry(
            one.points[0].value,
            one.unit,
            one.better,
            0.05,
            one.points[0].night.definition,
            one.points[0].night.device_model,
            reason="first night",
        )
        for one in source.series()
        if one.judged
    }
    event = new_event("archer2", "", "driver 570 to 580", at_ns=FIRST_NS + 45 * DAY_NS, by="me", now_ns=0)
    return write(tmp_path_factory.mktemp("report") / "out.html", source, entries, [event])


def list_of(opened):
    """Return the cells of the list, line by line."""
    lines = opened.page.locator(".list tbody tr").all()
    return [line.locator("th, td").all_inner_texts() for line in lines]


def visible_rows(opened):
    return opened.page.locator("article.row:visible").count()


def test_every_view_is_drawn(report, open_page):
    opened = open_page(report)
    for view in VIEWS:
        opened.go(f"#view={view}")
        assert opened.page.locator("nav a[aria-current=page]").get_attribute("data-view") == view
        assert opened.page.locator("main").inner_text()
    opened.go("#view=benchmarks")
    opened.page.wait_for_selector(".chart canvas")
    opened.go("#view=scaling")
    assert opened.page.locator(".scaling canvas").count() == 2 * opened.page.locator(".scaling").count()


def test_the_address_that_dashboards_link_to_shows_one_test_alone(report, open_page):
    ((_, link),) = cell_links({"report": report.as_uri()})
    for name in (benchmark("test_deepcam"), benchmark("test_cosmoflow", 2)):
        opened = open_page(report)
        url = link["url"].replace("${__value.raw:percentencode}", urllib.parse.quote(name, safe=""))
        opened.go(f"#{url.partition('#')[2]}")
        titles = opened.page.locator("section:visible h2").all_inner_texts()
        assert titles
        assert all(name.rpartition("::")[2].partition("[")[0] in title for title in titles)


def test_the_overview_names_what_is_slow_and_links_to_it(report, open_page):
    opened = open_page(report)
    card = opened.page.locator("section.card", has=opened.page.get_by_role("heading", name="eidf"))
    assert "2 slower" in card.inner_text()
    assert "3 of 4 re-runs agree" in card.inner_text()
    card.get_by_role("link", name="test_deepcam devices=1 global_batch=16").click()
    opened.settle()
    assert visible_rows(opened) == 1
    assert "only what the link names" in opened.text("#found")


def test_a_change_point_is_reported_with_the_event_and_the_driver(report, open_page):
    opened = open_page(report, "#view=benchmarks&system=archer2&q=cosmoflow")
    reported = opened.text("ul.shifts")
    assert re.match(r"\N{MINUS SIGN}[67]\.\d.% 2026-07-16: 3\d\d\.\d samples/s", reported)
    assert "driver 570 to 580" in reported
    assert "driver 570.86 -> 580.95" in reported


def test_the_pointer_tells_a_nights_figure_node_and_commit(report, open_page):
    opened = open_page(report, "#view=benchmarks&system=cirrus")
    opened.page.wait_for_selector(".u-over")
    opened.page.locator(".u-over").first.hover()
    tip = opened.text("#tip")
    assert "samples/s" in tip
    assert "on cirrus-n0" in tip
    assert re.search(r"commit [0-9a-f]{6}", tip)
    assert "of the accepted value" in tip


def test_without_a_mouse_nights_are_read_one_by_one(report, open_page):
    opened = open_page(report, "#view=benchmarks&system=cirrus")
    opened.page.wait_for_selector(".u-over")
    opened.page.locator(".chart:visible").first.focus()
    opened.page.keyboard.press("End")
    last = opened.page.locator("#said").text_content()
    opened.page.keyboard.press("ArrowLeft")
    before = opened.page.locator("#said").text_content()
    assert last.startswith("2026-07-30")
    assert before.startswith("2026-07-29")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#tip").is_hidden()


def test_the_first_key_offers_to_skip_to_the_content(report, open_page):
    opened = open_page(report, "#view=nodes")
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    assert opened.page.url.endswith("#view=nodes")


def test_a_slash_searches_and_the_address_keeps_it(report, open_page):
    opened = open_page(report, "#view=benchmarks")
    everything = visible_rows(opened)
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("deepcam eidf")
    opened.wait("location.hash.includes('deepcam+eidf')")
    assert (everything, visible_rows(opened)) == (12, 2)
    assert opened.text("#found") == "2 benchmarks, 2 rows"
    opened.page.reload()
    opened.requests.pop()  # the reload itself
    opened.page.wait_for_selector("html[data-ready]", state="attached")
    assert visible_rows(opened) == 2
    assert opened.page.get_by_label("Search").input_value() == "deepcam eidf"


def test_filters_narrow_what_is_shown_and_the_back_button_undoes_them(report, open_page):
    opened = open_page(report, "#view=benchmarks")
    opened.page.get_by_label("Last night").select_option("slow")
    opened.settle()
    slow = visible_rows(opened)
    opened.page.get_by_label("Metrics").select_option("*")
    opened.settle()
    assert 0 < slow < visible_rows(opened)
    opened.page.go_back()
    opened.page.go_back()
    opened.settle()
    assert visible_rows(opened) == 12
    assert opened.page.get_by_label("Last night").input_value() == ""


def test_a_row_has_a_link_of_its_own(report, open_page):
    opened = open_page(report, "#view=benchmarks")
    opened.page.locator("article.row:visible h3 a").nth(3).click()
    opened.settle()
    assert visible_rows(opened) == 1
    opened.page.get_by_role("link", name="show all").click()
    opened.settle()
    assert visible_rows(opened) == 12


def test_a_link_to_what_is_no_longer_there_shows_the_rest(report, open_page):
    assert visible_rows(open_page(report, "#view=benchmarks&row=gone&days=x&kind=%00")) == 12


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_every_view_without_scrolling_sideways(report, open_page, view):
    opened = open_page(report, f"#view={view}", width=360, height=740, has_touch=True, is_mobile=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize(
    ("view", "cells"),
    [("list", ".list .badge"), ("time", ".share"), ("nodes", ".hosts td:nth-child(5), .hosts td.machine")],
)
def test_a_phone_shows_verdicts_shares_and_speeds_beside_the_name_and_the_machine_below_it(
    report, open_page, view, cells
):
    opened = open_page(report, f"#view={view}", width=360, height=740, has_touch=True, is_mobile=True)
    edges = f"[...document.querySelectorAll('{cells}')].map((one) => one.getBoundingClientRect().right)"
    found = opened.page.evaluate(edges)
    assert found
    assert max(found) <= 348  # the table scrolls sideways beyond it
    assert re.search("archer2|cirrus|eidf", opened.text("main tbody th"))


def test_nodes_left_out_last_night_are_named_as_text_also_on_a_phone(tmp_path, open_page):
    unfit = {
        f"nid{number:06d}-a-rather-long-name-of-a-node": "memory bandwidth 31 % below its peers"
        for number in (1, 2)
    }
    path = write(
        tmp_path / "unfit.html",
        GivenSource([series([night(n, unfit=unfit) for n in range(NIGHTS)], [1.0] * NIGHTS)]),
    )
    opened = open_page(path, "#view=overview", width=360, height=740, has_touch=True, is_mobile=True)
    said = "; ".join(f"{name} ({reason})" for name, reason in unfit.items())
    assert f"Left out by vetting: {said}" in opened.text("section.card")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_colours_follow_the_system_and_can_be_changed(report, open_page):
    opened = open_page(report, "#view=benchmarks", dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened.page.evaluate(ground) == "rgb(20, 24, 29)"
    opened.page.get_by_role("button", name="Change to light colours").click()
    assert opened.page.evaluate(ground) == "rgb(255, 255, 255)"


def test_a_screen_reader_finds_landmarks_names_and_figures(report, open_page):
    opened = open_page(report, "#view=benchmarks&system=cirrus")
    page = opened.page
    for role in ("banner", "navigation", "main", "search"):
        assert page.get_by_role(role).count() == 1, role
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, button, a, [role=img], [role=group]')]
            .filter((one) => !(one.labels && one.labels.length) && !one.getAttribute('aria-label') && !one.textContent.trim())
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    chart = page.locator(".chart:visible").first.get_attribute("aria-label")
    assert re.match(
        r"effective_throughput of .* on cirrus:standard: 60 nights; newest [\d.]+ samples/s; accepted ", chart
    )
    page.get_by_role("button", name="Table").first.click()
    table = page.locator("table:visible").first
    assert table.get_by_role("columnheader").all_inner_texts() == [
        "Night",
        "Figure",
        "Verdict",
        "Nodes",
        "Commit, job, pipeline",
        "Changed",
    ]
    assert table.get_by_role("row").count() == 61


def test_nodes_can_be_sorted(report, open_page):
    opened = open_page(report, "#view=nodes")
    opened.page.get_by_role("button", name="Failed").click()
    cells = opened.page.locator(".hosts tbody tr td:nth-child(4)").all_inner_texts()
    assert [int(cell) for cell in cells] == sorted(map(int, cells), reverse=True)
    assert opened.page.locator("th[aria-sort=descending]").inner_text() == "Failed"


def test_without_scripts_the_page_names_the_command(report, open_page):
    opened = open_page(report, java_script_enabled=False)
    assert "mlhpc history" in opened.text("main")


def test_hostile_names_are_shown_and_do_nothing(tmp_path, open_page):
    made = [
        night(number, system=HOSTILE, nodes=(HOSTILE,), commit=HOSTILE, benchmark=HOSTILE, device_model=HOSTILE,
              verdict="passed" if number < 3 else HOSTILE, failure=HOSTILE, unfit={HOSTILE: HOSTILE},
              changes={HOSTILE: f"{number}{HOSTILE}"})
        for number in range(4)
    ]  # fmt: skip
    opened = open_page(
        write(tmp_path / "h.html", GivenSource([series(made, [1.0, 2.0, 3.0, 4.0])]), title=HOSTILE)
    )
    for view in VIEWS:
        opened.go(f"#view={view}")
    opened.go("#view=benchmarks")
    assert opened.text(".bench h2") == HOSTILE
    assert opened.page.title() == HOSTILE
    assert opened.page.locator("img").count() == 0


def test_odd_histories_are_drawn(tmp_path, open_page):
    """One night, gaps, failures alone, zeros, negative figures, huge ones."""
    nan = float("nan")
    odd = {
        "one": [5.0],
        "gaps": [1.0, nan, nan, 4.0],
        "zero": [0.0] * 4,
        "minus": [-1.0, 2.0, -3.0],
        "huge": [1e300, 1e-300, 1.0],
    }
    made = []
    for name, values in odd.items():
        nights = [night(n, id=f"{name}{n}", benchmark=benchmark(f"test_{name}")) for n in range(len(values))]
        made.append(series(nights, values))
    broken = [
        night(n, id=f"b{n}", benchmark=benchmark("test_broken"), verdict="out_of_memory") for n in range(3)
    ]
    opened = open_page(
        write(tmp_path / "odd.html", GivenSource(made, broken)), "#view=benchmarks", height=3000
    )
    opened.wait("document.querySelectorAll('.chart canvas').length === 5")
    assert opened.text("#found") == "6 benchmarks, 5 rows"


def test_the_list_has_a_line_for_each_row_worst_first_and_sorts_by_each_column(report, open_page):
    opened = open_page(report, "#view=list")
    heads = opened.page.locator(".list thead th").all_inner_texts()
    assert heads == [
        "Benchmark",
        "Machine",
        "Nights",
        "Change",
        "Verdict",
        "Since",
        "Owner",
        "Metric",
        "Newest",
    ]
    lines = list_of(opened)
    assert len(lines) == 12
    assert [line[4].split()[-1] for line in lines[:7]].count("passed") == 1
    losses = [
        float(line[3].replace("\N{MINUS SIGN}", "-").split("\N{NARROW NO-BREAK SPACE}")[0])
        for line in lines[:6]
    ]
    assert losses == sorted(losses)
    opened.page.get_by_role("button", name="Machine").click()
    assert [line[1] for line in list_of(opened)] == sorted(line[1] for line in lines)
    opened.page.get_by_role("button", name="Since").focus()
    opened.page.keyboard.press("Enter")
    since = [line[5] for line in list_of(opened)]
    assert since[0] == "2026-07-25"
    assert opened.page.locator("th[aria-sort=descending]").inner_text() == "Since"


def test_a_line_of_the_list_leads_to_its_chart_and_filters_narrow_it(report, open_page):
    opened = open_page(report, "#view=list&system=eidf&kind=slow")
    assert opened.text("#found") == "2 rows"
    assert {line[1] for line in list_of(opened)} == {"eidf:h100"}
    opened.page.locator(".list tbody a").first.click()
    opened.settle()
    assert visible_rows(opened) == 1


def test_the_list_is_saved_as_csv_in_which_no_cell_is_a_formula(tmp_path, open_page):
    made = [night(n, owner="=cmd|' /C calc'!A0", commit="c0ffee") for n in range(4)]
    opened = open_page(
        write(tmp_path / "csv.html", GivenSource([series(made, [1.0, 2.0, 3.0, 4.5])])), "#view=list"
    )
    with opened.page.expect_download() as saved:
        opened.page.get_by_role("button", name="Save as CSV").click()
    with saved.value.path().open(newline="", encoding="utf-8") as file:
        heads, cells = csv.reader(file)
    line = dict(zip(heads, cells, strict=True))
    assert (line["system"], line["newest"], line["unit"], line["commit"]) == (
        "cirrus",
        "4.5",
        "samples/s",
        "c0ffee",
    )
    assert line["owner"] == "'=cmd|' /C calc'!A0"
    assert saved.value.suggested_filename == "benchmarks.csv"
    del opened.requests[1:]  # the file, which the browser takes from the page itself


def test_hundreds_of_rows_are_made_as_they_are_read(tmp_path, open_page):
    made = [
        series(
            [night(n, id=f"{name}{n}", benchmark=benchmark(f"test_{name:03}")) for n in range(3)],
            [1.0, 2.0, 3.0],
        )
        for name in range(450)
    ]
    opened = open_page(write(tmp_path / "many.html", GivenSource(made)), "#view=list")
    assert opened.text("#found") == "450 rows"
    assert opened.page.locator(".list tbody tr").count() < 450
    opened.page.keyboard.press("End")
    opened.wait("document.querySelectorAll('.list tbody tr').length > 200")
    opened.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    opened.wait("document.querySelectorAll('.list tbody tr').length === 450")


def test_systems_that_ran_one_benchmark_stand_in_one_chart(report, open_page):
    opened = open_page(report, "#view=systems&q=cosmoflow", height=3000)
    opened.wait("document.querySelectorAll('.overlay:not([hidden]) canvas').length === 2")
    legend = opened.page.locator(".overlay:visible .legend").first
    assert legend.locator("a").all_inner_texts() == ["archer2:gpu", "cirrus:standard", "eidf:h100"]
    opened.page.locator(".overlay:visible .u-over").first.hover()
    tip = opened.text("#tip")
    assert re.search(r"archer2:gpu: [\d.]+ %\s+cirrus:standard: [\d.]+ %", tip)
    legend.get_by_role("link", name="cirrus:standard").click()
    opened.settle()
    assert visible_rows(opened) == 1


def test_re_runs_are_folded_into_their_night_until_they_are_asked_for(tmp_path, open_page):
    slow = [night(3, verdict="regressed")]
    again = [
        night(3, id=f"again{n}", attempt=n, created_ns=FIRST_NS + 3 * DAY_NS + n * 10**9) for n in (1, 2, 3)
    ]
    made = [*(night(n) for n in range(3)), *slow, *again]
    source = GivenSource([series(made, [9.0, 9.1, 9.0, 8.0, 8.1, 8.2, 8.0])])
    opened = open_page(write(tmp_path / "again.html", source), "#view=benchmarks")
    opened.page.get_by_role("button", name="Table").click()
    cells = opened.page.locator(".more tbody tr").first.locator("th, td").all_inner_texts()
    assert cells[2] == "regressed, 3 re-runs: 8 samples/s to 8.2 samples/s"
    assert opened.page.locator(".more tbody tr").count() == 4
    opened.page.locator(".chart:visible").first.focus()
    opened.page.keyboard.press("End")
    assert "3 re-runs: 8 samples/s to 8.2 samples/s" in str(opened.page.locator("#said").text_content())
    opened.page.get_by_label("re-runs").check()
    opened.settle()
    opened.page.locator(".chart:visible").first.focus()
    opened.page.keyboard.press("End")
    assert "re-run 3" in str(opened.page.locator("#said").text_content())


def test_commit_and_pipeline_are_links_where_the_site_says_to_which_address(tmp_path, open_page):
    made = [night(n, commit="c0ffee/x", pipeline="31", job_id="4711") for n in range(3)]
    links = {
        "commit": "https://git.example.org/-/commit/{commit}",
        "pipeline": "https://git.example.org/p/{pipeline}",
    }
    page = write(tmp_path / "links.html", GivenSource([series(made, [1.0, 2.0, 3.0])]), links=links)
    opened = open_page(page, "#view=benchmarks")
    last = opened.page.locator(".bench .last")
    assert last.inner_text().endswith("c0ffee/x, job 4711, pipeline 31")
    found = [one.get_attribute("href") for one in last.locator("a").all()]
    assert found == ["https://git.example.org/-/commit/c0ffee%2Fx", "https://git.example.org/p/31"]


@pytest.mark.parametrize(("view", "kinds"), [("overview", "ok"), ("nodes", "unfit")])
def test_the_colours_of_strips_are_named_in_a_legend(report, open_page, view, kinds):
    opened = open_page(report, f"#view={view}")
    assert kinds in opened.page.locator(".legend").first.inner_text()
