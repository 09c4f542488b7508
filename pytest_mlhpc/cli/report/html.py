"""``mlhpc report html``: one HTML file of all systems, benchmarks and nights."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.history.events import events
from pytest_mlhpc.influx.source import chosen, look_of
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.report.html.gather import PageQuery, gather
from pytest_mlhpc.report.html.page import html_of
from pytest_mlhpc.store.files import replace_file
from pytest_mlhpc.store.record import SeriesKey
from pytest_mlhpc.store.text import count, minutes, tell, write


@click.command(
    cls=Command,
    help="Write one self-contained page of all systems, benchmarks and nights.",
    example="mlhpc report html --output report.html --since 90d",
)
@click.option(
    "--output",
    required=True,
    metavar="FILE",
    help="The file to write; -: standard output. It is replaced whole.",
)
@options.since("365d")
@options.benchmark
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Only this metric; may be given again."
)
@click.option("--title", default="Benchmarks", show_default=True, help="What stands above it.")
@options.baselines_dir
@options.system
@options.branch
@options.source
def command(
    *,
    output: str,
    since_ns: int,
    benchmark: str,
    metrics: Sequence[str],
    title: str,
    baselines_dir: Path,
    system: str,
    branch: str,
    source: str,
    state_dir: Path,
) -> None:
    """Write the page; where nothing is recorded, write nothing."""
    wanted = PageQuery(
        now_ns=time.time_ns(),
        since_ns=since_ns,
        system=system,
        benchmark=benchmark,
        metrics=frozenset(metrics),
        default_branch=look_of(system, branch, judged_only=False).default_branch,
        title=title,
        source=source,
    )
    entries = _entries(baselines_dir, state_dir, system)
    with chosen(source, state_dir) as opened:
        page = gather(opened, wanted, entries, events(state_dir, tell))
    if page is None:
        tell(f"no record since {minutes(since_ns)} matches, so no page was written; see `mlhpc records list`")
        return
    text = html_of(page)
    if output == "-":
        sys.stdout.write(text)
        return
    replace_file(Path(output), text)
    for note in page.notes:
        tell(note)
    rows = sum(len(bench.rows) for bench in page.benches)
    write(
        f"{output}: {count(len(page.benches), 'benchmark')}, {count(rows, 'row')}, {len(text) / 1e6:.1f} MB; open it in a browser\n"
    )


def _entries(directory: Path, state_dir: Path, system: str) -> Mapping[SeriesKey, Entry]:
    """Return the accepted values of *system*, or of all; reviewed ones win."""
    book = BaselineBook(directory, state_dir)
    found: dict[SeriesKey, Entry] = {}
    for name in [system] if system else sorted({*book.systems(), *book.provisional_systems()}):
        found |= {**book.provisional_entries(name), **book.entries(name)}
    return found
