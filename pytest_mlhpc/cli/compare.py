"""``mlhpc compare``: the same benchmarks on several machines, in one table, from what was recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice, nothing_recorded
from pytest_mlhpc.report.compare import compare, newest, summarise
from pytest_mlhpc.report.compare_output import csv_of, data_of, markdown_of, text_of
from pytest_mlhpc.report.figures import ACCEPTED, Table, benchmarks_of, choose
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import iso, minutes, one_line, tell


@click.command(
    cls=DataCommand,
    help="Show the same benchmarks on several machines, each in columns of its own. The first is what the others are "
    "compared with.",
    example="mlhpc compare local cirrus:standard --benchmark cosmoflow",
)
@click.argument("machines", nargs=-1, required=True, metavar="SYSTEM[:PARTITION]...")
@options.benchmark
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="This metric; may be given again.  [default: judged ones]",
)
@options.since("30d")
@options.runs(5)
@click.option(
    "--per-device", is_flag=True, help="Work per time divided by devices, whatever the scale of the runs."
)
@click.option("--keys", is_flag=True, help="Name each benchmark and its definition below the table.")
@click.option(
    "--format", "form", type=NearestChoice(["text", "csv", "markdown"]), default="text", show_default=True
)
@options.state_dir
def command(
    *,
    machines: Sequence[str],
    benchmark: str,
    metrics: Sequence[str],
    since_ns: int,
    runs: int,
    per_device: bool,
    keys: bool,
    form: str,
    state_dir: Path,
) -> CommandReport:
    """Return the table."""
    about = {"since": iso(since_ns), "runs": runs, "per_device": per_device}
    if not (state_dir / "records").is_dir():  # an index would be made there
        return nothing_recorded(state_dir, {**about, "columns": [], "rows": [], "notes": []})
    # One picture: what is recorded meanwhile is not taken in.
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        everything = summarise(index, since_ns)
        if not everything:
            return nothing_recorded(state_dir, {**about, "columns": [], "rows": [], "notes": []})
        columns = choose(machines, everything, ACCEPTED)
        chosen, counts = benchmarks_of(benchmark, columns, everything)
        found = newest(index, columns, chosen, since_ns, runs)
    # What nearest ones are named from is all that was recorded, whatever --benchmark says.
    table = compare(
        columns, found, counts, benchmarks=chosen, metrics=list(dict.fromkeys(metrics)), per_device=per_device
    )
    if not table.compares:
        tell(f"nothing to compare: no benchmark has figures in two columns since {minutes(since_ns)}")
    head = _head(table, runs, since_ns)
    if form == "text":
        text = text_of(table, head, show_keys=keys)
    else:
        text = csv_of(table) if form == "csv" else markdown_of(table, head)
    return CommandReport(text, data_of(table, about))


def _head(table: Table, runs: int, since_ns: int) -> list[str]:
    many = f"median of the last {runs} accepted runs" if runs > 1 else "last accepted run"
    shape = ", \N{PLUS-MINUS SIGN} half their range, (runs)" if runs > 1 else ""
    first = table.columns[0].name
    return [f"{many} since {minutes(since_ns)}{shape}; ratios are to {one_line(first)}", *table.notes]
