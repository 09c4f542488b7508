"""Sending, against a sink that does what servers do: refuse, be away, take half."""

import json
import time

import pytest
from pushing import AT_NS, Failing, Server, floats, journaled, measured, noted, push, start, stored

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history.events import Removal, planned, record_planned, remove
from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx import push as pushing
from pytest_mlhpc.influx.cursor import rejected_folder, restart, waiting
from pytest_mlhpc.influx.push import (
    Patience,
    Sender,
    StuckError,
    UnavailableError,
    push_records,
    retry_rejected,
)
from pytest_mlhpc.influx.schema import lines_of

FOREVER = Patience(until=float("inf"))


@pytest.mark.parametrize(
    ("count", "limit"), [(5, 1 << 30), (150, 2000)], ids=["at once", "halved until it fits"]
)
def test_all_is_sent_and_nothing_waits(state_dir, count, limit):
    server = Server(limit=limit)
    stored(state_dir, *range(count))
    progress, said = push(server, state_dir)
    assert len(server.points) == progress.points == 2 * count
    assert (progress.rejected, said, waiting(state_dir).both) == (0, [], 0)


def test_records_of_many_small_files_share_a_request(state_dir):
    for number in range(30):
        stored(state_dir, number, session=f"s{number}")
    server = Server()
    push(server, state_dir)
    assert len(server.requests) == 1
    assert server.values == floats(*range(30))
    assert waiting(state_dir).both == 0


def test_no_request_is_larger_than_its_limits(state_dir, monkeypatch):
    stored(state_dir, *range(40))
    line = len("".join(lines_of(measured(1)[0]))) // 2
    for limit, most in ({"CHUNK_LINES": 7}, 6), ({"CHUNK_BYTES": 11 * line}, 10):
        restart(state_dir, 0)
        server = Server()
        with monkeypatch.context() as patch:
            for name, value in limit.items():
                patch.setattr(pushing, name, value)
            push(server, state_dir)
        assert max(map(len, server.requests)) == most
        assert server.values == floats(*range(40))


def test_what_a_living_session_adds_is_sent_by_the_next_push_alone(state_dir):
    server = Server()
    for number in (1, 2):
        stored(state_dir, number)
        push(server, state_dir)
    assert server.values == floats(1, 2)
    assert [len(request) for request in server.requests] == [2, 2]


def test_nothing_is_lost_while_the_server_is_away(state_dir):
    server = Server()
    stored(state_dir, *range(5))
    server.away = [UnavailableError("away", 503)]
    with pytest.raises(UnavailableError):
        push(server, state_dir)
    assert server.points == {}
    assert waiting(state_dir).both == 5
    push(server, state_dir)
    assert server.values == floats(*range(5))


def test_a_server_that_comes_back_in_time_is_waited_for_as_long_as_it_asks(state_dir):
    waits = []
    server = Server()
    stored(state_dir, 1)
    server.away = [UnavailableError("busy", 429, retry_after_s=7.0), UnavailableError("away")]
    push(server, state_dir, Patience(until=float("inf"), wait=waits.append))
    assert waits == [7.0, 2.0]
    assert server.values == [1.0]


def aside(state_dir):
    """Return what was put aside, as rows."""
    texts = [path.read_text() for path in rejected_folder(state_dir).iterdir()]
    return [json.loads(row) for text in texts for row in text.splitlines()]


def poisoned(*numbers):
    """Return whether a line is that of a figure which the server refuses."""
    return lambda line: any(f" value={number}.0," in line for number in numbers)


@pytest.mark.parametrize("bad", [{3}, {0, 199}, {100, 101, 102, 103}])
def test_poison_lines_are_put_aside_with_the_servers_reason(state_dir, bad):
    server = Server(poisoned(*bad))
    stored(state_dir, *range(200))
    progress, _ = push(server, state_dir)
    assert server.values == floats(*(number for number in range(200) if number not in bad))
    assert (progress.points, progress.rejected) == (400 - len(bad), len(bad))
    rows = aside(state_dir)
    assert sorted(row["line"].partition(" value=")[2].partition(",")[0] for row in rows) == sorted(
        f"{number}.0" for number in bad
    )
    assert {row["reason"] for row in rows} == {"400: partial write: field type conflict"}
    assert waiting(state_dir).both == 0


@pytest.fixture
def chunked(state_dir, monkeypatch):
    """A store that is sent in ten requests."""
    monkeypatch.setattr(pushing, "CHUNK_LINES", 20)
    stored(state_dir, *range(100))
    return state_dir


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_several_requests_at_a_time_send_all_and_put_the_same_lines_aside(chunked, lanes):
    server = Server(poisoned(33))
    progress, _ = push(server, chunked, lanes=lanes)
    assert len(server.points) == progress.points == 199
    assert progress.rejected == 1
    assert waiting(chunked).both == 0


def test_the_cursor_moves_only_behind_what_was_acknowledged_in_order(chunked):
    """The third of ten requests finds the server away: what came behind it may be there or not, and is sent again."""
    away = Failing(lambda lines: UnavailableError("away") if b" value=25.0," in lines else None)
    with pytest.raises(UnavailableError):
        push(away, chunked, lanes=2)
    assert waiting(chunked).both in {80, 90, 100}
    server = Server()
    push(server, chunked, lanes=2)
    assert set(floats(*range(20, 100))) <= set(server.values)
    assert waiting(chunked).both == 0


def test_a_waiting_request_ends_when_another_one_has_failed(chunked):
    away = UnavailableError("away", retry_after_s=3600)
    broken = Failing(lambda lines: ZeroDivisionError() if b" value=0.0," in lines else away)
    with pytest.raises(ZeroDivisionError):
        push(broken, chunked, FOREVER, lanes=2)
    assert waiting(chunked).both == 100


def test_a_server_that_refuses_everything_gets_nothing_put_aside(state_dir):
    stored(state_dir, *range(100))
    with pytest.raises(StuckError, match="every line is refused"):
        push(Server(lambda _line: True), state_dir)
    assert not rejected_folder(state_dir).exists()
    assert waiting(state_dir).both == 100


def test_what_was_refused_can_be_sent_again(state_dir):
    stored(state_dir, *range(10))
    push(Server(poisoned(3, 4)), state_dir)
    server = Server(poisoned(4))
    assert retry_rejected(Sender(server, state_dir)) == 2
    assert server.values == [3.0]
    assert [" value=4.0," in row["line"] for row in aside(state_dir)] == [True]
    assert retry_rejected(Sender(server, state_dir)) == 1
    assert len(aside(state_dir)) == 1


def test_refused_lines_stay_while_the_server_is_away(state_dir):
    stored(state_dir, *range(3))
    push(Server(poisoned(1)), state_dir)
    server = Server()
    server.away = [UnavailableError("away")]
    with pytest.raises(UnavailableError):
        retry_rejected(Sender(server, state_dir))
    assert len(aside(state_dir)) == 1


DAMAGED = {
    "empty": b"", "torn": b"{", "a list": b"[]\n", "no text": b"\xff\xfe\n", "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_file_of_refused_lines_that_is_damaged_stays_and_hides_no_other(state_dir, content):
    folder = rejected_folder(state_dir)
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(content)
    row = {"reason": "400: no\u2028wonder", "line": "mlhpc_metric,n=1 value=1.0 1"}
    (folder / "b.jsonl").write_text(json.dumps(row, ensure_ascii=True) + "\n")
    server = Server()
    assert retry_rejected(Sender(server, state_dir)) == 1
    assert server.values == [1.0]
    assert (folder / "a.jsonl").read_bytes() == content
    assert not (folder / "b.jsonl").exists()


@pytest.mark.parametrize("lanes", [1, 2])
def test_all_is_sent_though_no_cursor_can_be_written_and_sent_again_later(chunked, monkeypatch, lanes):
    def full(*_arguments, **_named):
        raise StoreError("cursor: cannot be written: No space left on device")

    server = Server()
    with monkeypatch.context() as patch:
        patch.setattr(cursors, "replace_file", full)
        with pytest.raises(
            StoreError, match="No space left on device; all was sent, and some of it will be sent again"
        ):
            push(server, chunked, lanes=lanes)
    assert server.values == floats(*range(100))
    assert waiting(chunked).both == 100
    push(server, chunked, lanes=lanes)
    assert server.values == floats(*range(100))
    assert waiting(chunked).both == 0


def test_lines_that_cannot_be_put_aside_are_not_passed(state_dir, monkeypatch):
    stored(state_dir, *range(4))

    def full(*_arguments, **_named):
        raise StoreError("rejected: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cursors, "replace_file", full)
        with pytest.raises(StoreError, match="No space left on device"):
            push(Server(poisoned(2)), state_dir)
    assert waiting(state_dir).both == 4
    push(Server(poisoned(2)), state_dir)
    assert len(aside(state_dir)) == 1


def test_two_pushes_at_once_send_everything_and_break_nothing(state_dir, monkeypatch):
    """The second one runs whenever the first one has just been acknowledged."""
    monkeypatch.setattr(pushing, "CHUNK_LINES", 4)
    stored(state_dir, *range(20))
    outer = Server()

    class Racing(Server):
        def write(self, lines):
            super().write(lines)
            push(outer, state_dir)

    inner = Racing()
    push(inner, state_dir)
    assert inner.values == outer.values == floats(*range(20))
    assert waiting(state_dir).both == 0


def test_a_slow_push_that_puts_a_cursor_back_costs_nothing_but_sending(state_dir, monkeypatch):
    monkeypatch.setattr(pushing, "CHUNK_LINES", 4)
    stored(state_dir, *range(6))
    server = Server()
    slow = pushing._unsent(state_dir, start(state_dir), pushing.Progress(), print)
    name, early, _ = next(slow)
    push(server, state_dir)
    cursors.write_cursor(state_dir, name, early)
    assert waiting(state_dir).both == 5
    push(server, state_dir)
    assert server.values == floats(*range(6))
    assert waiting(state_dir).both == 0


def test_a_torn_last_line_is_sent_when_it_ends(state_dir):
    path = stored(state_dir, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    server = Server()
    progress, said = push(server, state_dir)
    assert (server.values, progress.unread, said) == ([1.0], 0, [])
    path.write_bytes(whole)
    push(server, state_dir)
    assert server.values == floats(1, 2)


def test_a_damaged_line_is_passed_over_once_and_named_with_its_place(state_dir):
    path = stored(state_dir, 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{damaged\n" + lines[2])
    server = Server()
    progress, (said,) = push(server, state_dir)
    assert said.startswith(f"{path}: byte {len(lines[0])}: damaged line: ")
    assert progress.unread == 1
    assert server.values == floats(1, 3)
    assert push(server, state_dir)[1] == []


def test_a_record_of_a_newer_version_waits_for_it_and_is_named_each_time(state_dir):
    path = stored(state_dir, 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    newer = json.dumps({**json.loads(lines[1]), "schema": 99}).encode() + b"\n"
    path.write_bytes(lines[0] + newer + lines[2])
    server = Server()
    for _ in range(2):
        progress, (said,) = push(server, state_dir)
        assert "schema 99 is newer than 2" in said
        assert said.endswith("(waits)")
        assert progress.unread == 1
        assert waiting(state_dir).both == 2
    assert server.values == floats(1, 3)
    path.write_bytes(b"".join(lines))  # stands for the version that reads it
    assert push(server, state_dir)[1] == []
    assert server.values == floats(1, 2, 3)


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_sent(state_dir, monkeypatch):
    stored(state_dir, 1, session="s1")
    broken = stored(state_dir, 2, session="s2")
    real = cursors.read_lines

    def read(path, *arguments, **named):
        if path == broken:
            raise StoreError(f"{path}: cannot be read: Input/output error")
        return real(path, *arguments, **named)

    server = Server()
    with monkeypatch.context() as patch:
        patch.setattr(cursors, "read_lines", read)
        progress, said = push(server, state_dir)
    assert (server.values, progress.unread) == ([1.0], 1)
    assert said == [f"{broken}: cannot be read: Input/output error"]
    push(server, state_dir)
    assert server.values == floats(1, 2)


def test_a_record_store_that_cannot_be_listed_is_named(state_dir, monkeypatch):
    stored(state_dir, 1)
    begun = start(state_dir)

    def fail(_state_dir):
        raise StoreError("records: cannot be listed: Permission denied")

    monkeypatch.setattr(cursors, "record_files", fail)
    with pytest.raises(StoreError, match="cannot be listed"):
        push_records(Sender(Server(), state_dir), begun, print)


# --- events


def test_events_and_the_journal_are_sent_with_the_records_and_once(state_dir):
    stored(state_dir, 1)
    noted(state_dir, 1, "driver 570 to 580")
    journaled(state_dir, "slower", "broken")
    server = Server()
    push(server, state_dir)
    assert server.values == [1.0]
    assert server.events == ["broken", "driver 570 to 580", "slower"]
    assert len(server.requests) == 1
    assert waiting(state_dir).both == 0
    journaled(state_dir, "slower", "mended", "slower")
    assert str(waiting(state_dir)) == "1 event"
    push(server, state_dir)
    assert [len(request) for request in server.requests] == [5, 1]
    assert server.events == ["broken", "driver 570 to 580", "mended", "slower"]


@pytest.mark.parametrize("sent_before", [True, False])
def test_an_event_that_was_removed_is_marked_whenever_it_was_sent(state_dir, sent_before):
    restart(state_dir, 0)
    server = Server()
    noted(state_dir, 1, "a mistake")
    if sent_before:
        push(server, state_dir)
    remove(state_dir, Removal("00000001", "me", AT_NS + 1))
    push(server, state_dir)
    restart(state_dir, 0)
    _, said = push(server, state_dir)
    assert server.events == ["a mistake (removed)"]
    assert (said, waiting(state_dir).both) == ([], 0)


def test_a_maintenance_whose_end_is_moved_replaces_its_point_without_a_message(state_dir):
    restart(state_dir, 0)
    server = Server()
    for until_ns in (AT_NS + 10, AT_NS + 20):
        window = planned("cirrus", "standard", "new disks", AT_NS, until_ns, by="slurm")
        record_planned(state_dir, [window], AT_NS - 1)
        assert push(server, state_dir)[1] == []
    (point,) = server.points.values()
    assert f"until_ns={AT_NS + 20}i" in point
    assert [len(request) for request in server.requests] == [1, 1]


def test_old_events_are_counted_and_sent_on_request_only(state_dir):
    restart(state_dir, AT_NS + 1)
    noted(state_dir, 1, "long ago")
    noted(state_dir, 2, "noted today", made_ns=AT_NS + 2)
    noted(state_dir, 3, "not over", until_ns=AT_NS + 3)
    server = Server()
    progress, _ = push(server, state_dir)
    assert server.events == ["not over", "noted today"]
    assert progress.notes(state_dir)[0].startswith("not sent: 1 event from before 2027-01-15T08:00:00Z; ")
    restart(state_dir, 0)
    push(server, state_dir)
    assert server.events == ["long ago", "not over", "noted today"]


WRONG = {
    "damaged": ("0000000a.json", b"{\n", "(skipped, left as it is)"),
    "another's": ("0000000b.json", b'{"id": "0000000c", "system": "a", "text": "b", "at_ns": 1}\n', "it is the event"),
    "newer": ("0000000d.json", b'{"id": "0000000d", "system": "a", "text": "b", "at_ns": 1, "schema": 99}\n', "(waits)"),
    "removed and gone": ("0000000e.removed.json", b'{"id": "0000000e", "by": "", "made_ns": 1}\n', "0000000e.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_event_is_named_and_keeps_no_other_from_being_sent(state_dir, name, content, why):
    stored(state_dir, 1)
    noted(state_dir, 1, "driver")
    (state_dir / "events" / name).write_bytes(content)
    server = Server()
    progress, (said,) = push(server, state_dir)
    assert said.startswith(f"{state_dir / 'events' / name}: byte 0: ")
    assert why in said
    assert (server.values, server.events, progress.unread) == ([1.0], ["driver"], 1)


def test_an_event_noted_just_before_sending_began_is_sent(state_dir):
    noted(state_dir, 1, "driver", made_ns=time.time_ns())
    cursors.begin(state_dir, pytest.fail)
    server = Server()
    push(server, state_dir)
    assert server.events == ["driver"]
