"""``mlhpc records``: what was recorded, and whether it can still be read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.store import read_records
from pytest_mlhpc.results.text import clean, table
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "list, show and check what was recorded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show ID``, ``check`` and ``index``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|check|index")
    listing = actions.add_parser("list", help="the newest records")
    listing.add_argument("--session", default="", metavar="ID")
    listing.add_argument("--test", default="", metavar="NODE-ID", help="records of this test only")
    listing.add_argument("--limit", type=int, default=20, metavar="N", help="at most N (default: 20)")
    show = actions.add_parser("show", help="all of one record")
    show.add_argument("id", help="its id, or how it starts")
    check = actions.add_parser(
        "check", help="read everything and name what is damaged; exit 1 if anything is"
    )
    index = actions.add_parser("index", help="make the index anew")
    for action in (listing, show, check, index):
        action.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")
    for action in (listing, show):
        action.add_argument("--json", action="store_true", help="for programs: one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 1 where ``check`` found damage."""
    state_dir = args.state_dir or default_state_dir(os.environ)
    if args.action == "check":
        return _check(state_dir)
    index = Index(state_dir, _tell)
    try:
        if args.action == "index":
            sys.stdout.write(f"{index.rebuild()} records in {state_dir / 'records'}\n")
        elif args.action == "show":
            _show(index.find(args.id), args.id, as_json=args.json)
        else:
            _list(index.newest(session=args.session, node_id=args.test, limit=args.limit), as_json=args.json)
    finally:
        index.close()
    return 0


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")


def _check(state_dir: Path) -> int:
    problems: list[str] = []
    count = sum(1 for _record in read_records(state_dir, problems.append))
    sys.stdout.writelines(f"{clean(problem)}\n" for problem in problems)
    sys.stdout.write(f"{count} records in {state_dir / 'records'}, {len(problems)} problems\n")
    return 1 if problems else 0


def _list(records: Sequence[Record], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.writelines(json.dumps(to_json(record)) + "\n" for record in records)
        return
    rows = [("recorded", "id", "verdict", "attempt", "test", "judged")]
    for record in records:
        row = minutes(record.created_ns), record.id, record.verdict, str(record.attempt), record.node_id
        rows.append((*row, _figures(record)))
    sys.stdout.write(table(rows))


def _show(found: Sequence[Record], text: str, *, as_json: bool) -> None:
    if not found:
        raise UsageError(f"no record's id starts with {text!r}; `mlhpc records list` shows the newest")
    if len(found) > 1:
        ids = ", ".join(record.id for record in found)
        raise UsageError(f"several records' ids start with {text!r}: {ids}")
    data = to_json(found[0])
    sys.stdout.write(json.dumps(data) + "\n" if as_json else clean(json.dumps(data, indent=2)) + "\n")


def _figures(record: Record) -> str:
    if record.measurement is None:
        return record.failure
    metrics = [metric for name in record.judged if (metric := record.measurement.metric(name))]
    return ", ".join(f"{metric.name} {metric.value:.5g} {metric.unit}" for metric in metrics)
