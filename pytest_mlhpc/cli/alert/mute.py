"""``mlhpc alert mute``: nothing new of a system is sent until a date."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pytest_mlhpc.alert import acknowledging
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError


@click.command(
    cls=Command,
    help="Send nothing new of SYSTEM until then. What was announced before and is over is sent all the same.",
    example="mlhpc alert mute cirrus --until 2d --reason maintenance",
)
@click.argument("system")
@click.option("--until", "end", default="", metavar="TIME", help="2d, 12h or 2026-12-24T08:00.")
@click.option("--reason", default="", metavar="TEXT", help="Such as maintenance.")
@click.option("--off", is_flag=True, help="End it now.")
@options.state_dir
def command(system: str, end: str, reason: str, off: bool, state_dir: Path) -> int:
    """Do it."""
    if off == bool(end):
        raise UsageError("say either --until TIME or --off")
    if off:
        return acknowledging.unmute(state_dir, system)
    return acknowledging.mute(state_dir, system, acknowledging.until(end, time.time_ns()), reason)
