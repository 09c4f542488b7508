"""The book of incidents, one file that is replaced in one step, and the outbox that sends each message once.

What happened to incidents is written into the book in the same step, and from there into the journal
(:mod:`pytest_mlhpc.history.events`): whoever dies in between, the next command does it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.alert.channels.base import AlertMessage, Channel, DeliveryError
from pytest_mlhpc.alert.model import DAY_NS, Book, Pending
from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.history.events import append_journal
from pytest_mlhpc.node.files import read_json, sync_folder
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.locations import locked_file, open_regular, replace_file

#: A larger file is no book of ours: thousands of open incidents are a few MB.
MAX_BYTES = 64 << 20
#: How long another process may hold the book, in seconds: it sends, and each channel has its own limit.
PATIENCE_S = 60.0


class BusyError(MlhpcError):
    """Another process has had the book for too long; the same may succeed later."""


def book_path(state_dir: Path) -> Path:
    """Return where the book lies."""
    return state_dir / "alerts" / "book.json"


def read_book(state_dir: Path, on_problem: Callable[[str], None]) -> Book:
    """Return the book; an empty one if there is none, or if it is damaged, which is reported.

    Raises:
        StoreError: it cannot be read, or a newer version wrote it.
    """
    path = book_path(state_dir)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Book()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        plain = read_json(data) if len(data) <= MAX_BYTES else {}
        found = plain.get("schema", 0) if isinstance(plain, dict) else 0
        if isinstance(found, int) and found > SCHEMA:
            raise StoreError(f"{path}: schema {found} is newer than {SCHEMA}: update pytest-mlhpc")
        return from_json(Book, plain)
    except (ValueError, TypeError, RecursionError, SchemaError) as error:
        on_problem(
            f"{path}: damaged: {str(error)[:200]}; the file is kept, and the book of alerts begins anew"
        )
        return Book()


def keep_damaged(state_dir: Path) -> None:
    """Put a book aside that is about to be written over though it could not be understood."""
    path = book_path(state_dir)
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"book.damaged-{time.time_ns()}.json"))


def write_book(state_dir: Path, book: Book) -> None:
    """Replace the book, durably.

    Raises:
        StoreError: disk full, over quota, not writable. The old one is left as it was.
    """
    path = book_path(state_dir)
    replace_file(path, json.dumps(to_json(book), allow_nan=False, indent=1) + "\n")
    try:
        sync_folder(path.parent)  # its new name must survive a power cut before anything is sent
    except OSError as error:
        raise StoreError(f"{path.parent}: cannot be synced: {error.strerror}") from error


def write_with_journal(state_dir: Path, book: Book) -> Book:
    """Replace the book, then move what it holds for the journal there; return the book without it. Call it with the lock.

    Raises:
        StoreError: one of both cannot be written. What is not in the journal is in the book.
    """
    write_book(state_dir, book)
    if not book.journal:
        return book
    append_journal(state_dir, book.journal)
    book = replace(book, journal=())
    write_book(state_dir, book)
    return book


@contextlib.contextmanager
def locked(state_dir: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keep the book for this process; the kernel frees it with its holder, however that dies.

    Raises:
        BusyError: another process has it and does not let go.
        StoreError: the folder cannot be used.
    """
    path = book_path(state_dir).with_name("lock")
    busy = BusyError(f"{path}: another mlhpc alert send, ack or mute is at work; try again when it is done")
    with locked_file(path, state_dir, busy, patience_s):
        yield


#: A message that could not be sent for so long helps nobody any more.
KEPT_NS = 30 * DAY_NS


@dataclass(frozen=True)
class Delivery:
    """What became of one message on one channel; ``error`` is empty when it was delivered, else it begins with the channel."""

    message: AlertMessage
    channel: str
    error: str = ""
    retry: bool = False


def queued(
    book: Book, messages: Sequence[AlertMessage], takers: Callable[[AlertMessage], Sequence[str]]
) -> Book:
    """Return the book with *messages* waiting for the channels that take them; what nobody takes is dropped."""
    new = [Pending(message, tuple(names)) for message in messages if (names := takers(message))]
    return replace(book, outbox=(*book.outbox, *new))


def deliver(
    book: Book,
    channels: Mapping[str, Channel],
    save: Callable[[Book], None],
    tell: Callable[[Delivery], None],
    now_ns: int,
) -> Book:
    """Send what waits, oldest first; *save* is called after each success. Return the book without it.

    A channel that fails for now gets nothing more until the next time, as its messages make sense only in order. What it
    refuses for good, or cannot be given for 30 days, is reported and dropped, as is what waits for a channel that is configured no more.

    Raises:
        StoreError: by *save*; what was sent is then sent once more next time.
    """
    down: set[str] = set()
    for pending in book.outbox:
        for name in pending.waiting:
            if name in down:
                continue
            delivery = _send(pending.message, name, channels.get(name))
            if delivery.retry and pending.message.created_ns < now_ns - KEPT_NS:
                delivery = replace(delivery, retry=False, error=f"{delivery.error}; given up")
            tell(delivery)
            if delivery.retry:
                down.add(name)
                continue
            book = _without(book, pending.message.id, name)
            save(book)
    return book


def _send(message: AlertMessage, name: str, channel: Channel | None) -> Delivery:
    if channel is None:
        return Delivery(message, name, f"{name}: there is no such channel any more; dropped")
    try:
        channel.send(message)
    except DeliveryError as error:
        return Delivery(message, name, _named(name, error), retry=error.retry)
    except Exception as error:  # noqa: BLE001 - a third party's channel may raise anything; others shall get theirs
        return Delivery(message, name, _defect(name, error), retry=True)
    return Delivery(message, name)


def repeat(channels: Mapping[str, Channel], messages: Callable[[str], Sequence[AlertMessage]]) -> list[str]:
    """Send all open incidents again where the peer forgets; return what went wrong, as text."""
    problems = []
    for name, channel in channels.items():
        try:
            channel.resend_open(messages(name))
        except DeliveryError as error:
            problems.append(_named(name, error))
        except Exception as error:  # noqa: BLE001 - as above
            problems.append(_defect(name, error))
    return problems


def _named(name: str, error: DeliveryError) -> str:
    """Return an error's text with the channel's name before it, once: ours begin with it, a third party's may not."""
    text = str(error)
    return text if text.startswith(f"{name}: ") else f"{name}: {text}"


def _defect(name: str, error: Exception) -> str:
    """Name an error that no channel should raise; its text is not shown, as it may hold a secret."""
    return f"{name}: a defect of the channel: {type(error).__name__}"


def _without(book: Book, message_id: str, name: str) -> Book:
    """Return the book without one channel of one message."""
    unsent = []
    for pending in book.outbox:
        waiting = tuple(
            other for other in pending.waiting if pending.message.id != message_id or other != name
        )
        if waiting:
            unsent.append(replace(pending, waiting=waiting))
    return replace(book, outbox=tuple(unsent))
