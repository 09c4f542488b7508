"""``mlhpc records show``: all of one record."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import tell


@click.command(
    cls=DataCommand,
    help="Show all of one record, by its ID or how that begins; `mlhpc records list` shows the newest.",
    example="mlhpc records show 01932f6a-7c1e",
)
@click.argument("name", metavar="ID")
@options.state_dir
def command(name: str, state_dir: Path) -> CommandReport:
    """Return it, or say which are meant."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        found = index.find(name)
    if not found:
        raise UsageError(f"no record's id starts with {name!r}; `mlhpc records list` shows the newest")
    if len(found) > 1:
        ids = ", ".join(record.id for record in found)
        raise UsageError(f"several records' ids start with {name!r}: {ids}")
    record = to_json(found[0])
    return CommandReport(f"{json.dumps(record, indent=2)}\n", {"record": record})
