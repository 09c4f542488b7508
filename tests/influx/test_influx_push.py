"""Sending, against a sink that does what servers do: refuse, be away, take half, die."""

import errno
import json
import os

import pytest

from pytest_mlhpc.influx import push as pushing
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.push import (
    Patience,
    RefusedError,
    Sender,
    StuckError,
    UnavailableError,
    push_lines,
    push_spool,
    retry_rejected,
)
from pytest_mlhpc.influx.spool import Writer, spool_of


class Server:
    """Keeps points by key and time, as InfluxDB does; takes the good lines of a request even if it refuses it."""

    def __init__(self, bad=lambda _line: False, limit=1 << 30):
        self.points: dict[str, str] = {}
        self.requests = 0
        self.away: list[UnavailableError] = []
        self._bad, self._limit = bad, limit

    def write(self, lines):
        self.requests += 1
        if self.away:
            raise self.away.pop(0)
        if len(lines) > self._limit:
            raise RefusedError(413, "request too large")
        every = lines.decode().splitlines()
        for line in every:
            if not self._bad(line):
                key, value, moment = line.split(" ")
                self.points[f"{key} {moment}"] = value
        if any(map(self._bad, every)):
            raise RefusedError(400, "partial write: field type conflict")


def spool(state_dir, count):
    writer = Writer(state_dir)
    for number in range(count):
        writer.add([f"run,n={number} v=1i 1", f"metric,n={number} v=2i 1"])
    writer.close()
    return spool_of(state_dir)


def send(server, folder, patience=None, *, lanes=1):
    sender = Sender(server, folder / "rejected", patience, lanes=lanes)
    push_spool(sender, folder)
    return sender


def waiting_bytes(folder):
    return sum(path.stat().st_size - spools.sent(folder, path.name) for path in spools.waiting(folder))


@pytest.mark.parametrize(
    ("count", "limit"), [(10, 1 << 30), (300, 2000)], ids=["at once", "halved until it fits"]
)
def test_all_is_sent_and_the_spool_is_empty(state_dir, count, limit):
    server, folder = Server(limit=limit), spool(state_dir, count)
    sender = send(server, folder)
    assert len(server.points) == sender.progress.points == 2 * count
    assert sender.progress.rejected == 0
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_what_a_living_writer_adds_is_sent_and_its_file_stays(state_dir):
    writer, server = Writer(state_dir), Server()
    writer.add(["a v=1i 1"])
    send(server, spool_of(state_dir))
    writer.add(["b v=1i 1"])
    send(server, spool_of(state_dir))
    assert sorted(server.points) == ["a 1", "b 1"]
    assert server.requests == 2
    assert writer.path.exists()
    writer.close()


def test_nothing_is_lost_while_the_server_is_away(state_dir):
    server, folder = Server(), spool(state_dir, 5)
    server.away = [UnavailableError("away", 503)]
    with pytest.raises(UnavailableError):
        send(server, folder)
    assert server.points == {}
    assert waiting_bytes(folder) > 0
    send(server, folder)
    assert len(server.points) == 10


def test_a_server_that_comes_back_in_time_is_waited_for_as_long_as_it_asks(state_dir):
    waits = []
    server, folder = Server(), spool(state_dir, 1)
    server.away = [UnavailableError("busy", 429, retry_after_s=7.0), UnavailableError("away")]
    send(server, folder, Patience(until=float("inf"), wait=waits.append))
    assert waits == [7.0, 2.0]
    assert len(server.points) == 2


def aside(folder):
    """Return what was put aside, as rows."""
    texts = [path.read_text() for path in (folder / "rejected").iterdir()]
    return [json.loads(row) for text in texts for row in text.splitlines()]


@pytest.mark.parametrize("bad", [{3}, {0, 999}, {500, 501, 502, 503}])
def test_poison_lines_are_put_aside_with_the_servers_reason(state_dir, bad):
    server = Server(lambda line: any(line.startswith(f"metric,n={number} ") for number in bad))
    folder = spool(state_dir, 1000)
    sender = send(server, folder)
    assert len(server.points) == 2000 - len(bad) == sender.progress.points
    assert sender.progress.rejected == len(bad)
    rows = aside(folder)
    assert {row["line"] for row in rows} == {f"metric,n={number} v=2i 1" for number in bad}
    assert {row["reason"] for row in rows} == {"400: partial write: field type conflict"}
    assert spools.waiting(folder) == []


@pytest.fixture
def chunked(state_dir, monkeypatch):
    """A spool that is sent in ten requests."""
    monkeypatch.setattr(pushing, "CHUNK_LINES", 20)
    return spool(state_dir, 100)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_several_requests_at_a_time_send_all_and_put_the_same_lines_aside(chunked, lanes):
    server = Server(lambda line: "n=33 " in line)
    sender = send(server, chunked, lanes=lanes)
    assert len(server.points) == sender.progress.points == 198
    assert sender.progress.rejected == 2
    assert spools.waiting(chunked) == []


class Failing(Server):
    """Raises what a function makes of a request, if that is an error."""

    def __init__(self, error_of):
        super().__init__()
        self._error_of = error_of

    def write(self, lines):
        if error := self._error_of(lines):
            raise error
        super().write(lines)


def test_several_requests_at_a_time_note_only_what_was_acknowledged_in_order(chunked):
    """The third of ten requests finds the server away: what came behind it may be there or not, and is sent again."""
    away = Failing(lambda lines: UnavailableError("away") if b"n=25 " in lines else None)
    with pytest.raises(UnavailableError):
        send(away, chunked, lanes=2)
    (path,) = spools.waiting(chunked)
    left = b"".join(frame.lines for frame in spools.frames(path, spools.sent(chunked, path.name)))
    assert left.startswith((b"run,n=0 ", b"run,n=10 ", b"run,n=20 "))
    server = Server()
    send(server, chunked, lanes=2)
    assert {f"metric,n={number} 1" for number in range(20, 100)} <= set(server.points)


def test_whoever_waits_for_the_server_is_told_when_another_request_has_failed(chunked):
    away = UnavailableError("away", retry_after_s=3600)
    broken = Failing(lambda lines: ZeroDivisionError() if b"n=0 " in lines else away)
    with pytest.raises(ZeroDivisionError):
        send(broken, chunked, Patience(until=float("inf")), lanes=2)
    assert waiting_bytes(chunked) > 0


def test_a_server_that_refuses_everything_gets_nothing_put_aside(state_dir):
    server, folder = Server(lambda _line: True), spool(state_dir, 100)
    with pytest.raises(StuckError, match="every line is refused"):
        send(server, folder)
    assert list((folder / "rejected").iterdir()) == []
    assert waiting_bytes(folder) > 0


def test_what_was_refused_can_be_sent_again(state_dir):
    server, folder = Server(lambda line: "n=3 " in line), spool(state_dir, 10)
    send(server, folder)
    assert retry_rejected(state_dir) == 2
    assert list((folder / "rejected").iterdir()) == []
    better = Server()
    send(better, folder)
    assert len(better.points) == 2


def test_a_damaged_record_is_put_aside_and_the_others_are_sent(state_dir):
    folder = spool(state_dir, 3)
    (path,) = spools.waiting(folder)
    path.write_bytes(path.read_bytes().replace(b"metric,n=1 v=2i", b"metric,n=1 v=9i"))
    server = Server()
    sender = send(server, folder)
    assert len(server.points) == 4
    assert sender.progress.damaged == 1
    (damaged,) = (folder / "rejected").iterdir()
    assert "checksum" in damaged.read_text()
    assert retry_rejected(state_dir) == 0  # damage is never sent
    assert damaged.exists()


DAMAGED = {
    "empty": b"", "torn": b"{", "a list": b"[]\n", "no reason": b'{"line": "a v=1 1"}\n', "no text": b"\xff\xfe\n",
    "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_file_of_refused_lines_that_is_damaged_stays_and_hides_no_other(state_dir, content):
    folder = spools.make_folders(state_dir) / "rejected"
    (folder / "a.jsonl").write_bytes(content)
    row = {"reason": "400: no\u2028wonder", "line": "run,n=1 v=1i 1"}
    (folder / "b.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    assert retry_rejected(state_dir) == 1
    assert (folder / "a.jsonl").read_bytes() == content
    assert not (folder / "b.jsonl").exists()


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_cannot_be_noted_is_sent_all_the_same_and_told_of_living_writers_only(
    state_dir, monkeypatch, lanes
):
    folder = spool(state_dir, 3)
    living = Writer(state_dir)
    living.add(["run,n=7 v=1i 1"])

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "sent"))

    monkeypatch.setattr(spools, "note_sent", full)
    monkeypatch.setattr(pushing, "CHUNK_LINES", 2)
    server = Server()
    with pytest.raises(OSError, match="No space left on device"):
        send(server, folder, lanes=lanes)
    assert len(server.points) == 7
    assert spools.waiting(folder) == [living.path]
    living.close()
    send(server, folder, lanes=lanes)
    assert spools.waiting(folder) == []


def test_two_at_once_send_everything_and_break_nothing(state_dir):
    """The second one runs whenever the first one has just been acknowledged."""
    folder = spool(state_dir, 20)
    outer = Server()

    class Racing(Server):
        def write(self, lines):
            super().write(lines)
            send(outer, folder)

    inner = Racing()
    send(inner, folder)
    assert len(inner.points) == len(outer.points) == 40
    assert spools.waiting(folder) == []


STEPS = ("write", "note_sent", "remove_sent", "forget_marks", "replace_file")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sender_that_dies_at_any_step_loses_nothing(state_dir, monkeypatch, step, when):
    class KilledError(BaseException):
        pass

    server = Server(lambda line: "n=4 " in line)
    folder = spool(state_dir, 8)
    target = server if step == "write" else spools
    real = getattr(target, step)

    def deadly(*arguments):
        if when == "after":
            real(*arguments)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(target, step, deadly)
        with pytest.raises(KilledError):
            send(server, folder)
    send(server, folder)
    assert len(server.points) == 14
    assert len({row["line"] for row in aside(folder)}) == 2
    assert spools.waiting(folder) == []


def test_the_store_is_sent_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(pushing, "CHUNK_LINES", 10)
    server = Server()
    records = [[f"a,n={number} v=1i 1", f"b,n={number} v=1i 1"] for number in range(33)]
    sender = Sender(server, tmp_path)
    push_lines(sender, records, "store")
    assert len(server.points) == sender.progress.points == 66
    assert server.requests == 7
