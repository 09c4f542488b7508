"""``mlhpc alert ack``: somebody knows of an alert."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pytest_mlhpc.alert.acknowledging import MOST_REASON, acknowledge, until
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.text import one_line


@click.command(
    cls=Command,
    help="Acknowledge alert ID (or how it begins): nothing of it is sent until then. `mlhpc alert list` shows all.",
    example='mlhpc alert ack cirrus-3f2a --until 7d --reason "fan replaced on Tuesday"',
)
@click.argument("name", metavar="ID")
@click.option("--until", "end", required=True, metavar="TIME", help="7d, 12h or 2026-12-24.")
@click.option("--reason", required=True, metavar="TEXT", help="For those who read it later.")
@options.state_dir
def command(name: str, end: str, reason: str, state_dir: Path) -> int:
    """Do it."""
    reason = one_line(reason, MOST_REASON)
    if not reason:
        raise UsageError("--reason is empty: whoever reads it next month wants to know")
    return acknowledge(state_dir, name, until(end, time.time_ns()), reason)
