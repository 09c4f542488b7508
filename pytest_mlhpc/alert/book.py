"""The book of incidents, one file that is replaced in one step, and the outbox that sends each message once.

What happened to incidents is written into the book in the same step, and from there into the journal
(:mod:`pytest_mlhpc.history.events`): whoever dies in between, the next command does it. Acknowledging, accepting and muting
write to the book, too; ``mlhpc alert send`` reads it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.alert.channels.base import AlertMessage, Channel, DeliveryError
from pytest_mlhpc.alert.messages import with_journal
from pytest_mlhpc.alert.model import (
    DAY_NS,
    AcceptedSubject,
    Ack,
    Book,
    Incident,
    KnownIssue,
    Mute,
    Pending,
    Subject,
)
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.config.systems_files import find_systems_file
from pytest_mlhpc.config.yaml import read_file
from pytest_mlhpc.errors import ConfigError, MlhpcError, StoreError, UsageError, did_you_mean
from pytest_mlhpc.history.events import append_journal
from pytest_mlhpc.node.files import read_json, sync_folder
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import locked_file, open_regular, replace_file
from pytest_mlhpc.store.record import user_name
from pytest_mlhpc.store.text import minutes, nanoseconds, one_line, tell

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


#: Exit code: another command writes the book.
LATER = 75
#: Longest reason and ticket; they stand in messages.
MOST_REASON, MOST_TICKET = 300, 200


@dataclass(frozen=True)
class BookChange:
    """What was changed: of which alert or system, and the sentence that says so."""

    subject: str
    text: str


def acknowledge(
    state_dir: Path, name: str, until_ns: int, reason: str, *, ticket: str = "", known: bool = False
) -> BookChange | None:
    """Send nothing of an alert until then; if it is still bad then, it is sent again. As :func:`mute`.

    With *known*, what comes back of the same tests or nodes until then begins acknowledged. An empty *ticket* leaves that
    of the alert as it is.
    """

    def change(book: Book) -> tuple[Book, BookChange]:
        incident = _find(book, name)
        ack = Ack(until_ns, reason, user_name(), time.time_ns())
        changed = replace(incident, ack=ack, ticket=ticket or incident.ticket)
        issues = tuple(one for one in book.issues if one.name != incident.id)
        if known:
            subjects = tuple(sorted(member.now.subject for member in incident.members if member.open))
            issues += (KnownIssue(incident.id, subjects, ack, changed.ticket),)
        after = tuple(changed if one is incident else one for one in book.incidents)
        what = "a known issue" if known else "acknowledged"
        text = f"{incident.id} is {what} until {minutes(until_ns)}"
        return replace(book, incidents=after, issues=issues), BookChange(incident.id, text)

    return _change(state_dir, change)


def end_acknowledgement(state_dir: Path, name: str) -> BookChange | None:
    """End an acknowledgement or known issue now. As :func:`mute`."""

    def change(book: Book) -> tuple[Book, BookChange]:
        acknowledged = {one.id for one in book.incidents if one.ack}
        found = _match(name, acknowledged | {one.name for one in book.issues}, "acknowledged alert")
        after = tuple(
            replace(one, ack=replace(one.ack, until_ns=0)) if one.id == found and one.ack else one
            for one in book.incidents
        )
        issues = tuple(one for one in book.issues if one.name != found)
        return replace(book, incidents=after, issues=issues), BookChange(
            found, f"{found} is no longer acknowledged"
        )

    return _change(state_dir, change)


def accept(state_dir: Path, name: str, reason: str) -> BookChange | None:
    """Let what an alert tells of be as it is from now on: the alert ends and does not come back. As :func:`mute`."""

    def change(book: Book) -> tuple[Book, BookChange]:
        incident = _find(book, name)
        at_ns = max(time.time_ns(), book.last_ns)  # clocks of two machines differ
        at = [
            AcceptedSubject(
                member.now.subject,
                member.announced.last_ns,
                at_ns,
                one_line(reason, MOST_REASON),
                user_name(),
            )
            for member in incident.members
            if member.open
        ]
        text = f"{incident.id} is accepted; it ends with the next mlhpc alert send"
        return replace(book, accepted=(*book.accepted, *at)), BookChange(incident.id, text)

    return _change(state_dir, change)


def alerts_of(state_dir: Path, names: Collection[str]) -> dict[str, list[Subject]]:
    """Return those *names* that are of open alerts, each with what is bad of it. Reads nothing but the book."""
    return {
        one.id: [member.now.subject for member in one.members if member.open]
        for one in read_book(state_dir, tell).incidents
        if one.id in names
    }


def mute(state_dir: Path, system: str, until_ns: int, reason: str) -> BookChange | None:
    """Send nothing new of *system* until then. Return what was done, None where another command writes the book.

    Raises:
        UsageError: there is no such system.
    """
    check_system(system, state_dir)

    def change(book: Book) -> tuple[Book, BookChange]:
        mutes = {**book.mutes, system: Mute(until_ns, one_line(reason, MOST_REASON), user_name())}
        text = f"nothing new of {system} is sent until {minutes(until_ns)}"
        return replace(book, mutes=mutes), BookChange(system, text)

    return _change(state_dir, change)


def unmute(state_dir: Path, system: str) -> BookChange | None:
    """Send what is new of *system* again. As :func:`mute`."""

    def change(book: Book) -> tuple[Book, BookChange]:
        if system not in book.mutes:
            raise UsageError(f"{system!r} is not muted")
        mutes = {name: mute for name, mute in book.mutes.items() if name != system}
        return replace(book, mutes=mutes), BookChange(system, f"{system} is no longer muted")

    return _change(state_dir, change)


def check_system(name: str, state_dir: Path) -> None:
    """Refuse a system of which there is no record, and nothing in the systems file of this folder."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        known = {row[0] for row in index.ask("SELECT DISTINCT system FROM records", {})}
    with contextlib.suppress(ConfigError):  # whoever mutes a system need not mend the file
        known.update(
            name for name, _ in read_file(find_systems_file(Path.cwd(), None)).value["systems"].items()
        )
    if name not in known:
        meant = did_you_mean(name, known)
        raise UsageError(f"no system {name!r}{meant}; known: {', '.join(sorted(known))}")


def until(text: str, now_ns: int) -> int:
    """Return a moment to come, from a duration or a date.

    Raises:
        UsageError: it is neither, or over.
    """
    if text.strip().isdigit():
        raise UsageError(f"--until {text!r} has no unit; write {text.strip()}d or {text.strip()}h")
    try:
        return now_ns + int(parse_duration(text) * 1e9)
    except ValueError:
        pass
    try:
        moment_ns = nanoseconds(text)
    except (ValueError, OverflowError):
        moment_ns = -1
    if moment_ns < 0:
        raise UsageError(f"--until {text!r} is neither a time like 7d or 12h nor a date like 2026-12-24")
    if moment_ns <= now_ns:
        raise UsageError(f"--until {text!r} is in the past")
    return moment_ns


def checked_ticket(text: str) -> str:
    """Return the ticket as it is written into messages: an address, or a key such as ``HPC-4711``.

    Raises:
        UsageError: it is neither.
    """
    if not text or (len(text) <= MOST_TICKET and text.isprintable() and not re.search(r"[\s<>\"]", text)):
        return text
    raise UsageError(
        f"--ticket {text!r:.80} is no address like https://example.org/issues/7 nor a key like HPC-4711"
    )


def _find(book: Book, text: str) -> Incident:
    incidents = {one.id: one for one in book.incidents}
    return incidents[_match(text, incidents, "open alert")]


def _match(text: str, names: Collection[str], what: str) -> str:
    """Return the one of *names* that is or begins with *text*.

    Raises:
        UsageError: there is none, or several.
    """
    found = [text] if text in names else sorted(name for name in names if name.startswith(text))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{text!r} is the beginning of {', '.join(found)}: say which")
    raise UsageError(f"no {what} {text!r}{did_you_mean(text, names)}; `mlhpc alert list` shows all")


def _change(state_dir: Path, change: Callable[[Book], tuple[Book, BookChange]]) -> BookChange | None:
    try:
        with locked(state_dir):
            before = read_book(state_dir, _refuse)
            after, done = change(before)
            write_with_journal(state_dir, with_journal(before, after, time.time_ns()))
    except BusyError as error:
        tell(str(error))
        return None
    return done


def _refuse(problem: str) -> None:
    """Refuse to write to a damaged book: only ``mlhpc alert send`` keeps it before it makes an empty one."""
    raise UsageError(f"{problem}; run mlhpc alert send first")
