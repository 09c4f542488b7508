"""``mlhpc report openmetrics``: what a pipeline measured, as OpenMetrics."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from pytest_mlhpc.ci.comparison import Selection, chosen, openmetrics
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.store.files import replace_file
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import tell


@click.command(
    cls=Command,
    help="Write what was measured as OpenMetrics, for GitLab's metrics report or a scraper.",
    example="mlhpc report openmetrics --since 2d --output metrics.txt",
)
@options.pipeline
@click.option("--output", type=Path, metavar="FILE", help="[default: standard output]")
def command(
    *, system: str, since_ns: int, commit: str, changes: bool, state_dir: Path, output: Path | None
) -> None:
    """Write them."""
    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        records = chosen(index, Selection(since_ns, system, commit, changes))
    text = openmetrics(records)
    if output is None:
        sys.stdout.write(text)
    else:
        replace_file(output, text)  # whole or not at all: a scraper may read it at any moment
    if not records:
        tell(f"nothing is recorded in {state_dir} that is asked for")
