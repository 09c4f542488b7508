"""``mlhpc alert``: after a nightly run, tell what is new, worse, over, or missing; each of it once.

Exit code 0: all is told. 1: a channel refuses for good. 75: a channel or the history could not be reached; the same command
later tells what waits. 5: there is no history.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.alert.book import BusyError, held, keep_damaged, read_book, write_book
from pytest_mlhpc.alert.channels.base import Message, as_json
from pytest_mlhpc.alert.config import Config, load
from pytest_mlhpc.alert.messages import message_of
from pytest_mlhpc.alert.model import Book
from pytest_mlhpc.alert.observe import Question, observe
from pytest_mlhpc.alert.outbox import Delivery, deliver, queued, repeat
from pytest_mlhpc.alert.state import advance
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.cache import cache_path
from pytest_mlhpc.history.choose import add_source_arguments, chosen, state_dir_of
from pytest_mlhpc.history.events import events
from pytest_mlhpc.provenance import provenance_of
from pytest_mlhpc.results.dates import nanoseconds
from pytest_mlhpc.results.text import clean

SUMMARY = "after a nightly run: tell what is new, worse, resolved or stale, each change once"
#: Found in the folder of the call unless --config names another.
DEFAULT_CONFIG = "alerts.yaml"
REFUSED, NOTHING, LATER = 1, 5, 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--from``, ``--state-dir``, ``--config``, ``--expect``, ``--at``, ``--dry-run``, ``--json``."""
    add_source_arguments(parser)
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help=f"channels and rules (default: {DEFAULT_CONFIG} in this folder; without it, messages are only printed)",
    )  # fmt: skip
    parser.add_argument(
        "--expect", choices=("nightly",),
        help="a benchmark that was run every night and is not recorded for 26 h is an alert, too",
    )  # fmt: skip
    parser.add_argument(
        "--at", default="", metavar="TIME", help="as if it were then, such as 2026-11-21T06:00"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be told; keep and send nothing"
    )
    parser.add_argument(
        "--json", action="store_true", help="for programs: one message a line, as channels get it"
    )


def run(args: argparse.Namespace) -> int:
    """Do it."""
    config = _config(args.config)
    state_dir = state_dir_of(args)
    now_ns = _moment(args.at)
    try:
        if args.dry_run:
            return _night(args, config, state_dir, now_ns)
        with held(state_dir):
            return _night(args, config, state_dir, now_ns)
    except BusyError as error:
        _tell(str(error))
        return LATER


def _night(args: argparse.Namespace, config: Config, state_dir: Path, now_ns: int) -> int:
    damage: list[str] = []
    book = read_book(state_dir, damage.append)
    for problem in damage:
        _tell(problem)
    if damage and not args.dry_run:
        keep_damaged(state_dir)
    branch = config.branch or provenance_of(Path.cwd()).default_branch
    question = Question(
        now_ns, branch, config.rules, args.expect == "nightly", config.stale_ns,
        events(state_dir, _tell), cache_path(state_dir),
    )  # fmt: skip
    unread = empty = False
    messages: tuple[Message, ...] = ()
    try:
        with chosen(args) as source:
            found = observe(source, book, question)
        empty = found.empty
        book, changes = advance(book, found.observation, found.companions)
        messages = tuple(message_of(one.incident, one.state, now_ns, config.report) for one in changes)
    except StoreError as error:
        # What waits is sent all the same; what is new is found the next time.
        _tell(f"{error}; nothing is told of this night before it can be read")
        unread = True
    _show(messages, book, as_lines=args.json)
    code = 0
    if not args.dry_run:
        book = queued(book, messages, config.takers)
        write_book(state_dir, book)
        code = _send(book, config, state_dir, now_ns)
    if unread:
        return LATER
    if empty:
        _tell("no history: nothing was recorded in the last nights")
        return code or NOTHING
    return code


def _send(book: Book, config: Config, state_dir: Path, now_ns: int) -> int:
    outcomes: list[Delivery] = []

    def tell(delivery: Delivery) -> None:
        outcomes.append(delivery)
        if delivery.error:
            again = "; it is tried again next time" if delivery.retry else ""
            _tell(f"{delivery.message.id}: {delivery.error}{again}")

    book = deliver(book, config.channels, lambda after: write_book(state_dir, after), tell, now_ns)
    problems = repeat(config.channels, lambda name: _open(book, config, name, now_ns))
    for problem in problems:
        _tell(f"{problem}; it is tried again next time")
    if any(one.error and not one.retry for one in outcomes):
        return REFUSED
    return LATER if problems or any(one.retry for one in outcomes) else 0


def _open(book: Book, config: Config, name: str, now_ns: int) -> Sequence[Message]:
    """Return what is open, as far as a channel is told of it and has been told already."""
    route = config.routes[name]
    waiting = {pending.message.incident for pending in book.outbox if name in pending.waiting}
    return [
        message_of(one, one.state, now_ns, config.report)
        for one in book.incidents
        if one.announced and route.takes(one) and one.id not in waiting
    ]


def _show(messages: Sequence[Message], book: Book, *, as_lines: bool) -> None:
    if as_lines:
        sys.stdout.writelines(json.dumps(as_json(message)) + "\n" for message in messages)
        return
    sys.stdout.writelines(f"{message.text}\n" for message in messages)
    count = sum(incident.announced for incident in book.incidents)
    muted = len(book.incidents) - count
    told = f"{len(messages)} new message{'' if len(messages) == 1 else 's'}"
    sys.stdout.write(f"{told}, {count} open{f', {muted} of muted systems' if muted else ''}\n")


def _config(path: Path | None) -> Config:
    if path is None:
        path = Path(DEFAULT_CONFIG)
        if not path.exists():
            return Config()
    return load(path, os.environ)


def _moment(text: str) -> int:
    try:
        return nanoseconds(text) if text else time.time_ns()
    except (ValueError, OverflowError):
        raise UsageError(f"--at {text!r} is no date like 2026-11-21T06:00") from None


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
