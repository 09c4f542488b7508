"""``mlhpc history event``: note what was done to a system, so that later alerts can name it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NounGroup
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.history.events import Event, Removal, add, events, new_event, remove
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import user_name
from pytest_mlhpc.store.text import minutes, nanoseconds, table, tell

SECOND = 1_000_000_000


@click.group(
    cls=NounGroup,
    help="Events: what was done to a system, such as a new driver. A new baseline epoch begins there, and alerts name it.",
    example="mlhpc history event add --system cirrus 'driver 570 to 580'",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    "add",
    cls=DataCommand,
    help="Note a change of a system, in one line; from then on a new baseline epoch. With --until, a maintenance.",
    example="mlhpc history event add --system cirrus:gpu --on 2026-11-21 'driver 570 to 580'",
)
@click.argument("text")
@click.option("--system", "place", required=True, metavar="NAME[:PARTITION]", help="Where.")
@click.option("--on", default="", metavar="DATE", help="2026-11-21 or 2026-11-21T14:00Z.  [default: now]")
@click.option("--until", default="", metavar="DATE", help="The end of a maintenance, in which nothing runs.")
@options.state_dir
def add_(text: str, place: str, on: str, until: str, state_dir: Path) -> CommandReport:
    """Add one."""
    system, _, partition = place.partition(":")
    now_ns = time.time_ns()
    event = new_event(
        system, partition, text, at_ns=_moment(on, now_ns), by=user_name(), now_ns=now_ns,
        until_ns=_moment(until, now_ns, "--until") if until else 0,
    )  # fmt: skip
    add(state_dir, event)
    options.publish_events(state_dir)
    if doubt := unknown_place(state_dir, event):
        tell(doubt)
    since = minutes(event.at_ns)
    meaning = f"a new baseline epoch from {since} on"
    if event.is_maintenance:
        meaning = f"maintenance from {since} until {minutes(event.until_ns)}"
    return CommandReport(f"{event.id}: {event.text}, {_place(event)}, {meaning}\n", {"event": to_json(event)})


@command.command(
    "list", cls=DataCommand, help="List all events, newest last.", example="mlhpc history event list"
)
@click.option("--system", "place", default="", metavar="NAME[:PARTITION]", help="Only of this one.")
@options.state_dir
def list_(place: str, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    system, _, partition = place.partition(":")
    known = events(state_dir, tell)
    shown = [one for one in known if not system or one.concerns(system, partition or one.partition)]
    data = {"events": [to_json(event) for event in shown]}
    if not shown:
        how = "mlhpc history event add --system NAME 'driver 570 to 580'"
        return CommandReport(f"no event is noted; note one: {how}\n", data)
    rows = [("id", "since", "until", "system", "by", "event")]
    for event in shown:
        until = minutes(event.until_ns) if event.is_maintenance else "-"
        rows.append((event.id, minutes(event.at_ns), until, _place(event), event.by, event.text))
    return CommandReport(table(rows), data)


@command.command(
    "remove",
    cls=DataCommand,
    help="Take back an event that was a mistake, by its ID or how that begins.",
    example="mlhpc history event remove 01932f6a",
)
@click.argument("name", metavar="ID")
@options.state_dir
def remove_(name: str, state_dir: Path) -> CommandReport:
    """Remove one."""
    found = [one for one in events(state_dir, tell) if name and one.id.startswith(name)]
    if not found:
        raise UsageError(f"no event's id starts with {name!r}; `mlhpc history event list` shows all")
    if len(found) > 1:
        raise UsageError(f"several events' ids start with {name!r}: {', '.join(one.id for one in found)}")
    [event] = found
    remove(state_dir, Removal(event.id, user_name(), time.time_ns()))
    options.publish_events(state_dir)
    return CommandReport(f"{event.id} is removed: {event.text}, {_place(event)}\n", {"event": to_json(event)})


def unknown_place(state_dir: Path, event: Event) -> str:
    """Return a warning if nothing was ever recorded where *event* happened, though something was elsewhere."""
    index = Index(state_dir)
    try:
        places = {tuple(row) for row in index.ask("SELECT DISTINCT system, partition FROM records", {})}
    finally:
        index.close()
    if not places or any(event.concerns(*place) for place in places):
        return ""
    known = sorted({place[0] for place in places} | {":".join(place) for place in places})
    hint = nearest(":".join(filter(None, (event.system, event.partition))), known)
    meant = f" (did you mean {hint!r}? then: mlhpc history event remove {event.id})" if hint else ""
    return f"nothing was ever recorded on {_place(event)}{meant}"


def _moment(text: str, now_ns: int, option: str = "--on") -> int:
    """Return since when an event holds: whole seconds, as all dates that are written."""
    try:
        return nanoseconds(text) if text else now_ns // SECOND * SECOND
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is no date like 2026-11-21 or 2026-11-21T14:00Z") from None


def _place(event: Event) -> str:
    return ":".join(filter(None, (event.system, event.partition)))
