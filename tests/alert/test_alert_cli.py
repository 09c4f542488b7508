"""`mlhpc alert` against a store of records: from nights to requests at a server, once."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from http_sink import HttpSink, Reply
from yearly import Slow, Year, night_ns

from pytest_mlhpc.alert.book import book_path, held
from pytest_mlhpc.cli import main
from pytest_mlhpc.results.dates import iso
from pytest_mlhpc.results.store import Store

#: One system, five benchmarks, 45 nights; then all of them lose 8 %.
BAD = Year(slow=[Slow(45, 60, compute=0.08)], systems=("cirrus",), days=60)


def store(state_dir, days, year=BAD):
    writer = Store(state_dir, f"session-{days[0]}")
    for day in days:
        for one in year.night(day):
            writer.append(one)


@pytest.fixture
def sink(tmp_path, monkeypatch):
    """A server that takes messages, configured in the folder of the call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI_DEFAULT_BRANCH", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HttpSink() as server:
        (tmp_path / "alerts.yaml").write_text(
            f"channels:\n  hook: {{type: webhook, url: '{server.url}/hook', limit_s: 20}}\n"
        )
        yield server


def alert(day, *words):
    """Run it on the morning after a night."""
    return main(["alert", "--at", iso(night_ns(day, 6)), *words])


def got(sink):
    return [(request.json["state"], request.json["incident"]) for request in sink.requests]


def test_a_night_that_became_slower_is_one_message(sink, state_dir, capsys):
    store(state_dir, range(45))
    assert alert(44) == 0
    store(state_dir, range(45, 46))
    assert alert(45) == 0
    ((state, incident),) = got(sink)
    assert state == "new"
    assert incident.startswith("regr-cirrus-20250215-")
    out = capsys.readouterr().out
    assert "new: cirrus: all 5 benchmarks" in out
    assert "1 new message, 1 open" in out


@pytest.mark.parametrize(("configured", "told"), [("", 1), ("branch: trunk\n", 1), ("branch: main\n", 0)])
def test_the_nights_of_the_projects_default_branch_are_watched_unless_another_is_named(
    sink, state_dir, monkeypatch, configured, told
):
    monkeypatch.setenv("CI_DEFAULT_BRANCH", "trunk")
    config = Path("alerts.yaml")
    config.write_text(configured + config.read_text())
    writer = Store(state_dir, "session")
    for day in range(46):
        for one in BAD.night(day):
            writer.append(dataclasses.replace(one, branch="trunk"))
    alert(45)
    assert len(sink.requests) == told


def test_run_twice_it_tells_once(sink, state_dir):
    store(state_dir, range(46))
    assert alert(45) == alert(45) == 0
    assert len(sink.requests) == 1


def test_the_whole_life_of_a_regression_is_two_messages(sink, state_dir):
    year = dataclasses.replace(BAD, slow=[Slow(45, 49, compute=0.08)])
    store(state_dir, range(45), year)
    for day in range(45, 53):
        store(state_dir, range(day, day + 1), year)
        assert alert(day) == 0
    assert [state for state, _incident in got(sink)] == ["new", "resolved"]


def test_a_channel_that_is_down_gets_it_the_next_time(sink, state_dir, capsys):
    store(state_dir, range(46))
    sink.then(Reply(503))
    assert alert(45) == 75
    assert re.fullmatch(
        rf"\S+-1-new: hook: {sink.url}: answered 503: \{{\}}; it is tried again next time\n",
        capsys.readouterr().err,
    )
    assert alert(45) == 0
    assert alert(45) == 0
    assert len(sink.requests) == 2
    assert len({request.headers["idempotency-key"] for request in sink.requests}) == 1


def test_a_channel_that_refuses_is_told_once(sink, state_dir, capsys):
    store(state_dir, range(46))
    sink.then(Reply(400))
    assert alert(45) == 1
    assert re.fullmatch(rf"\S+-1-new: hook: {sink.url}: answered 400: \{{\}}\n", capsys.readouterr().err)
    assert alert(45) == 0
    assert len(sink.requests) == 1


def test_a_lost_book_announces_nothing_older_than_a_night(sink, state_dir, capsys):
    store(state_dir, range(46))
    assert alert(45) == 0
    store(state_dir, range(46, 50))
    book_path(state_dir).unlink()
    assert alert(49) == 0
    assert len(sink.requests) == 1
    assert "0 new messages, 1 open" in capsys.readouterr().out


def test_a_damaged_book_is_told_and_kept(sink, state_dir, capsys):
    store(state_dir, range(46))
    book_path(state_dir).parent.mkdir(parents=True)
    book_path(state_dir).write_text("{")
    assert alert(45) == 0
    assert "damaged" in capsys.readouterr().err
    assert len(list(book_path(state_dir).parent.glob("book.damaged-*.json"))) == 1


def test_a_dry_run_sends_and_keeps_nothing(sink, state_dir, capsys):
    store(state_dir, range(46))
    assert alert(45, "--dry-run") == 0
    assert "new: cirrus" in capsys.readouterr().out
    assert not sink.requests
    assert not book_path(state_dir).exists()


def test_for_programs_a_message_is_a_line_of_json(state_dir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store(state_dir, range(46))
    assert alert(45, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == "new"


def test_a_night_that_did_not_run_is_an_alert_where_nights_are_expected(sink, state_dir):
    store(state_dir, range(20))
    assert alert(21) == 0
    assert not sink.requests
    assert alert(21, "--expect", "nightly") == 0
    assert [(state, incident[:11]) for state, incident in got(sink)] == [("new", "stal-cirrus")]
    store(state_dir, range(22, 23))
    assert alert(22, "--expect", "nightly") == 0
    assert [state for state, _incident in got(sink)] == ["new", "resolved"]


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_no_history_is_said_and_is_exit_code_5(sink, capsys, options):
    assert alert(1, *options) == 5
    assert "no history" in capsys.readouterr().err


def test_another_alert_at_work_is_exit_code_75(sink, state_dir, capsys, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.alert.book.PATIENCE_S", 0.0)
    monkeypatch.setattr("pytest_mlhpc.alert.alert_cli.held", lambda place: held(place, patience_s=0.0))
    with held(state_dir):
        assert alert(1) == 75
    assert "another mlhpc alert" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--at", "soon"), ("--config", "absent.yaml"), ("--expect", "weekly")])
def test_what_cannot_be_is_exit_code_4(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["alert", *words])
    except SystemExit as end:
        code = end.code
    assert code == 4


# --- ack and mute


def incident_of(sink):
    return got(sink)[0][1]


def test_an_acknowledged_alert_is_silent_until_then(sink, state_dir, capsys):
    store(state_dir, range(46))
    assert alert(45) == 0
    assert main(["ack", incident_of(sink)[:12], "--until", "3d", "--reason", "vendor knows"]) == 0
    assert "is acknowledged until" in capsys.readouterr().out
    assert main(["ack"]) == 0
    assert "acknowledged by" in capsys.readouterr().out


def test_an_accepted_alert_ends_and_does_not_come_back(sink, state_dir):
    store(state_dir, range(47))
    assert alert(46) == 0
    store(state_dir, range(47, 48))
    assert main(["ack", incident_of(sink), "--accept", "--reason", "new default is safer"]) == 0
    assert alert(47) == 0
    store(state_dir, range(48, 50))
    assert alert(49) == 0
    assert [state for state, _incident in got(sink)] == ["new", "resolved"]
    assert "new default is safer" in sink.requests[-1].json["text"]


def test_nothing_of_a_muted_system_is_sent(sink, state_dir, capsys):
    assert main(["mute", "cirrus", "--until", "2099-01-01", "--reason", "maintenance"]) == 0
    store(state_dir, range(46))
    assert alert(45) == 0
    assert not sink.requests
    assert "1 of muted systems" in capsys.readouterr().out
    assert main(["mute"]) == 0
    assert "maintenance" in capsys.readouterr().out
    assert main(["mute", "cirrus", "--off"]) == 0
    assert alert(45) == 0
    assert [state for state, _incident in got(sink)] == ["new"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ack", "x", "--until", "3d", "--reason", "r"], "no open alert 'x'"),
        (["ack", "x", "--until", "3d"], "--reason is missing"),
        (["ack", "x", "--reason", "r"], "either --until TIME or --accept"),
        (["ack", "x", "--until", "soon", "--reason", "r"], "neither a time like 7d"),
        (["ack", "x", "--until", "2001-01-01", "--reason", "r"], "is over already"),
        (["mute", "cirrus"], "either --until TIME or --off"),
        (["mute", "cirrus", "--off"], "is not muted"),
    ],
)
def test_mistakes_of_ack_and_mute_are_explained(words, said, capsys):
    assert main(words) == 4
    assert said in capsys.readouterr().err


def test_nothing_to_list_is_exit_code_5(capsys):
    assert main(["ack"]) == main(["mute"]) == 5
    assert capsys.readouterr().out == "no alert is open\nno system is muted\n"
