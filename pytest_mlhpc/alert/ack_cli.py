"""``mlhpc ack``: somebody knows of an alert, or accepts it. ``mlhpc mute``: nothing new of a system until a date."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pytest_mlhpc.alert.book import BusyError, held, read_book, write_book
from pytest_mlhpc.alert.messages import message_of
from pytest_mlhpc.alert.model import Accepted, Ack, Book, Incident, Mute
from pytest_mlhpc.errors import ConfigError, UsageError, nearest
from pytest_mlhpc.results.dates import minutes, nanoseconds
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.text import clean, one_line, table
from pytest_mlhpc.statedir import default_state_dir
from pytest_mlhpc.system.files import find_systems_file
from pytest_mlhpc.system.quantities import parse_duration
from pytest_mlhpc.system.yaml_reader import read_file

NOTHING, LATER = 5, 75
#: Longest reason; it stands in messages.
MOST_REASON = 300


def add_ack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the alert, ``--until``, ``--reason``, ``--accept``, ``--state-dir``."""
    parser.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="of an alert, or its beginning; without it, all open ones are listed",
    )
    parser.add_argument(
        "--until", default="", metavar="TIME", help="hear no more of it until then: 7d, 2026-12-24"
    )
    parser.add_argument(
        "--accept",
        action="store_true",
        help="it shall stay like this: the alert ends, and does not come back",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for those who read it later")
    _add_state_dir(parser)


def add_mute_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the system, ``--until``, ``--reason``, ``--off``, ``--state-dir``."""
    parser.add_argument("system", nargs="?", metavar="SYSTEM", help="without it, muted systems are listed")
    parser.add_argument("--until", default="", metavar="TIME", help="2d, 12h, 2026-12-24T08:00")
    parser.add_argument("--reason", default="", metavar="TEXT", help="such as maintenance")
    parser.add_argument("--off", action="store_true", help="end it now")
    _add_state_dir(parser)


def run_ack(args: argparse.Namespace) -> int:
    """Do it. What was acknowledged is told again when the time is over and it is still bad."""
    now_ns = time.time_ns()
    if args.id is None:
        return _list(read_book(_state_dir(args), _tell))
    reason = _reason(args.reason)
    if args.accept == bool(args.until):
        raise UsageError("say either --until TIME or --accept")
    until_ns = 0 if args.accept else until(args.until, now_ns)

    def change(book: Book) -> tuple[Book, str]:
        incident = _find(book, args.id)
        if args.accept:
            at_ns = max(now_ns, book.last_ns)  # clocks of two machines differ
            at = [
                Accepted(member.now.subject, member.told.last_ns, at_ns, reason, getpass.getuser())
                for member in incident.members
                if member.open
            ]
            said = f"{incident.id} is accepted; it ends with the next mlhpc alert"
            return replace(book, accepted=(*book.accepted, *at)), said
        ack = Ack(until_ns, reason, getpass.getuser(), now_ns)
        after = tuple(replace(one, ack=ack) if one is incident else one for one in book.incidents)
        return replace(book, incidents=after), f"{incident.id} is acknowledged until {minutes(until_ns)}"

    return _change(_state_dir(args), change)


def run_mute(args: argparse.Namespace) -> int:
    """Do it. What is resolved is told all the same if it was announced before."""
    now_ns = time.time_ns()
    if args.system is None:
        return _list_mutes(read_book(_state_dir(args), _tell), now_ns)
    system = args.system
    if args.off == bool(args.until):
        raise UsageError("say either --until TIME or --off")
    until_ns = 0 if args.off else until(args.until, now_ns)

    if not args.off:
        _check_system(system, _state_dir(args))

    def change(book: Book) -> tuple[Book, str]:
        mutes = {name: mute for name, mute in book.mutes.items() if name != system}
        if args.off:
            if system not in book.mutes:
                raise UsageError(f"{system!r} is not muted")
            return replace(book, mutes=mutes), f"{system} is no longer muted"
        mutes[system] = Mute(until_ns, one_line(args.reason, MOST_REASON), getpass.getuser())
        return replace(book, mutes=mutes), f"nothing new of {system} is sent until {minutes(until_ns)}"

    return _change(_state_dir(args), change)


def _check_system(name: str, state_dir: Path) -> None:
    """Refuse a system of which there is no record, and nothing in the systems file of this folder."""
    with contextlib.closing(Index(state_dir, _tell)) as index:
        known = {row[0] for row in index.ask("SELECT DISTINCT system FROM records", {})}
    with contextlib.suppress(ConfigError):  # whoever mutes a system need not mend the file
        known.update(
            name for name, _ in read_file(find_systems_file(Path.cwd(), None)).value["systems"].items()
        )
    if name not in known:
        hint = nearest(name, known)
        meant = f" (did you mean {hint!r}?)" if hint else ""
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
        raise UsageError(f"--until {text!r} is over already")
    return moment_ns


def _find(book: Book, text: str) -> Incident:
    found = [one for one in book.incidents if one.id == text]
    found = found or [one for one in book.incidents if one.id.startswith(text)]
    if len(found) == 1:
        return found[0]
    names = [one.id for one in book.incidents]
    if found:
        raise UsageError(f"{text!r} is the beginning of {', '.join(one.id for one in found)}: say which")
    hint = nearest(text, names)
    meant = f" (did you mean {hint!r}?)" if hint else ""
    raise UsageError(f"no open alert {text!r}{meant}; `mlhpc ack` lists all")


def _change(state_dir: Path, change: Callable[[Book], tuple[Book, str]]) -> int:
    try:
        with held(state_dir):
            book, said = change(read_book(state_dir, _refuse))
            write_book(state_dir, book)
    except BusyError as error:
        _tell(str(error))
        return LATER
    sys.stdout.write(clean(f"{said}\n"))
    return 0


def _refuse(problem: str) -> None:
    """Writing to a damaged book would make an empty one of it: that is for ``mlhpc alert`` to do, which keeps it."""
    raise UsageError(f"{problem}; run mlhpc alert first")


def _list(book: Book) -> int:
    if not book.incidents:
        sys.stdout.write("no alert is open\n")
        return NOTHING
    rows = [("alert", "since", "state", "what")]
    for one in book.incidents:
        state = "muted" if not one.announced else one.state.value
        if one.ack:
            state = f"acknowledged by {one.ack.by} until {minutes(one.ack.until_ns)}"
        title = message_of(one, one.state, one.changed_ns).title.partition(": ")[2]
        rows.append((one.id, minutes(one.started_ns), state, title))
    sys.stdout.write(table(rows))
    return 0


def _list_mutes(book: Book, now_ns: int) -> int:
    rows = [("system", "until", "by", "reason")]
    rows += [
        (system, minutes(mute.until_ns), mute.by, mute.reason)
        for system, mute in sorted(book.mutes.items())
        if mute.until_ns > now_ns
    ]
    if len(rows) == 1:
        sys.stdout.write("no system is muted\n")
        return NOTHING
    sys.stdout.write(table(rows))
    return 0


def _reason(text: str) -> str:
    reason = one_line(text, MOST_REASON)
    if not reason:
        raise UsageError("--reason is missing: whoever reads it next month wants to know")
    return reason


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def _state_dir(args: argparse.Namespace) -> Path:
    given: Path | None = args.state_dir
    return given or default_state_dir(os.environ)


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
