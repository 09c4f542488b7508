"""The morning page of twelve nights: what it says, word for word, the same in terminal, mail and HTML."""

import html
import json
import re
from pathlib import Path

import pytest
from twelve_nights import NIGHTS, TONIGHT, night_world, nothing, stop_clocks  # noqa: F401 - a fixture
from yearly import Slow, Year, night_ns

from pytest_mlhpc.store.text import iso

FOLDER = Path(__file__).with_name("mornings")
#: Cirrus is slower in two nights.
TWICE = Year(slow=[Slow(TONIGHT, TONIGHT + 2, compute=0.08, systems=("cirrus",))])


@pytest.fixture(params=NIGHTS)
def night(request, night_world, monkeypatch):
    """One of the nights, and the text of its page."""
    stop_clocks(monkeypatch, 49 if request.param == "commit-slows-two-systems" else TONIGHT)
    NIGHTS[request.param](night_world)
    return night_world, (FOLDER / f"{request.param}.txt").read_text(encoding="utf-8")


def printed(world, *options):
    return world.mlhpc("status", "--night", *options).out


def texts_of_mails(world):
    bodies = [one.content.get_body("plain").get_content() for one in world.sink.mails]
    return [body.replace("\r\n", "\n") for body in bodies]


def lines_of_html(text):
    """Return the lines of the page's first screen, as they are read."""
    (section,) = re.findall(r'<section id="morning"[^>]*>(.*?)</section>', text, re.DOTALL)
    lines = re.findall(r"<p .*?</p>", section, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in lines]


def test_a_night_reads_as_it_was_written_and_mail_and_html_say_the_same(night, tmp_path):
    world, page = night
    assert printed(world, *world.status).replace(str(world.state_dir), "STATE") == page
    local = printed(world)
    assert texts_of_mails(world)[-1] == local
    world.mlhpc("report", "html", "--output", tmp_path / "out.html")
    assert lines_of_html((tmp_path / "out.html").read_text()) == [line.strip() for line in local.splitlines()]


def test_a_page_is_mailed_once_a_night(night_world):
    nothing(night_world)
    night_world.alert()
    assert len(night_world.sink.mails) == 2
    night_world.alert(TONIGHT + 1)
    keys = [one.id for one in night_world.sink.mails]
    assert keys == [f"<morning-2025-02-{day}@example.org>" for day in (14, 15, 16)]


def test_a_page_is_mailed_by_the_next_call_where_the_first_was_killed_before_it_was_sent(
    night_world, monkeypatch
):
    def killed(*_arguments):
        raise KeyboardInterrupt

    night_world.year(Year())
    with monkeypatch.context() as patch:
        patch.setattr("pytest_mlhpc.cli.alert.deliver", killed)
        night_world.mlhpc("alert", "send", "--at", iso(night_ns(TONIGHT, 6)), code=130)
    night_world.alert()
    night_world.alert()
    assert len(night_world.sink.mails) == 2


def test_what_no_alert_was_sent_of_is_looked_at_without_writing_anything(night_world, monkeypatch):
    stop_clocks(monkeypatch, TONIGHT + 1)
    night_world.store(one for day in range(TONIGHT + 2) for one in TWICE.night(day))
    lines = printed(night_world).splitlines()
    assert lines[1].startswith("new: cirrus: all 5 benchmarks 7.8 % slower since 2025-02-15")
    assert not (night_world.state_dir / "alerts").exists()


def test_what_is_still_open_is_counted_with_the_oldest_and_who_acknowledged_it(night_world, monkeypatch):
    night_world.year(TWICE)
    night_world.alert()
    night_world.store(TWICE.night(TONIGHT + 1))
    night_world.alert(TONIGHT + 1)
    stop_clocks(monkeypatch, TONIGHT + 1)
    what = "cirrus: all 5 benchmarks 7.8 % slower since 2025-02-15: mlhpc alert list"
    owned = "owned by @vision (1), ada@example.org (1)"
    assert printed(night_world).splitlines()[1] == f"still open, {owned}, not acknowledged: {what}"
    monkeypatch.setenv("LOGNAME", "jane")
    night_world.mlhpc("alert", "ack", "regr-", "--until", "7d", "--reason", "vendor", "--ticket", "HPC-7")
    known = "acknowledged by jane until 2025-02-23, ticket HPC-7"
    assert printed(night_world).splitlines()[1] == f"still open, {owned}, {known}: {what}"


@pytest.mark.parametrize("source", ["event", "systems file"])
def test_a_maintenance_is_one_line_that_explains_what_did_not_run_and_no_alert(
    night_world, monkeypatch, tmp_path, source
):
    begin, end = iso(night_ns(TONIGHT, -2)), iso(night_ns(TONIGHT, 9))
    if source == "event":
        where = ("--system", "cirrus", "--on", begin, "--until", end)
        night_world.mlhpc("history", "event", "add", *where, "new pumps")
    else:
        (tmp_path / "systems.yaml").write_text(
            "systems:\n  cirrus:\n    partitions:\n      standard:\n        scheduler: local\n"
            f"        maintenance: [{{from: '{begin}', until: '{end}', reason: new pumps}}]\n"
        )
    gone, queued = ("cirrus", TONIGHT, TONIGHT + 1), ("eidf", TONIGHT, TONIGHT + 1)
    night_world.year(Year(missing=[gone], never=[queued]))
    night_world.alert()
    stop_clocks(monkeypatch, TONIGHT)
    head, *rest = printed(night_world).splitlines()
    assert "5 of 15 measured" in head
    assert "cirrus:standard: maintenance until 2025-02-15 09:00 UTC (new pumps): 5 tests not measured" in rest
    assert [line for line in rest if "not recorded" in line] == []
    listed = json.loads(night_world.mlhpc("alert", "list", "--json").out)
    assert [one["labels"]["system"] for one in listed["alerts"] if one["kind"] == "stale"] == ["eidf"]


def test_what_recovered_is_named_in_the_morning_after_and_not_in_the_next(night_world, monkeypatch):
    night_world.year(TWICE)
    for day in range(TONIGHT, TONIGHT + 6):
        night_world.alert(day)
        stop_clocks(monkeypatch, day)
        recovered = [line for line in printed(night_world).splitlines() if line.startswith("recovered")]
        if recovered:
            break
        night_world.store(TWICE.night(day + 1))
    assert recovered == ["recovered: cirrus: all 5 benchmarks"]
    night_world.store(TWICE.night(day + 1))
    night_world.alert(day + 1)
    stop_clocks(monkeypatch, day + 1)
    assert len(printed(night_world).splitlines()) == 2


def test_a_site_that_is_silent_for_three_days_had_no_night(night_world, monkeypatch):
    nothing(night_world)
    stop_clocks(monkeypatch, TONIGHT + 3)
    head, *missing, _report = printed(night_world).splitlines()
    assert head.startswith("no night since 2025-02-15 02:00 UTC: 0 of 15 measured, 3 systems, history of")
    assert [line[:33] for line in missing] == [
        f"not recorded: 5 tests of {system}"[:33]
        for system in ("alps:standard", "cirrus:standard", "eidf:standard")
    ]


def test_a_filtered_report_says_nothing_of_the_night(night_world, monkeypatch, tmp_path):
    stop_clocks(monkeypatch, TONIGHT)
    nothing(night_world)
    night_world.mlhpc("report", "html", "--system", "cirrus", "--output", tmp_path / "out.html")
    assert 'id="morning"' not in (tmp_path / "out.html").read_text()


def test_for_programs_sections_stand_in_the_order_of_the_lines(night_world, monkeypatch):
    stop_clocks(monkeypatch, TONIGHT)
    NIGHTS["half-of-the-night-missing"](night_world)
    data = json.loads(printed(night_world, "--json"))
    sections = [
        "act_now",
        "did_not_run",
        "nodes_out",
        "watching",
        "still_open",
        "recovered",
        "improved",
        "waiting",
    ]
    assert [name for name in data if name in sections] == sections
    assert (data["schema"], data["measured"], data["expected"]) == ("mlhpc/status/1", 4, 15)
    assert [one["verdict"] for one in data["did_not_run"]] == ["never_scheduled", "stale", "worker_exit"]


def test_where_influxdb_is_away_and_nothing_is_stored_both_are_said(night_world):
    found = night_world.mlhpc("status", "--from", "influx")
    assert "no nightly run is recorded in" in found.out
    assert found.err.startswith("InfluxDB at http://127.0.0.1:1 cannot be read: ")
