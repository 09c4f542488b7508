"""``mlhpc records check``: whether all that was recorded can still be read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.store import read_records
from pytest_mlhpc.store.text import count


@click.command(
    cls=DataCommand,
    help="Read every record and name what is damaged; exit code 1 if anything is.",
    example="mlhpc records check",
)
@click.option("--rebuild-index", is_flag=True, help="Make the index of the records anew, too.")
@options.state_dir
def command(rebuild_index: bool, state_dir: Path) -> CommandReport:
    """Return what is damaged."""
    problems: list[str] = []
    records = sum(1 for _record in read_records(state_dir, problems.append))
    if rebuild_index:
        with contextlib.closing(Index(state_dir)) as index:
            index.rebuild()
    lines = [
        *problems,
        f"{count(records, 'record')} in {state_dir / 'records'}, {count(len(problems), 'problem')}",
    ]
    text = "".join(f"{line}\n" for line in lines)
    return CommandReport(text, {"records": records, "problems": problems}, 1 if problems else 0)
