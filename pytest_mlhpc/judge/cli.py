"""``mlhpc baseline``: show, compare, accept, learn and prune accepted values."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.judge import accepting
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import SeriesKey
from pytest_mlhpc.results.text import table
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "show, compare, accept, learn and prune accepted values"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``show``, ``diff``, ``accept``, ``learn`` and ``prune``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|diff|accept|learn|prune")
    show = actions.add_parser("show", help="the accepted values of a system, or of all")
    diff = actions.add_parser("diff", help="the newest records against the accepted values")
    for action in (show, diff):
        action.add_argument("system", nargs="?", default="", help="default: all that have a file")
        action.add_argument("--json", action="store_true", help="for programs: one JSON object a line")
    accept = actions.add_parser("accept", help="make what was recorded last the accepted value")
    accept.add_argument("test", nargs="+", metavar="NODE-ID|RECORD-ID", help="a test, or one record of it")
    learn = actions.add_parser("learn", help="run tests several times and accept the medians")
    learn.add_argument("--runs", type=int, default=5, metavar="N", help="default: 5")
    learn.add_argument(
        "pytest", nargs="+", metavar="PYTEST-ARGUMENT", help="such as: -- suites/ --system cirrus"
    )
    for action in (accept, learn):
        action.add_argument("--reason", required=True, help="why the new value is right; kept in the file")
    prune = actions.add_parser("prune", help="remove entries that nothing was recorded for in a long time")
    prune.add_argument("system")
    prune.add_argument("--days", type=int, default=180, metavar="N", help="a long time (default: 180)")
    prune.add_argument("--yes", action="store_true", help="remove them; without it they are only shown")
    for action in (show, diff, accept, learn, prune):
        action.add_argument(
            "--baselines-dir",
            type=Path,
            default=Path("baselines"),
            metavar="DIR",
            help="default: ./baselines",
        )
        action.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 0, and 1 where ``learn`` could not measure everything."""
    state_dir = args.state_dir or default_state_dir(os.environ)
    book = BaselineBook(args.baselines_dir, state_dir)
    index = Index(state_dir, patience_s=0)
    try:
        if args.action == "show":
            _show(_entries(book, args.system), as_json=args.json)
        elif args.action == "diff":
            _diff(_entries(book, args.system), index, as_json=args.json)
        elif args.action == "prune":
            _prune(book, index, args)
        else:
            accepting.require_reason(args.reason)
            if args.action == "accept":
                for test in args.test:
                    _tell_accepted(accepting.accept(book, index, test, args.reason))
                _tell_saved(book.save())
            else:
                return _learn(book, index, args)
    finally:
        index.close()
    return 0


def _entries(book: BaselineBook, system: str) -> Mapping[SeriesKey, Entry]:
    known = book.systems()
    found: dict[SeriesKey, Entry] = {}
    for name in [system] if system else sorted({*known, *book.provisional_systems()}):
        found |= {**book.provisional_entries(name), **book.entries(name)}  # reviewed ones win
    if system and not found:
        hint = nearest(system, known)
        meant = f" (did you mean {hint!r}?)" if hint else ""
        raise UsageError(f"system {system!r} has no accepted values{meant}")
    return dict(sorted(found.items(), key=lambda item: dataclasses.astuple(item[0])))


def _show(entries: Mapping[SeriesKey, Entry], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.writelines(
            json.dumps(dataclasses.asdict(k) | dataclasses.asdict(e)) + "\n" for k, e in entries.items()
        )
        return
    rows = [
        ("system:partition", "benchmark", "metric", "value", "tolerance", "runs", "accepted", "by", "reason")
    ]
    for key, entry in entries.items():
        value, tolerance = f"{entry.value:.5g} {entry.unit}", f"{entry.tolerance:.1%}"
        where = f"{key.system}:{key.partition}"
        told = entry.date[:10], entry.accepted_by, entry.reason
        rows.append((where, key.benchmark, key.metric, value, tolerance, str(entry.runs), *told))
    sys.stdout.write(table(rows))


def _diff(entries: Mapping[SeriesKey, Entry], index: Index, *, as_json: bool) -> None:
    rows = [("system:partition", "benchmark", "metric", "accepted", "newest", "change", "verdict")]
    for key, entry in entries.items():
        record = index.newest_of(key)
        metric = record.measurement.metric(key.metric) if record and record.measurement else None
        change = None if metric is None else -drop(metric.value, entry.value, entry.better)
        if as_json:
            newest = metric.value if metric else None
            told = {"accepted": entry.value, "unit": entry.unit, "newest": newest, "change": change}
            sys.stdout.write(json.dumps(dataclasses.asdict(key) | told) + "\n")
            continue
        where = f"{key.system}:{key.partition}", key.benchmark, key.metric
        newest_text = f"{metric.value:.5g} {metric.unit}" if metric else "not recorded"
        change_text = "" if change is None else _change(change)
        verdict = record.verdict if record else ""
        rows.append((*where, f"{entry.value:.5g} {entry.unit}", newest_text, change_text, verdict))
    if not as_json:
        sys.stdout.write(table(rows))


def _learn(book: BaselineBook, index: Index, args: argparse.Namespace) -> int:
    learnt = accepting.learn(index, args.pytest, args.runs, args.baselines_dir, args.state_dir)
    short = {node_id: len(records) for node_id, records in learnt.items() if len(records) < args.runs}
    for node_id, records in learnt.items():
        if node_id not in short:
            _tell_accepted(accepting.put(book, records, args.reason))
    for node_id, count in short.items():
        sys.stderr.write(f"not accepted: {node_id}: only {count} of {args.runs} runs measured it\n")
    _tell_saved(book.save())
    if not learnt:
        raise UsageError("nothing was measured; do the arguments select benchmarks and a --system?")
    return 1 if short else 0


def _prune(book: BaselineBook, index: Index, args: argparse.Namespace) -> None:
    entries = book.entries(args.system)
    measured = index.measured(time.time_ns() - args.days * 86_400_000_000_000)
    machines = {dataclasses.replace(key, benchmark="") for key in measured}
    unused = [
        key
        for key in entries
        if dataclasses.replace(key, metric="") not in measured
        and dataclasses.replace(key, metric="", benchmark="") in machines
    ]
    for key in sorted(unused, key=dataclasses.astuple):
        sys.stdout.write(
            f"{'removed' if args.yes else 'would remove'}: {key.benchmark} {key.metric} ({key.partition})\n"
        )
        book.remove(key)
    if not unused:
        sys.stdout.write(f"nothing to remove: each entry of {args.system} was measured within {args.days} days,\n"
                         "or nothing was recorded on its machine, so that it cannot be told\n")  # fmt: skip
    elif args.yes:
        _tell_saved(book.save())
    else:
        sys.stdout.write("to remove them, add --yes\n")


def _tell_accepted(accepted: Iterable[accepting.Accepted]) -> None:
    for one in accepted:
        was = f", was {one.old.value:.5g}" if one.old else ""
        runs = f"median of {one.entry.runs} runs" if one.entry.runs > 1 else "one run"
        name = f"{one.key.benchmark} {one.key.metric}"
        sys.stdout.write(f"accepted: {name}: {one.entry.value:.5g} {one.entry.unit}{was} ({runs})\n")


def _tell_saved(paths: Iterable[Path]) -> None:
    for path in paths:
        sys.stdout.write(f"written: {path}\n")


def _change(change: float) -> str:
    word = "" if abs(change) < 0.0005 else " (better)" if change > 0 else " (worse)"
    return f"{change:+.1%}{word}"
