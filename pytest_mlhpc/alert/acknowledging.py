"""What people say about alerts: acknowledged, accepted, muted. Written to the book that ``mlhpc alert send`` reads."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.alert.book import BusyError, locked, read_book, write_with_journal
from pytest_mlhpc.alert.messages import with_journal
from pytest_mlhpc.alert.model import AcceptedSubject, Ack, Book, Incident, KnownIssue, Mute, Subject
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.config.systems_files import find_systems_file
from pytest_mlhpc.config.yaml import read_file
from pytest_mlhpc.errors import ConfigError, UsageError, did_you_mean
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import user_name
from pytest_mlhpc.store.text import minutes, nanoseconds, one_line, tell

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
