"""`mlhpc alert send` against a store of records: from nights to requests at a server, once."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from cli_calls import refusals
from http_sink import HttpSink, Reply
from nights_of import nights, quiet
from nights_of import store as store_records
from yearly import Slow, Year, night_ns

from pytest_mlhpc.alert.book import book_path, locked, read_book
from pytest_mlhpc.history.events import journal_entry_of, journal_files
from pytest_mlhpc.store.text import iso

#: One system, five benchmarks, 45 nights; then all of them lose 8 %.
BAD = Year(slow=[Slow(45, 60, compute=0.08)], systems=("cirrus",), days=60)


@pytest.fixture
def store(state_dir):
    """Return what stores nights of a year."""

    def put(*days, **changes):
        records = [dataclasses.replace(one, **changes) for day in days for one in BAD.night(day)]
        store_records(state_dir, records, f"session-{days[0]}")

    return put


@pytest.fixture
def sink(tmp_path, monkeypatch):
    """A server that takes messages, configured in the folder of the call."""
    monkeypatch.chdir(tmp_path)
    for name in ("CI_DEFAULT_BRANCH", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HttpSink() as server:
        channel = f"{{type: webhook, url: '{server.url}/hook', limit_s: 300}}"
        (tmp_path / "alerts.yaml").write_text(f"channels:\n  hook: {channel}\n")
        yield server


@pytest.fixture
def alert(mlhpc):
    """Return what alerts on the morning after a night."""
    return lambda day, *words, code=0: mlhpc(
        "alert", "send", "--at", iso(night_ns(day, 6)), *words, code=code
    )


def states(sink):
    return [request.json["state"] for request in sink.requests]


def incident_of(sink):
    return sink.requests[0].json["incident"]


def test_a_night_that_became_slower_is_one_message_also_if_asked_twice(sink, store, alert):
    store(*range(45))
    alert(44)
    store(45)
    out = alert(45).out
    assert [words in out for words in ("new: cirrus: all 5 benchmarks", "1 new message, 1 open")] == [
        True,
        True,
    ]
    alert(45)
    assert states(sink) == ["new"]
    assert incident_of(sink).startswith("regr-cirrus-20250215-")


def test_a_benchmark_that_falls_two_nights_after_another_is_reported_by_name(sink, state_dir, mlhpc):
    figures = {"a": quiet(44) + quiet(3, 90.0), "b": quiet(46) + quiet(1, 80.0)}
    made = [one for name in "ab" for one in nights(figures[name], benchmark=name, last_ns=night_ns(60, 1))]
    for first, last in ((0, 57), (58, 59), (60, 60)):
        store_records(
            state_dir,
            [one for one in made if night_ns(first, 0) < one.created_ns < night_ns(last, 2)],
            f"s{last}",
        )
        mlhpc("alert", "send", "--at", iso(night_ns(last, 6)))
    titles = [request.json["title"] for request in sink.requests]
    assert [title[:14] for title in titles] == ["new: cirrus: a", "new: cirrus: b"]


@pytest.mark.parametrize(("configured", "count"), [("", 1), ("branch: trunk\n", 1), ("branch: main\n", 0)])
def test_the_nights_of_the_projects_default_branch_are_watched_unless_another_is_named(  # noqa: PLR0917
    sink, store, alert, monkeypatch, configured, count
):
    monkeypatch.setenv("CI_DEFAULT_BRANCH", "trunk")
    config = Path("alerts.yaml")
    config.write_text(configured + config.read_text())
    store(*range(46), branch="trunk")
    alert(45)
    assert len(sink.requests) == count


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [(503, 75, r"answered 503: \{\}; it is tried again next time"), (400, 1, r"answered 400: \{\}")],
    ids=["gets it the next time", "that refuses is told once"],
)
def test_a_channel_that_is_down(sink, store, alert, status, code, why):  # noqa: PLR0917 - a row
    store(*range(46))
    sink.then(Reply(status))
    assert re.fullmatch(rf"\S+-1-new: hook: {sink.url}: {why}\n", alert(45, code=code).err)
    alert(45)
    alert(45)
    keys = [request.headers["idempotency-key"] for request in sink.requests]
    assert (len(keys), len(set(keys))) == (2 if status == 503 else 1, 1)


def test_a_damaged_book_is_reported_and_set_aside(sink, store, alert, state_dir):
    store(*range(46))
    book_path(state_dir).parent.mkdir(parents=True)
    book_path(state_dir).write_text("{")
    assert "damaged" in alert(45).err
    assert len(list(book_path(state_dir).parent.glob("book.damaged-*.json"))) == 1


def test_a_dry_run_sends_and_keeps_nothing(sink, store, alert, state_dir):
    store(*range(46))
    assert "new: cirrus" in alert(45, "--dry-run").out
    assert (sink.requests, book_path(state_dir).exists()) == ([], False)


def test_for_programs_there_is_one_object_with_all_messages(store, alert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store(*range(46))
    (message,) = json.loads(alert(45, "--json").out)["messages"]
    assert message["state"] == "new"


def test_a_night_that_did_not_run_is_an_alert_where_nights_are_expected(sink, store, alert):
    store(*range(20))
    alert(21)
    assert not sink.requests
    alert(21, "--expect", "nightly")
    assert incident_of(sink).startswith("stal-cirrus")
    store(22)
    alert(22, "--expect", "nightly")
    assert states(sink) == ["new", "resolved"]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_no_history_is_said_and_is_exit_code_5(sink, alert, options):
    assert "no history" in alert(1, *options).err


def test_another_alert_at_work_is_exit_code_75(sink, state_dir, alert, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.cli.alert.locked", lambda place: locked(place, patience_s=0.0))
    with locked(state_dir):
        assert "another mlhpc alert send" in alert(1, code=75).err


# --- ack and mute


def test_what_becomes_of_an_alert_is_in_the_journal_once(sink, store, alert, mlhpc, state_dir):
    store(*range(46))
    alert(45)
    alert(45)
    mlhpc("alert", "ack", incident_of(sink), "--until", "2099-01-01", "--reason", "vendor knows")
    entries = [
        journal_entry_of(line) for path in journal_files(state_dir) for line in path.read_bytes().splitlines()
    ]
    alerts = [(one.kind, one.id, one.system, one.at_ns) for one in entries if one.kind.startswith("alert")]
    assert alerts[0] == ("alert_opened", incident_of(sink), "cirrus", night_ns(45, 6))
    assert [kind for kind, *_ in alerts] == ["alert_opened", "alert_acknowledged"]
    assert not read_book(state_dir, pytest.fail).journal


def test_a_dry_run_leaves_the_journal_alone(sink, store, alert, state_dir):
    store(*range(46))
    alert(45, "--dry-run")
    assert journal_files(state_dir) == []


def test_an_acknowledged_alert_is_silent_until_then(sink, store, alert, mlhpc):
    store(*range(46))
    alert(45)
    ack = ("alert", "ack", incident_of(sink)[:12], "--until", "3d", "--reason", "vendor knows")
    assert "is acknowledged until" in mlhpc(*ack).out
    data = json.loads(mlhpc(*ack, "--json").out)
    assert (data["schema"], data["alert"], data["done"]) == ("mlhpc/alert-ack/1", incident_of(sink), True)
    assert "acknowledged by" in mlhpc("alert", "list").out


def test_a_known_issue_is_listed_with_its_ticket_until_it_is_taken_back(sink, store, alert, mlhpc):
    store(*range(46))
    alert(45)
    name, url = incident_of(sink), "https://git.example.org/hpc/-/issues/7"
    asked = ("--until", "2099-01-01", "--reason", "vendor knows", "--ticket", url, "--known")
    assert f"{name} is a known issue until 2099-01-01" in mlhpc("alert", "ack", name, *asked).out
    listed = json.loads(mlhpc("alert", "list", "--json").out)
    assert [one["ticket"] for one in (*listed["alerts"], *listed["known_issues"])] == [url, url]
    assert mlhpc("alert", "list").out.count(url) == 2
    mlhpc("alert", "ack", name[:10], "--off")
    assert "known issue" not in mlhpc("alert", "list").out
    store(46)
    alert(46)
    assert states(sink) == ["new", "continuing"]
    assert f"Ticket: {url}" in sink.requests[-1].json["text"]
    assert f'Ticket: <a href="{url}">{url}</a>' in sink.requests[-1].json["html"]


def test_maintenance_that_is_not_over_is_listed_from_events_and_the_systems_file(
    mlhpc, tmp_path, monkeypatch, state_dir
):
    monkeypatch.chdir(tmp_path)
    Path("systems.yaml").write_text(
        "systems:\n  mine:\n    maintenance:\n"
        "      - {from: 2098-12-01T06:00, until: 2099-01-01, reason: new pumps}\n"
        "    partitions:\n      cpu: {scheduler: local}\n      fat: {scheduler: local}\n"
    )
    mlhpc(
        "history",
        "event",
        "add",
        "--system",
        "alps",
        "--on",
        "2098-12-02",
        "--until",
        "2098-12-03",
        "new switch",
    )
    rows = [re.split("  +", line) for line in mlhpc("alert", "list").out.splitlines()[1:]]
    assert rows == [
        ["maintenance", "from", "until", "reason"],
        ["mine:cpu,fat", "2098-12-01 06:00 UTC", "2099-01-01 00:00 UTC", "new pumps"],
        ["alps", "2098-12-02 00:00 UTC", "2098-12-03 00:00 UTC", "new switch"],
    ]
    listed = json.loads(mlhpc("alert", "list", "--json").out)
    assert [one["text"] for one in listed["maintenance"]] == ["new pumps", "new pumps", "new switch"]


def test_a_maintenance_explains_the_night_that_it_touches_and_no_later_one(sink, store, alert, mlhpc):
    store(*range(20))
    night_of = iso(night_ns(20, 3))
    mlhpc(
        "history",
        "event",
        "add",
        "--system",
        "cirrus",
        "--on",
        iso(night_ns(20, 0)),
        "--until",
        night_of,
        "pumps",
    )
    alert(20, "--expect", "nightly")
    alert(21, "--expect", "nightly")
    assert states(sink) == ["new"]
    assert "not recorded" in sink.requests[0].json["title"]


def test_an_accepted_alert_ends_and_does_not_come_back(sink, store, alert, mlhpc):
    store(*range(47))
    alert(46)
    store(47)
    mlhpc("baseline", "accept", incident_of(sink), "--reason", "new default is safer")
    alert(47)
    store(48, 49)
    alert(49)
    assert states(sink) == ["new", "resolved"]
    assert "new default is safer" in sink.requests[-1].json["text"]


def test_with_an_alert_the_levels_of_all_its_benchmarks_are_accepted_in_one_file(
    sink, store, alert, mlhpc, tmp_path
):
    store(*range(47))
    alert(46)
    told = sink.requests[0].json["problems"]
    accepted = json.loads(mlhpc("baseline", "accept", incident_of(sink), "--reason", "safer", "--json").out)
    assert len({one["benchmark"] for one in told}) == 5
    series = sorted((one["benchmark"], one["metric"]) for one in told)
    assert sorted((one["benchmark"], one["metric"]) for one in accepted["accepted"]) == series
    assert [Path(one).name for one in accepted["written"]] == ["cirrus.yaml"]
    text = (tmp_path / "baselines/cirrus.yaml").read_text()
    assert text.count("reason: safer") == len(told)
    assert (
        "no whole newest run" not in mlhpc("baseline", "accept", incident_of(sink), "--reason", "safer").out
    )


def test_a_benchmark_whose_newest_run_broke_keeps_its_accepted_value(sink, store, alert, mlhpc, tmp_path):
    store(*range(47))
    alert(46)
    store(47, measurement=None, verdict="worker_exit", failure="worker_exit: 1")
    said = mlhpc("baseline", "accept", incident_of(sink), "--reason", "safer").out
    assert "10 series of what is accepted have no whole newest run in this store" in said
    assert not (tmp_path / "baselines").exists()


def test_nothing_of_a_muted_system_is_sent(sink, store, alert, mlhpc):
    store(*range(46))
    mlhpc("alert", "mute", "cirrus", "--until", "2099-01-01", "--reason", "maintenance")
    assert "1 of muted systems" in alert(45).out
    assert not sink.requests
    assert "maintenance" in mlhpc("alert", "list").out
    mlhpc("alert", "mute", "cirrus", "--off")
    alert(45)
    assert states(sink) == ["new"]


def test_a_system_that_nobody_knows_is_not_muted(store, mlhpc):
    store(0)
    said = mlhpc("alert", "mute", "cirus", "--until", "2d", code=2).err
    assert "no system 'cirus' (did you mean 'cirrus'?); known: " in said


@refusals(__file__)
def test_mistakes_are_explained_and_are_exit_code_2(tmp_path, monkeypatch, refused, command, why):
    monkeypatch.chdir(tmp_path)
    assert why in refused(command)


def test_open_alerts_and_muted_systems_are_listed_for_programs(store, alert, mlhpc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store(*range(46), owner="ada, bob")
    alert(45)
    mlhpc("alert", "mute", "cirrus", "--until", "2099-01-01")
    listed = json.loads(mlhpc("alert", "list", "--json").out)
    assert [(one["owners"], {each["owner"] for each in one["problems"]}) for one in listed["alerts"]] == [
        (["ada", "bob"], {"ada, bob"})
    ]
    heading, row = (re.split("  +", line) for line in mlhpc("alert", "list").out.splitlines()[:2])
    assert row[heading.index("owner")] == "ada, bob"
    assert [one["state"] for one in listed["alerts"]] == ["new"]
    assert [one["system"] for one in listed["muted"]] == ["cirrus"]


def test_the_owner_of_a_node_is_that_of_its_partition_and_nightly_records_alone_say_who(
    state_dir, alert, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    year = Year(unfit=[("cirrus", "n3", 45, 60)], slow=BAD.slow, systems=("cirrus",), days=60)
    nightly = [one for day in range(46) for one in year.night(day)]
    owned = [dataclasses.replace(one, owner="ada", partition_owner="@hpc/ops") for one in nightly]
    later = dataclasses.replace(owned[-1], id="x", created_ns=owned[-1].created_ns + 1, owner="eve")
    store_records(state_dir, [*owned, dataclasses.replace(later, purpose="manual")], "s1")
    messages = json.loads(alert(45, "--json").out)["messages"]
    assert {one["kind"]: one["owners"] for one in messages} == {"regression": ["ada"], "nodes": ["@hpc/ops"]}
