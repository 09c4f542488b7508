"""The part of ``mlhpc compare`` that makes the three tables of throughput: ``--tables``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.report.figures import Runs
from pytest_mlhpc.report.machines import Column, Seen
from pytest_mlhpc.report.parity import PARITIES, SAME
from pytest_mlhpc.report.published import PUBLISHED
from pytest_mlhpc.report.throughput import tables_of
from pytest_mlhpc.results.dates import iso, minutes

#: Six are the fewest that give an interval of 95 %; of twelve it leaves out the two lowest and the two highest.
RUNS: Final = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only the tables need."""
    parser.add_argument(
        "--tables",
        action="store_true",
        help="compute throughput, compute fraction and effective throughput, beside published figures",
    )
    parser.add_argument(
        "--parity",
        choices=tuple(PARITIES),
        help="with --tables: same parameters everywhere (default), or each machine at its best",
    )
    parser.add_argument("--no-published", action="store_true", help="with --tables: only our own figures")


def check(args: argparse.Namespace) -> None:
    """Refuse options that say nothing in the form that was asked for.

    Raises:
        UsageError: one of them was given.
    """
    if args.tables:
        given = {"--metric": args.metric, "--per-device": args.per_device, "--keys": args.keys}
        why = "not with --tables: these have metrics, rates per device and parameters of their own"
    else:
        given = {
            "--parity": args.parity,
            "--no-published": args.no_published,
            "--format latex": args.format == "latex",
        }
        why = "only with --tables"
    for option, value in given.items():
        if value:
            raise UsageError(f"{option}: {why}")


def rendered(
    columns: Sequence[Column], runs: Runs, seen: Sequence[Seen], args: argparse.Namespace, since_ns: int
) -> tuple[str, bool]:
    """Return the tables in the format that was asked for, and whether they compare anything."""
    parity = args.parity or SAME
    published = () if args.no_published else PUBLISHED
    found = tables_of(columns, runs, seen, parity=parity, published=published)
    compares = any(section.compares for section in found.sections)
    head = [f"median of the last {args.runs} accepted runs since {minutes(since_ns)}; {PARITIES[parity]}."]
    if not found.sections:
        head.append(
            "No training with these figures was accepted here in that time; `mlhpc records list` shows what there was."
        )
    if args.format == "text":
        from pytest_mlhpc.report.sheets_text import text_of

        return text_of(found, head), compares
    from pytest_mlhpc.report import sheets_files as files

    if args.format == "csv":
        return files.csv_of(found), compares
    if args.format == "json":
        return files.json_of(found, {"since": iso(since_ns), "runs": args.runs}), compares
    made = files.latex_of if args.format == "latex" else files.markdown_of
    return made(found, head), compares
