"""What a session does for InfluxDB: no outcome hangs on it, and the summary says what waits."""

import dataclasses
import os
import socket
import time

import pluggy
import pytest
from nights_of import store
from pushing import Server, measured

from pytest_mlhpc.influx import publisher as publishing
from pytest_mlhpc.influx import push as pushing
from pytest_mlhpc.influx.cursor import begin, read_start, waiting
from pytest_mlhpc.influx.publisher import Publisher, register
from pytest_mlhpc.influx.push import UnavailableError


@pytest.fixture
def silent():
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def publish(state_dir):
    """Return what runs a session with some records, and returns what it says."""

    def run(url, *numbers, hurry=False, limit_s=600, **more):
        publisher = Publisher(state_dir, {"MLHPC_INFLUX_URL": url, **more}, limit_s=limit_s)
        publisher.mlhpc_records_begin()
        record_now(state_dir, *(numbers or (1,)))
        return end(publisher, hurry=hurry)

    return run


def record_now(state_dir, *numbers, session="s1"):
    store(
        state_dir,
        [dataclasses.replace(one, created_ns=time.time_ns()) for one in measured(*numbers)],
        session,
    )


def end(publisher, *, hurry=False):
    notes = []
    publisher.mlhpc_records_end(tell=notes.append, hurry=hurry)
    return notes


def test_without_a_server_nothing_is_written(state_dir):
    manager = pluggy.PluginManager("pytest_mlhpc")
    register(manager, state_dir, {})
    assert not manager.get_plugins()
    register(manager, state_dir, {"MLHPC_INFLUX_URL": "http://localhost:8086"})
    register(manager, state_dir, {"MLHPC_INFLUX_URL": "http://localhost:8086"})
    assert len(manager.get_plugins()) == 1
    assert not state_dir.exists()


def test_the_first_session_says_what_it_will_not_send(state_dir, silent, publish):
    record_now(state_dir, 1, 2, session="old")
    (note,) = publish(silent, 3, MLHPC_INFLUX_PUSH="no")
    assert note == (
        "InfluxDB: records are sent from now on; what was in 1 record file before is sent by "
        "`mlhpc records push --since DATE` only"
    )
    assert waiting(state_dir).both == 1
    assert publish(silent, 4, MLHPC_INFLUX_PUSH="no") == []
    assert waiting(state_dir).both == 2


def test_a_server_that_never_answers_delays_the_end_by_no_more_than_its_limit(state_dir, silent, publish):
    assert publish(silent, 1, 2, limit_s=0.05) == [
        "InfluxDB: not all records were sent within 0.05 s",
        "InfluxDB: 2 records wait; `mlhpc records push` sends what waits",
    ]
    assert waiting(state_dir).both == 2


@pytest.mark.parametrize("url", ["nonsense", "http://user:s3cret@localhost"])
def test_a_wrong_address_is_reported_at_the_end_and_the_records_wait(state_dir, publish, url):
    first, second = publish(url)
    assert first.startswith("InfluxDB: not sent: MLHPC_INFLUX_URL")
    assert second == "InfluxDB: 1 record waits; `mlhpc records push` sends what waits"
    assert "s3cret" not in first
    assert waiting(state_dir).both == 1


@pytest.mark.parametrize(
    "more", [{"MLHPC_INFLUX_PUSH": "no"}, {"hurry": True}], ids=["by configuration", "in a hurry"]
)
def test_a_session_may_leave_all_to_a_later_push(state_dir, silent, publish, more):
    assert publish(silent, **more) == []
    assert waiting(state_dir).both == 1


def test_a_session_that_has_nothing_to_send_does_not_even_load_the_client(
    state_dir, silent, publish, monkeypatch
):
    begin(state_dir, print)
    monkeypatch.setattr(publishing, "InfluxSink", pytest.fail)
    assert end(Publisher(state_dir, {"MLHPC_INFLUX_URL": silent})) == []


@pytest.fixture
def in_the_way(state_dir):
    """A file where the folder for InfluxDB should be."""
    state_dir.mkdir()
    (state_dir / "influx").write_text("in the way")
    return state_dir / "influx"


def test_a_start_that_could_not_be_written_is_tried_again_at_the_end_and_excludes_no_record_of_the_session(
    state_dir, silent, in_the_way
):
    record_now(state_dir, 1, session="old")
    publisher = Publisher(state_dir, {"MLHPC_INFLUX_URL": silent, "MLHPC_INFLUX_PUSH": "no"})
    publisher.mlhpc_records_begin()
    record_now(state_dir, 2, 3)
    in_the_way.unlink()
    (note,) = end(publisher)
    assert "what was in 1 record file before" in note
    assert waiting(state_dir).both == 2
    assert list(read_start(state_dir).sizes) == [f"{time.strftime('%Y-%m', time.gmtime())}/old.jsonl"]


def test_a_start_that_cannot_be_written_is_reported_with_the_way_out(silent, publish, in_the_way):
    (note,) = publish(silent)
    assert note.startswith(f"InfluxDB: not sent: {in_the_way}")
    assert "Not a directory" in note


def test_a_disk_that_is_full_for_the_start_names_the_command(state_dir, silent, publish, monkeypatch):
    def refuse(*_arguments, **_named):
        raise OSError(28, os.strerror(28), str(state_dir / "influx"))

    monkeypatch.setattr("pytest_mlhpc.influx.cursor.make_directories", refuse)
    (note,) = publish(silent)
    assert note == (
        f"InfluxDB: not sent: {state_dir / 'influx'}: cannot be made: No space left on device; what is recorded until it can is "
        "sent by `mlhpc records push --since DATE` only"
    )


def test_a_damaged_start_is_reported_at_the_end_of_each_session(state_dir, silent, publish):
    begin(state_dir, print)
    (state_dir / "influx/start.json").write_text("{")
    for _ in range(2):
        (note,) = publish(silent)
        assert note.startswith(f"InfluxDB: not sent: {state_dir / 'influx/start.json'}: damaged: ")
        assert "`mlhpc records push --since DATE` says from when on" in note


class OpenServer(Server):
    """A server as a session opens it."""

    def __call__(self, _server, *, timeout_s):
        assert timeout_s == publishing.REQUEST_LIMIT_S
        return self


def test_damaged_lines_are_named_in_one_sentence(state_dir, silent, monkeypatch):
    monkeypatch.setattr(publishing, "InfluxSink", OpenServer())
    begin(state_dir, print)
    record_now(state_dir, 1)
    (path,) = state_dir.glob("records/*/s1.jsonl")
    path.write_bytes(path.read_bytes() + b"a\nb\nc\n")
    (note,) = end(Publisher(state_dir, {"MLHPC_INFLUX_URL": silent}))
    assert note.startswith(f"InfluxDB: {path}: byte ")
    assert note.endswith("(skipped, left as it is) (and 2 more problems)")
    assert waiting(state_dir).both == 0


def test_refused_lines_are_named_also_where_the_server_goes_away_after_them(state_dir, silent, monkeypatch):
    class Dying(OpenServer):
        def write(self, lines):
            if b" value=2.0," in lines:
                raise UnavailableError("it went away")
            super().write(lines)

    monkeypatch.setattr(pushing, "CHUNK_LINES", 2)
    monkeypatch.setattr(publishing, "InfluxSink", Dying(lambda line: " value=1.0," in line))
    begin(state_dir, print)
    record_now(state_dir, 1, 2, 3)
    assert end(Publisher(state_dir, {"MLHPC_INFLUX_URL": silent})) == [
        (
            "InfluxDB: the server refused 1 line (1: 400: partial write: field type conflict), which lie in "
            f"{state_dir / 'influx/rejected'}; `mlhpc records push --retry-rejected` sends them once more"
        ),
        "InfluxDB: not sent: it went away",
        "InfluxDB: 2 records wait; `mlhpc records push` sends what waits",
    ]
