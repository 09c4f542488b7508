"""A push that is killed at any line of sending or of replacing a cursor, or is not alone, loses and doubles nothing.

A child process pushes to a sink that writes each request down before it acknowledges it. SIGKILL comes when a line of the product
is about to run: at each line before which a file has changed.
"""

import contextlib
import json
import os
import secrets
from pathlib import Path

import pytest
from killed_lines import killed_at, moments
from nights_of import store
from pushing import AT_NS, Server, floats, journaled, measured, noted, start

from pytest_mlhpc.history.events import Removal, remove
from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx import push as pushing
from pytest_mlhpc.influx.cursor import begin, read_start, rejected_folder, restart, waiting
from pytest_mlhpc.influx.push import Sender, push_records, retry_rejected
from pytest_mlhpc.store import locations

TRACED = {module.__file__ for module in (pushing, cursors, locations)}


EVENTS = ["broken", "event 1", "event 2 (removed)", "slower"]


def refuses_four(line):
    return " value=4.0," in line


class WrittenDown(Server):
    """Takes a request when it is on the disk, where it outlives a kill."""

    def __init__(self, folder: Path, bad=refuses_four):
        super().__init__(bad)
        self._folder = folder
        folder.mkdir(parents=True)

    def write(self, lines):
        (self._folder / secrets.token_hex(8)).write_bytes(lines)
        super().write(lines)

    def all_ever(self):
        """Return the server that has taken all that was ever written down."""
        found = Server(self._bad)
        for path in self._folder.iterdir():
            with contextlib.suppress(pushing.RefusedError):
                found.write(path.read_bytes())
        return found


def work(state_dir, server):
    """Do what `mlhpc records push` and a session do."""
    begun = begin(state_dir, lambda _text: None)
    push_records(Sender(server, state_dir), begun, lambda _text: None)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Return what makes a new store and server: an old record, then chunks of new ones in two files, events and a journal."""
    monkeypatch.setattr(pushing, "CHUNK_LINES", 4)

    def make(name):
        state_dir, folder = tmp_path / name / "state", tmp_path / name / "server"
        store(state_dir, measured(1), "old")
        begin(state_dir, lambda _text: None)
        store(state_dir, measured(2, 3, 4), "old")
        store(state_dir, measured(5, 6, 7), "new")
        for number in (1, 2):
            noted(state_dir, number, f"event {number}", made_ns=2 * AT_NS)
        remove(state_dir, Removal("00000002", "me", 2 * AT_NS))
        journaled(state_dir, "slower", "broken", at_ns=2 * AT_NS)
        return state_dir, WrittenDown(folder)

    return make


def refused(state_dir):
    texts = [path.read_text() for path in rejected_folder(state_dir).glob("*.jsonl")]
    return {json.loads(row)["line"] for text in texts for row in text.splitlines()}


def test_a_push_that_is_killed_at_any_line_has_everything_once_after_another_push(world):
    state_dir, server = world("first")
    numbers = moments(TRACED, state_dir.parent, lambda: work(state_dir, server))
    assert len(numbers) > 20
    for number in numbers:
        state_dir, server = world(str(number))
        assert killed_at(TRACED, number, lambda: work(state_dir, server))  # noqa: B023 - it is called at once
        work(state_dir, server)
        assert server.all_ever().values == floats(2, 3, 5, 6, 7)
        assert server.all_ever().events == EVENTS
        assert len(server.all_ever().points) == 15
        assert len(refused(state_dir)) == 1
        assert waiting(state_dir).both == 0
        assert list(state_dir.glob("influx/**/*.json")) != []


def test_a_first_start_that_is_killed_at_any_line_is_whole_or_made_again(tmp_path):
    def make(name):
        store(tmp_path / name, measured(1))
        return tmp_path / name

    state_dir = make("first")
    numbers = moments(TRACED, state_dir, lambda: begin(state_dir, lambda _text: None))
    for number in numbers:
        state_dir = make(str(number))
        assert killed_at(TRACED, number, lambda: begin(state_dir, lambda _text: None))  # noqa: B023 - it is called at once
        begun = begin(state_dir, lambda _text: None)
        assert begun == read_start(state_dir)
        assert list(begun.sizes) == ["2027-01/s1.jsonl"]


def test_a_start_anew_that_is_killed_at_any_line_sends_all_or_what_waited(world):
    state_dir, _ = world("first")
    numbers = moments(TRACED, state_dir.parent, lambda: restart(state_dir, 0))
    for number in numbers:
        state_dir, server = world(str(number))
        work(state_dir, server)
        assert killed_at(TRACED, number, lambda: restart(state_dir, 0))  # noqa: B023 - it is called at once
        anew = start(state_dir).since_ns == 0
        work(state_dir, server)
        assert server.all_ever().values == floats(*[1] * anew, 2, 3, 5, 6, 7)
        assert waiting(state_dir).both == 0


def test_refused_lines_that_are_sent_once_more_outlive_a_kill_at_any_line(world, tmp_path):
    def make(name):
        state_dir, server = world(name)
        work(state_dir, server)
        return state_dir, WrittenDown(tmp_path / name / "again", lambda _line: False)

    def retry():
        retry_rejected(Sender(server, state_dir))

    state_dir, server = make("first")
    numbers = moments(TRACED, state_dir.parent, retry)
    assert server.values == [4.0]
    for number in numbers:
        state_dir, server = make(str(number))
        assert killed_at(TRACED, number, retry)
        retry()
        assert server.all_ever().values == [4.0]
        assert refused(state_dir) == set()


def test_several_processes_that_push_while_records_are_written_lose_and_double_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "CHUNK_LINES", 4)
    state_dir, server = tmp_path / "state", WrittenDown(tmp_path / "server", lambda _line: False)
    restart(state_dir, 0)
    children = []
    for _ in range(3):
        if not (child := os.fork()):
            code = 1
            with contextlib.suppress(Exception):
                for _ in range(30):
                    work(state_dir, server)
                code = 0
            os._exit(code)
        children.append(child)
    for number in range(40):
        store(state_dir, measured(number), f"s{number % 4}")
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    work(state_dir, server)
    assert server.all_ever().values == floats(*range(40))
    assert waiting(state_dir).both == 0
