"""``mlhpc event``: note what was done to a system, so that later alerts can name it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.history.choose import state_dir_of
from pytest_mlhpc.history.events import Event, Removal, add, events, new_event, remove
from pytest_mlhpc.provenance import user_name
from pytest_mlhpc.results.dates import minutes, nanoseconds
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.text import clean, table

SECOND = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``add``, ``list`` and ``remove ID``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|remove")
    adding = actions.add_parser("add", help="a change of a system: from then on a new baseline epoch")
    adding.add_argument("--system", required=True, metavar="NAME[:PARTITION]")
    adding.add_argument("--partition", default="", metavar="NAME", help="only this one (default: all)")
    adding.add_argument(
        "--on", default="", metavar="DATE", help="2026-11-21 or 2026-11-21T14:00Z (default: now)"
    )
    adding.add_argument("text", help="one line, such as 'driver 570 to 580'")
    listing = actions.add_parser("list", help="all events, newest last")
    listing.add_argument("--system", default="", metavar="NAME[:PARTITION]")
    removing = actions.add_parser("remove", help="take one back that was a mistake")
    removing.add_argument("id", help="its id, or how it starts")
    for action in (adding, listing, removing):
        action.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")
        action.add_argument("--json", action="store_true", help="for programs: one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 5 where ``list`` has nothing to show."""
    state_dir = state_dir_of(args)
    if args.action == "add":
        return _add(state_dir, args)
    known = events(state_dir, _tell)
    if args.action == "remove":
        return _remove(state_dir, known, args)
    system, _, partition = args.system.partition(":")
    shown = [one for one in known if not system or one.concerns(system, partition or one.partition)]
    if not shown and not args.json:
        sys.stdout.write("no event is noted; note one: mlhpc event add --system NAME 'driver 570 to 580'\n")
        return 5
    _print(shown, as_json=args.json)
    return 0


def _add(state_dir: Path, args: argparse.Namespace) -> int:
    system, _, partition = args.system.partition(":")
    if args.partition and partition and args.partition != partition:
        raise UsageError(f"--system {args.system} and --partition {args.partition} name two partitions")
    now_ns = time.time_ns()
    event = new_event(
        system,
        partition or args.partition,
        args.text,
        at_ns=_moment(args.on, now_ns),
        by=user_name(),
        now_ns=now_ns,
    )
    add(state_dir, event)
    if args.json:
        _print([event], as_json=True)
    else:
        sys.stdout.write(
            clean(
                f"{event.id}: {event.text}, {_place(event)}, a new baseline epoch from {minutes(event.at_ns)} on\n"
            )
        )
    if doubt := unknown_place(state_dir, event):
        _tell(doubt)
    return 0


def _remove(state_dir: Path, known: Sequence[Event], args: argparse.Namespace) -> int:
    found = [one for one in known if args.id and one.id.startswith(args.id)]
    if not found:
        raise UsageError(f"no event's id starts with {args.id!r}; `mlhpc event list` shows all")
    if len(found) > 1:
        raise UsageError(f"several events' ids start with {args.id!r}: {', '.join(one.id for one in found)}")
    remove(state_dir, Removal(found[0].id, user_name(), time.time_ns()))
    if args.json:
        _print(found, as_json=True)
    else:
        sys.stdout.write(clean(f"{found[0].id} is removed: {found[0].text}, {_place(found[0])}\n"))
    return 0


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
    meant = f" (did you mean {hint!r}? then: mlhpc event remove {event.id})" if hint else ""
    return f"nothing was ever recorded on {_place(event)}{meant}"


def _moment(text: str, now_ns: int) -> int:
    """Return since when an event holds: whole seconds, as all dates that are written."""
    try:
        return nanoseconds(text) if text else now_ns // SECOND * SECOND
    except (ValueError, OverflowError):
        raise UsageError(f"--on {text!r} is no date like 2026-11-21 or 2026-11-21T14:00Z") from None


def _place(event: Event) -> str:
    return ":".join(filter(None, (event.system, event.partition)))


def _print(shown: Sequence[Event], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.writelines(json.dumps(to_json(event)) + "\n" for event in shown)
        return
    rows = [("id", "since", "system", "by", "event")]
    rows += [(event.id, minutes(event.at_ns), _place(event), event.by, event.text) for event in shown]
    sys.stdout.write(table(rows))


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
