"""The book lasts, whatever dies, and is never half written."""

import errno
import fcntl
import json
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
from alert_bads import bad, night, seen

from pytest_mlhpc.alert.book import BusyError, book_path, keep_damaged, locked, read_book, write_book
from pytest_mlhpc.alert.channels.base import IncidentState
from pytest_mlhpc.alert.incidents import advance
from pytest_mlhpc.alert.messages import message_of
from pytest_mlhpc.alert.model import AcceptedSubject, Ack, Book, Mute, Pending
from pytest_mlhpc.errors import StoreError


def full_book():
    """Return a book with something in each of its fields."""
    book, (change,) = advance(Book(last_ns=night(1)), seen(30, bad(nodes=("n1",), causes=("driver",))))
    incident = replace(book.incidents[0], ack=Ack(night(40), "known", "me", night(30)))
    pending = Pending(message_of(change.incident, IncidentState.NEW, night(30)), ("a", "b"))
    book = replace(book, incidents=(incident,), outbox=(pending,), closed={"x": 1})
    accepted = (AcceptedSubject(bad().subject, 1, 2, "r", "me"),)
    return replace(book, mutes={"alps": Mute(night(50), "r", "me")}, accepted=accepted)


def test_a_book_is_read_as_it_was_written(state_dir):
    write_book(state_dir, full_book())
    assert read_book(state_dir, pytest.fail) == full_book()


def test_no_book_is_a_new_one(state_dir):
    assert read_book(state_dir, pytest.fail) == Book()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": "x"}', b'{"incidents": 3}', b"\xff\xfe", b'{"schema": 1, "new": 1}'],
)
def test_a_damaged_book_is_told_kept_and_begun_anew(state_dir, content):
    path, problems = book_path(state_dir), []
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert read_book(state_dir, problems.append) == Book()
    assert ["damaged" in problem for problem in problems] == [True]
    keep_damaged(state_dir)
    assert [kept.read_bytes() for kept in path.parent.glob("book.damaged-*")] == [content]


def test_a_book_of_a_newer_version_is_refused_and_left_as_it_is(state_dir):
    write_book(state_dir, Book())
    path = book_path(state_dir)
    text = path.read_text().replace('"schema": 2', '"schema": 999')
    path.write_text(text)
    with pytest.raises(StoreError, match="schema 999 is newer"):
        read_book(state_dir, pytest.fail)
    assert path.read_text() == text


def test_a_full_disk_leaves_the_old_book(state_dir):
    write_book(state_dir, full_book())
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("os.fsync", side_effect=full), pytest.raises(StoreError, match="No space left"):
        write_book(state_dir, Book())
    assert read_book(state_dir, pytest.fail) == full_book()
    assert [path.name for path in book_path(state_dir).parent.iterdir()] == ["book.json"]


def test_a_folder_in_its_place_is_an_error_that_names_it(state_dir):
    book_path(state_dir).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"book\.json"):
        read_book(state_dir, pytest.fail)


def test_a_book_in_use_is_waited_for_and_then_given_up(state_dir):
    busy = pytest.raises(BusyError, match="another mlhpc alert send")
    with locked(state_dir), busy, locked(state_dir, patience_s=0.0):
        pass
    with locked(state_dir, patience_s=0.0):
        pass


def test_a_killed_holder_holds_nothing(state_dir):
    lock = book_path(state_dir).with_name("lock")
    with locked(state_dir):
        pass
    code = f"import fcntl; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.readline()
        with pytest.raises(BusyError), locked(state_dir, patience_s=0.0):
            pass
        other.kill()
    with locked(state_dir, patience_s=300.0), lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_book_is_plain_json_that_people_can_read(state_dir):
    write_book(state_dir, full_book())
    assert json.loads(book_path(state_dir).read_text())["mutes"]["alps"]["reason"] == "r"
