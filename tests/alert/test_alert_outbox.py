"""Each message reaches each channel once, whatever dies in between."""

from unittest.mock import Mock

import pytest
from alert_bads import night
from alert_messages import NEW, RESOLVED

from pytest_mlhpc.alert.book import deliver, queued, repeat
from pytest_mlhpc.alert.channels.base import DeliveryError
from pytest_mlhpc.alert.model import Book
from pytest_mlhpc.errors import StoreError


class Recorder:
    """A channel that remembers, and fails with these errors first, one for each call."""

    def __init__(self, name="a", *errors):
        self.name, self.errors, self.sent, self.open = name, list(errors), [], []

    def send(self, message):
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append(message.id)

    def resend_open(self, messages):
        if self.errors:
            raise self.errors.pop(0)
        self.open.append([message.id for message in messages])


def later(text="down"):
    return DeliveryError(text, retry=True)


def waiting(*names):
    return queued(Book(), [NEW, RESOLVED], lambda _message: names)


def send(book, *channels, save=lambda _book: None, now_ns=NEW.created_ns):
    outcomes = []
    book = deliver(book, {one.name: one for one in channels}, save, outcomes.append, now_ns)
    return book, [(one.channel, one.error, one.retry) for one in outcomes if one.error]


def test_all_is_sent_in_order_to_each_channel():
    a, b = Recorder("a"), Recorder("b")
    book, errors = send(waiting("a", "b"), a, b)
    assert a.sent == b.sent == [NEW.id, RESOLVED.id]
    assert (book.outbox, errors) == ((), [])


def test_what_no_channel_takes_is_not_kept():
    assert not queued(Book(), [NEW], lambda _message: ()).outbox


def test_a_channel_that_is_down_gets_all_of_it_in_order_later_and_others_get_theirs_now():
    a, b = Recorder("a", later()), Recorder("b")
    book, errors = send(waiting("a", "b"), a, b)
    assert (a.sent, b.sent, errors) == ([], [NEW.id, RESOLVED.id], [("a", "a: down", True)])
    book, _ = send(book, a, b)
    assert a.sent == b.sent == [NEW.id, RESOLVED.id]
    assert not book.outbox


REFUSED = DeliveryError("refused", retry=False)
MONTH_NS = night(40) - night(0)


@pytest.mark.parametrize(
    ("errors", "later_ns", "texts", "sent"),
    [
        ([REFUSED], 0, ["a: refused"], [RESOLVED.id]),
        ([later(), later()], MONTH_NS, ["a: down; given up", "a: down; given up"], []),
    ],
    ids=["what is refused for good", "after a month nobody wants it any more"],
)
def test_what_no_channel_will_take_is_told_and_dropped(errors, later_ns, texts, sent):
    a = Recorder("a", *errors)
    book, found = send(waiting("a"), a, now_ns=NEW.created_ns + later_ns)
    assert (found, a.sent, book.outbox) == ([("a", text, False) for text in texts], sent, ())


def test_what_waits_for_a_channel_that_was_removed_is_dropped_aloud():
    book, errors = send(waiting("gone"))
    assert (len(errors), book.outbox) == (2, ())


def test_a_defect_of_a_channel_costs_the_others_nothing_and_shows_no_secret():
    a, b = Recorder("a", RuntimeError("token=abc")), Recorder("b")
    _book, errors = send(waiting("a", "b"), a, b)
    assert b.sent == [NEW.id, RESOLVED.id]
    assert errors == [("a", "a: a defect of the channel: RuntimeError", True)]


def test_each_success_is_saved_before_the_next_is_sent():
    a = Recorder("a")
    saved = []
    send(waiting("a"), a, save=lambda book: saved.append((len(a.sent), len(book.outbox))))
    assert saved == [(1, 1), (2, 0)]


@pytest.mark.parametrize("dies_after", [1, 2, 3, 4])
def test_who_dies_between_sending_and_marking_sends_only_that_message_again(dies_after):
    a, b = Recorder("a"), Recorder("b")
    kept = [waiting("a", "b")]

    def save(book):
        if len(a.sent) + len(b.sent) == dies_after:
            raise KeyboardInterrupt
        kept.append(book)

    with pytest.raises(KeyboardInterrupt):
        send(kept[-1], a, b, save=save)
    book, _ = send(kept[-1], a, b)
    assert not book.outbox
    assert len(a.sent) + len(b.sent) == 5
    assert list(dict.fromkeys(a.sent)) == list(dict.fromkeys(b.sent)) == [NEW.id, RESOLVED.id]


def test_a_full_disk_stops_the_sending():
    a = Recorder("a")
    with pytest.raises(StoreError):
        send(waiting("a"), a, save=Mock(side_effect=StoreError("No space left on device")))
    assert a.sent == [NEW.id]


def test_open_incidents_are_repeated_to_all_and_what_fails_is_told():
    a, b, c = Recorder("a", later("down")), Recorder("b"), Recorder("c", ValueError("token=abc"))
    problems = repeat({one.name: one for one in (a, b, c)}, lambda _name: [NEW])
    assert b.open == [[NEW.id]]
    assert problems == ["a: down", "c: a defect of the channel: ValueError"]


def test_an_error_that_names_its_channel_is_not_given_that_name_again():
    _book, errors = send(waiting("a"), Recorder("a", later("a: mail.example.org:25: no answer")))
    assert errors == [("a", "a: mail.example.org:25: no answer", True)]
    text = "a: http://localhost: 503"
    assert repeat({"a": Recorder("a", later(text))}, lambda _name: [NEW]) == [text]
