"""``mlhpc report``: one HTML file of all systems, benchmarks and nights."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pytest_mlhpc.history.choose import (
    add_look_arguments,
    add_source_arguments,
    chosen,
    look_of,
    state_dir_of,
)
from pytest_mlhpc.history.events import events
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.report.html.gather import Wanted, gather
from pytest_mlhpc.report.html.page import html_of
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.record import SeriesKey
from pytest_mlhpc.results.saying import nothing, tell, write
from pytest_mlhpc.wholefile import replace_file

SUMMARY = "one self-contained HTML page of all systems, benchmarks and nights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, what of the history to show, and where it is read."""
    parser.add_argument(
        "--html",
        required=True,
        metavar="FILE",
        help="the file to write; - is standard output. It is replaced whole",
    )
    parser.add_argument("--since", default="365d", metavar="TIME", help="30d, 12h or a date (default: 365d)")
    parser.add_argument(
        "--benchmark",
        default="",
        metavar="TEXT",
        help="only benchmarks whose key holds TEXT (test, workload, k=v)",
    )
    parser.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="only this metric; may be given again"
    )
    parser.add_argument("--title", default="Benchmarks", help="what stands above it (default: Benchmarks)")
    parser.add_argument(
        "--baselines-dir",
        type=Path,
        default=Path("baselines"),
        metavar="DIR",
        help="accepted values (default: ./baselines)",
    )
    add_look_arguments(parser)
    add_source_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page. Returns 5 where nothing is recorded, and then writes nothing."""
    now_ns = time.time_ns()
    wanted = Wanted(
        now_ns=now_ns,
        since_ns=since(args.since, now_ns),
        system=args.system,
        benchmark=args.benchmark,
        metrics=frozenset(args.metric),
        default_branch=look_of(args, judged_only=False).default_branch,
        title=args.title,
        source=args.source,
    )
    state_dir = state_dir_of(args)
    entries = _entries(args.baselines_dir, state_dir, args.system)
    with chosen(args) as source:
        page = gather(source, wanted, entries, events(state_dir, tell))
    if page is None:
        return nothing(
            f"nothing is recorded since {minutes(wanted.since_ns)} that is asked for; nothing was written"
        )
    text = html_of(page)
    if args.html == "-":
        sys.stdout.write(text)
        return 0
    replace_file(Path(args.html), text)
    for note in page.notes:
        tell(note)
    rows = sum(len(bench.rows) for bench in page.benches)
    write(
        f"{args.html}: {len(page.benches)} benchmarks, {rows} rows, {len(text) / 1e6:.1f} MB; open it in a browser\n"
    )
    return 0


def _entries(directory: Path, state_dir: Path, system: str) -> Mapping[SeriesKey, Entry]:
    """Return the accepted values of *system*, or of all; reviewed ones win."""
    book = BaselineBook(directory, state_dir)
    found: dict[SeriesKey, Entry] = {}
    for name in [system] if system else sorted({*book.systems(), *book.provisional_systems()}):
        found |= {**book.provisional_entries(name), **book.entries(name)}
    return found
