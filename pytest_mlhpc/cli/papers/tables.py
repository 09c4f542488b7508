"""``mlhpc papers tables``: the three tables of throughput of the HPDC'24 paper, from what was recorded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice, nothing_recorded
from pytest_mlhpc.papers import sheets as files
from pytest_mlhpc.papers.published import PARITIES, PUBLISHED, SAME
from pytest_mlhpc.papers.sheets import text_of
from pytest_mlhpc.papers.throughput import Tables, tables_of
from pytest_mlhpc.report.compare import newest, summarise
from pytest_mlhpc.report.figures import ACCEPTED
from pytest_mlhpc.report.machines import benchmarks_of, choose
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import iso, minutes, tell

#: Six are the fewest that give an interval of 95 %; of twelve it leaves out the two lowest and the two highest.
RUNS: Final = 12


@click.command(
    cls=DataCommand,
    help="Show compute throughput, compute fraction and effective throughput of several machines, beside published figures.",
    example="mlhpc papers tables archer2 cirrus --format latex",
)
@click.argument("machines", nargs=-1, required=True, metavar="SYSTEM[:PARTITION]...")
@options.benchmark
@options.since("30d")
@options.runs(RUNS)
@click.option(
    "--parity",
    type=NearestChoice([*PARITIES]),
    default=SAME,
    show_default=True,
    help="Same parameters everywhere, or each machine at its best.",
)
@click.option("--no-published", is_flag=True, help="Only figures that were recorded here.")
@click.option(
    "--format",
    "form",
    type=NearestChoice(["text", "csv", "markdown", "latex"]),
    default="text",
    show_default=True,
)
@options.state_dir
def command(
    *,
    machines: Sequence[str],
    benchmark: str,
    since_ns: int,
    runs: int,
    parity: str,
    no_published: bool,
    form: str,
    state_dir: Path,
) -> CommandReport:
    """Return the tables."""
    about = {"since": iso(since_ns), "runs": runs}
    if not (state_dir / "records").is_dir():  # an index would be made there
        return nothing_recorded(state_dir, {**about, "parity": parity, "tables": {}, "refused": []})
    with contextlib.closing(Index(state_dir, tell, patience_s=math.inf)) as index:
        everything = summarise(index, since_ns)
        if not everything:
            return nothing_recorded(state_dir, {**about, "parity": parity, "tables": {}, "refused": []})
        columns = choose(machines, everything, ACCEPTED)
        chosen, seen = benchmarks_of(benchmark, columns, everything)
        newest_runs = newest(index, columns, chosen, since_ns, runs)
    found = tables_of(
        columns,
        newest_runs,
        [one for one in seen if one.benchmark in chosen],
        parity=parity,
        published=() if no_published else PUBLISHED,
    )
    if not any(section.compares for section in found.sections):
        tell(f"nothing to compare: no benchmark has figures in two systems since {minutes(since_ns)}")
    head = [f"median of the last {runs} accepted runs since {minutes(since_ns)}; {PARITIES[parity]}."]
    if not found.sections:
        head.append(
            "No training with these figures was accepted here in that time; `mlhpc records list` shows what there was."
        )
    return CommandReport(_text(found, head, form), files.data_of(found, about))


def _text(found: Tables, head: Sequence[str], form: str) -> str:
    if form == "text":
        return text_of(found, head)
    if form == "csv":
        return files.csv_of(found)
    return (files.latex_of if form == "latex" else files.markdown_of)(found, head)
