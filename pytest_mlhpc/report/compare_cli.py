"""``mlhpc compare``: the same benchmarks on several machines, in one table, from what was recorded.

With ``--tables``, the three tables of throughput of the HPDC'24 paper (``tables.py``).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.report import keys, tables
from pytest_mlhpc.report.compare import compare
from pytest_mlhpc.report.compare_source import newest, summarise
from pytest_mlhpc.report.compare_text import text_of
from pytest_mlhpc.report.figures import ACCEPTED, Table
from pytest_mlhpc.report.machines import Seen, choose
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import iso, minutes
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.saying import nothing, tell, write
from pytest_mlhpc.results.text import one_line
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "one table of the same benchmarks on several machines"

#: More runs than this are no sample of how fast a machine is now.
_MOST_RUNS = 1000
_RUNS = 5
_FORMATS = ("text", "json", "csv", "markdown", "latex")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the machines, what of them to show, and how."""
    parser.add_argument(
        "machines",
        nargs="+",
        metavar="SYSTEM[:PARTITION]",
        help="what to compare, each in columns of its own; the first is what the others are compared with",
    )
    parser.add_argument(
        "--benchmark",
        default="",
        metavar="TEXT",
        help="only benchmarks whose key holds TEXT (test, workload, k=v)",
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="this metric; may be given again (default: judged)",
    )
    parser.add_argument("--since", default="30d", metavar="TIME", help="30d, 12h or a date (default: 30d)")
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"median of the last N accepted runs (default: {_RUNS}; with --tables: {tables.RUNS})",
    )
    parser.add_argument(
        "--per-device",
        action="store_true",
        help="work per time divided by devices, whatever the scale of the runs",
    )
    parser.add_argument(
        "--keys", action="store_true", help="name the whole key of each benchmark below the table"
    )
    parser.add_argument("--format", choices=_FORMATS, default="text", help="default: text")
    tables.add_arguments(parser)
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 5 when there is nothing to compare."""
    tables.check(args)
    if args.runs is None:
        args.runs = tables.RUNS if args.tables else _RUNS
    if not 1 <= args.runs <= _MOST_RUNS:
        raise UsageError(f"--runs {args.runs}: must be from 1 to {_MOST_RUNS}")
    since_ns = since(args.since, time.time_ns())
    state_dir = args.state_dir or default_state_dir(os.environ)
    if not (state_dir / "records").is_dir():  # else an index would be made where perhaps nobody wants one
        return nothing(f"nothing is recorded in {state_dir}; run: pytest suites/ --system NAME")
    index = Index(
        state_dir, tell, patience_s=math.inf
    )  # one picture: what is recorded meanwhile is not taken in
    try:
        found = _compared(index, args, since_ns)
    finally:
        index.close()
    if found is None:
        return nothing(f"nothing is recorded in {state_dir}; run: pytest suites/ --system NAME")
    text, compares = found
    write(text)
    if compares:
        return 0
    beside = "two systems" if args.tables else "two columns"
    return nothing(f"nothing to compare: no benchmark has figures in {beside} since {minutes(since_ns)}")


def _compared(index: Index, args: argparse.Namespace, since_ns: int) -> tuple[str, bool] | None:
    """Return what to print, and whether anything is compared in it; None where nothing is recorded."""
    everything = summarise(index, since_ns)
    if not everything:
        return None
    columns = choose(args.machines, everything, ACCEPTED)
    machines = frozenset().union(*(column.sources | column.also for column in columns))
    seen = [one for one in everything if one.machine in machines]
    benchmarks = _benchmarks(args.benchmark, seen)
    runs = newest(index, columns, benchmarks, since_ns, args.runs)
    if args.tables:
        return tables.rendered(
            columns, runs, [one for one in seen if one.benchmark in benchmarks], args, since_ns
        )
    # What nearest ones are named from is all that was recorded, whatever --benchmark says.
    table = compare(
        columns,
        runs,
        seen,
        benchmarks=benchmarks,
        metrics=list(dict.fromkeys(args.metric)),
        per_device=args.per_device,
    )
    return _rendered(table, args, since_ns), table.compares


def _benchmarks(text: str, seen: Sequence[Seen]) -> frozenset[str]:
    """Return the benchmarks whose key holds *text*.

    Raises:
        UsageError: none does; names the nearest test or workload.
    """
    known = {one.benchmark for one in seen}
    chosen = frozenset(one for one in known if text in one)
    if known and not chosen:
        parsed = [key for one in sorted(known) if (key := keys.parse(one)) is not None]
        hint = nearest(text, dict.fromkeys(word for key in parsed for word in (key.name, key.workload)))
        meant = f" (did you mean {hint!r}?)" if hint else ""
        raise UsageError(f"no benchmark of these machines holds {text!r}{meant}")
    return chosen


def _rendered(table: Table, args: argparse.Namespace, since_ns: int) -> str:
    head = _head(table, args.runs, since_ns)
    if args.format == "text":
        return text_of(table, head, show_keys=args.keys)
    from pytest_mlhpc.report.compare_files import csv_of, json_of, markdown_of

    if args.format == "csv":
        return csv_of(table)
    if args.format == "markdown":
        return markdown_of(table, head)
    return json_of(table, {"since": iso(since_ns), "runs": args.runs, "per_device": table.per_device})


def _head(table: Table, runs: int, since_ns: int) -> list[str]:
    many = f"median of the last {runs} accepted runs" if runs > 1 else "last accepted run"
    shape = ", \N{PLUS-MINUS SIGN} half their range, (runs)" if runs > 1 else ""
    first = table.columns[0].name
    return [f"{many} since {minutes(since_ns)}{shape}; ratios are to {one_line(first)}", *table.notes]
