"""``mlhpc vet drain``: the unfit nodes of a verdict are taken out of service."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.vetting.cordon import apply, fresh, keeper_of, left_silent, node_problems, tell


@click.command(
    cls=Command,
    help="Drain or cordon the nodes that have a problem of their own by the verdict.json in DIR (the --output of a "
    "vetting). Exit code 1 if one could not be taken out of service.",
    example="mlhpc vet drain vet --most 2",
)
@click.argument("output", type=Path, metavar="DIR")
@click.option(
    "--most",
    type=click.IntRange(0),
    metavar="N",
    help="Do nothing if more nodes are bad.  [default: a third of those vetted]",
)
@options.scheduler
def command(output: Path, most: int | None, scheduler: str) -> int:
    """Do it."""
    verdict = fresh(output)
    if not node_problems(verdict):
        tell(left_silent(verdict))
        sys.stdout.write("no node has a problem of its own: nothing to do\n")
        return 0
    return 0 if tell(apply(verdict, keeper_of(scheduler, os.environ), most)) else 1
