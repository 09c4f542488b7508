"""``mlhpc alert list``: open alerts and muted systems."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pytest_mlhpc.alert.book import read_book
from pytest_mlhpc.alert.channels.base import as_json
from pytest_mlhpc.alert.messages import message_of
from pytest_mlhpc.alert.model import Book, Incident
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.store.text import iso, minutes, table, tell


@click.command(cls=DataCommand, help="List open alerts and muted systems.", example="mlhpc alert list")
@options.state_dir
def command(state_dir: Path) -> CommandReport:
    """Return a row for each."""
    book = read_book(state_dir, tell)
    now_ns = time.time_ns()
    mutes = {name: mute for name, mute in sorted(book.mutes.items()) if mute.until_ns > now_ns}
    rows = [(name, minutes(mute.until_ns), mute.by, mute.reason) for name, mute in mutes.items()]
    muted = table([("muted system", "until", "by", "reason"), *rows]) if rows else ""
    data = {
        "alerts": [as_json(message_of(one, one.state, one.changed_ns)) for one in book.incidents],
        "muted": [
            {"system": name, "until": iso(mute.until_ns), "by": mute.by, "reason": mute.reason}
            for name, mute in mutes.items()
        ],
    }
    return CommandReport(_alerts(book) + muted, data)


def _alerts(book: Book) -> str:
    if not book.incidents:
        return "no alert is open\n"
    rows = [("alert", "since", "state", "what")]
    for one in book.incidents:
        title = message_of(one, one.state, one.changed_ns).title.partition(": ")[2]
        rows.append((one.id, minutes(one.started_ns), _state(one), title))
    return table(rows)


def _state(incident: Incident) -> str:
    if incident.ack:
        return f"acknowledged by {incident.ack.by} until {minutes(incident.ack.until_ns)}"
    return incident.state.value if incident.announced else "muted"
