"""`mlhpc records push`: what it says, its exit codes, and that `--since` loses nothing that waits."""

import dataclasses
import json
import time

import pytest
from nights_of import DAY, store
from pushing import Server, floats, measured

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx.cursor import begin, waiting
from pytest_mlhpc.influx.push import UnavailableError

LATER = 75


class Sink(Server):
    """The server of one test, as `mlhpc` opens it."""

    def __call__(self, _server, *, timeout_s):
        assert timeout_s == 60.0
        return self


@pytest.fixture
def sink(monkeypatch):
    found = Sink()
    monkeypatch.setattr("pytest_mlhpc.cli.records.InfluxSink", found)
    monkeypatch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:9")
    return found


@pytest.fixture
def push(state_dir, sink, capsys):
    """Return what runs the command, and returns its exit code, output and errors."""

    def run(*arguments):
        code = main(["records", "push", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def made(days_ago, *numbers):
    """Return records of these figures that were made so many days ago."""
    moment = time.time_ns() - days_ago * DAY
    return [dataclasses.replace(one, created_ns=moment) for one in measured(*numbers)]


def test_the_first_push_sends_nothing_that_was_there_and_says_what_would(state_dir, push, sink):
    store(state_dir, made(1, 1, 2))
    code, out, err = push()
    assert (code, out) == (0, "0 points sent\n")
    assert err == (
        "records are sent from now on; what was in 1 record file before is sent by `mlhpc records push --since DATE` only\n"
    )
    store(state_dir, made(0, 3))
    assert push() == (0, "2 points sent\n", "")
    assert sink.values == [3.0]
    assert push() == (0, "0 points sent\n", "")
    assert json.loads(push("--json")[1]) == {
        "schema": "mlhpc/records-push/1", "points": 0, "rejected": 0, "unread": 0, "waiting": 0,
    }  # fmt: skip


def test_since_sends_all_since_then_each_time_it_is_asked(state_dir, push, sink):
    store(state_dir, made(10, 1), "a")
    store(state_dir, made(1, 2, 3), "b")
    code, out, _ = push("--since", "2d")
    assert (code, out.splitlines()[0]) == (0, "4 points sent")
    assert sink.values == floats(2, 3)
    assert "not sent: 1 record from before " in out
    assert push("--since", "1970-01-01") == (0, "6 points sent\n", "")
    assert sink.values == floats(1, 2, 3)
    assert push("--since", "1970-01-01") == (0, "6 points sent\n", "")
    assert push() == (0, "0 points sent\n", "")


def test_since_sends_first_what_waits_though_it_is_older(state_dir, push, sink):
    begin(state_dir, print)
    store(state_dir, made(0, 1))
    assert push("--since", "2100-01-01")[:2] == (
        0,
        "2 points sent\nnot sent: 1 record from before 2100-01-01T00:00:00Z; `mlhpc records push --since DATE` sends older ones\n",
    )
    assert sink.values == [1.0]


def test_a_server_that_is_away_leaves_the_records_and_their_number(state_dir, push, sink):
    begin(state_dir, print)
    store(state_dir, made(0, 1, 2))
    sink.away = [UnavailableError("http://127.0.0.1:9 does not answer: refused")] * 2
    assert push("--wait", "0") == (
        LATER,
        "0 points sent\n",
        "mlhpc records push: http://127.0.0.1:9 does not answer: refused\n2 records left to send: try again later\n",
    )
    assert push("--wait", "0", "--since", "1970-01-01")[0] == LATER
    assert push() == (0, "4 points sent\n", "")
    assert sink.values == floats(1, 2)


def test_since_forgets_nothing_that_waits_where_the_server_is_away(state_dir, push, sink):
    begin(state_dir, print)
    store(state_dir, made(0, 1))
    sink.away = [UnavailableError("away")]
    assert push("--wait", "0", "--since", "2100-01-01")[0] == LATER
    assert push() == (0, "2 points sent\n", "")


def test_since_goes_on_by_a_plain_push_where_the_server_went_away(state_dir, push, sink):
    store(state_dir, made(9, 1, 2))
    sink.away = [UnavailableError("away")]
    assert push("--wait", "0", "--since", "30d")[0] == LATER
    assert waiting(state_dir).both == 2
    assert push() == (0, "4 points sent\n", "")


def test_a_damaged_line_is_named_and_the_exit_code_tells(state_dir, push, sink):
    begin(state_dir, print)
    store(state_dir, made(0, 1, 2))
    (path,) = state_dir.glob("records/*/*.jsonl")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{\n" + second)
    code, out, err = push()
    assert (code, out) == (1, "4 points sent\n")
    assert err.startswith(f"{path}: byte {len(first)}: damaged line: ")
    assert push() == (0, "0 points sent\n", "")


def test_a_damaged_start_sends_nothing_until_a_date_is_named(state_dir, push, sink):
    begin(state_dir, print)
    (state_dir / "influx/start.json").write_text("{")
    store(state_dir, made(0, 1))
    code, out, err = push()
    assert (code, out) == (4, "")
    assert "start.json: damaged: " in err
    assert "nothing is sent before `mlhpc records push --since DATE` says from when on" in err
    assert push("--since", "1d") == (0, "2 points sent\n", "")


def test_refused_lines_are_named_with_their_folder_and_sent_once_more(state_dir, push, sink):
    begin(state_dir, print)
    store(state_dir, made(0, *range(3)))
    sink._bad = lambda line: " value=1.0," in line
    code, out, _ = push()
    assert code == 1
    assert out == (
        "5 points sent\n"
        "the server refused 1 line (1: 400: partial write: field type conflict), which lie in "
        f"{state_dir / 'influx/rejected'}; `mlhpc records push --retry-rejected` sends them once more\n"
    )
    sink._bad = lambda _line: False
    assert push("--retry-rejected") == (0, "1 point sent\n", "1 refused line sent again\n")
    assert sink.values == floats(0, 1, 2)


@pytest.mark.parametrize(
    "options",
    [["--check", "--since", "1d"], ["--since", "1d", "--retry-rejected"], ["--check", "--retry-rejected"]],
    ids=" ".join,
)
def test_what_excludes_each_other_is_refused(push, options):
    code, _, err = push(*options)
    assert code == 2
    assert "--check, --since, --retry-rejected: give one of them" in err


def test_a_time_that_is_none_is_refused(push):
    code, _, err = push("--since", "yesterday")
    assert code == 2
    assert "--since 'yesterday' is neither a time like 30d or 12h nor a date like 2026-11-21" in err
