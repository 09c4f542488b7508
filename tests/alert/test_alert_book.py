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
from killed_lines import killed_at, moments

from pytest_mlhpc.alert import book as books
from pytest_mlhpc.alert.book import (
    BusyError,
    book_path,
    keep_damaged,
    locked,
    read_book,
    write_book,
    write_with_journal,
)
from pytest_mlhpc.alert.channels.base import IncidentState
from pytest_mlhpc.alert.incidents import advance
from pytest_mlhpc.alert.messages import message_of, with_journal
from pytest_mlhpc.alert.model import AcceptedSubject, Ack, Book, Mute, Pending
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history import events
from pytest_mlhpc.history.events import JournalEntry, journal_entry_of, journal_files
from pytest_mlhpc.store import locations
from pytest_mlhpc.store.store import read_lines


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


# --- the journal


def journal(state_dir):
    """Return what the journal says, line by line."""
    lines = [line for path in journal_files(state_dir) for _, line in read_lines(path)]
    return [(entry.kind, entry.system, entry.text) for entry in map(journal_entry_of, lines)]


def test_an_alert_is_in_the_journal_when_it_opens_is_acknowledged_and_closes(state_dir):
    opened, _ = advance(Book(last_ns=night(1)), seen(30, bad(owner="ada")))
    ack = Ack(night(40), "vendor knows", "bob", night(31))
    acknowledged = replace(opened, incidents=(replace(opened.incidents[0], ack=ack),))
    off = replace(opened, incidents=(replace(opened.incidents[0], ack=replace(ack, until_ns=0)),))
    closed, _ = advance(off, seen(33, known=(bad().subject,)))
    before = Book(last_ns=night(1))
    for number, after in enumerate((opened, acknowledged, off, closed)):
        write_with_journal(state_dir, with_journal(before, after, night(30 + number)))
        assert read_book(state_dir, pytest.fail) == after
        before = after
    lines = [line for path in journal_files(state_dir) for _, line in read_lines(path)]
    entries = [journal_entry_of(line) for line in lines]
    assert [(one.kind, one.at_ns, one.by, one.until_ns) for one in entries] == [
        ("alert_opened", night(30), "", 0),
        ("alert_acknowledged", night(31), "bob", night(40)),
        ("alert_unacknowledged", night(32), "", 0),
        ("alert_closed", night(33), "", 0),
    ]
    assert {(one.id, one.system, one.partition, one.owner) for one in entries} == {
        (opened.incidents[0].id, "cirrus", "standard", "ada")
    }
    assert entries[0].text == "cirrus: input and output of test_unet 6.0 % slower since 2027-01-31"
    assert entries[1].text.endswith(": vendor knows")


def test_what_comes_back_of_a_known_issue_is_acknowledged_when_it_opens():
    book, _ = advance(Book(last_ns=night(1)), seen(30, bad()))
    ack = Ack(night(90), "vendor knows", "bob", night(20))
    known = replace(book.incidents[0], ack=ack)
    entries = with_journal(Book(), replace(book, incidents=(known,)), night(30)).journal
    assert [(one.kind, one.at_ns) for one in entries] == [
        ("alert_acknowledged", night(30)), ("alert_opened", night(30)),
    ]  # fmt: skip


def test_what_a_night_does_not_change_is_not_in_the_journal_again(state_dir):
    book, _ = advance(Book(last_ns=night(1)), seen(30, bad()))
    again, _ = advance(book, seen(31, bad()))
    assert with_journal(book, again, night(31)).journal == ()


def test_a_journal_that_cannot_be_written_leaves_its_entries_in_the_book_for_the_next_command(state_dir):
    entry = JournalEntry("a", "alert_opened", "cirrus", "slower", night(1))
    (state_dir / "events").mkdir(parents=True)
    (state_dir / "events/journal").touch()
    with pytest.raises(StoreError, match="events/journal"):
        write_with_journal(state_dir, Book(journal=(entry,)))
    (state_dir / "events/journal").unlink()
    write_with_journal(state_dir, read_book(state_dir, pytest.fail))
    assert journal(state_dir) == [("alert_opened", "cirrus", "slower")]
    assert read_book(state_dir, pytest.fail) == Book()


def test_a_command_that_is_killed_at_any_line_leaves_each_change_once_in_the_journal(tmp_path):
    """The next command has changes of its own, and writes what the first one left."""
    made = [JournalEntry(name, "alert_opened", "cirrus", name, night(1)) for name in "abc"]

    def work(state_dir, *entries):
        with locked(state_dir):
            book = read_book(state_dir, pytest.fail)
            write_with_journal(state_dir, replace(book, last_ns=1, journal=(*book.journal, *entries)))

    traced = {books.__file__, events.__file__, locations.__file__}
    numbers = moments(traced, tmp_path, lambda: work(tmp_path / "first", *made[:2]))
    assert len(numbers) > 5
    for number in numbers:
        state_dir = tmp_path / str(number)
        assert killed_at(traced, number, lambda: work(state_dir, *made[:2]))  # noqa: B023 - it is called at once
        begun = read_book(state_dir, pytest.fail).last_ns == 1
        work(state_dir, made[2])
        assert [text for *_, text in journal(state_dir)] == (["a", "b", "c"] if begun else ["c"])
        assert read_book(state_dir, pytest.fail) == Book(last_ns=1)
