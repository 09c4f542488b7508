"""``mlhpc records cost``: node-hours that were charged."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice
from pytest_mlhpc.store.cost import GROUPS, add_up, text_of
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import iso, tell


@click.command(
    cls=DataCommand,
    help="Add up the node-hours that were charged: of first attempts, re-runs, and runs that measured nothing.",
    example="mlhpc records cost --since 7d --by account",
)
@options.since("30d")
@click.option(
    "--by", type=NearestChoice([*GROUPS]), default="partition", show_default=True, help="What is added up."
)
@options.state_dir
def command(since_ns: int, by: str, state_dir: Path) -> CommandReport:
    """Return a row for each group, dearest first."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        costs, total = add_up(index.since(since_ns), GROUPS[by])
    data = {
        "since": iso(since_ns),
        "by": by,
        "costs": [cost.to_json() for cost in costs],
        "total": total.to_json(),
    }
    return CommandReport(text_of(costs, total, by, since_ns), data)
