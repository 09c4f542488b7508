"""``mlhpc vet undo``: nodes that vetting took out of service are given back."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.vetting.cordon import keeper_of, tell, undo


@click.command(
    cls=Command,
    help="Give NODEs back to service, or all that vetting took out. Exit code 1 if one could not be given back.",
    example="mlhpc vet undo nid001234",
)
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@options.scheduler
def command(nodes: Sequence[str], scheduler: str) -> int:
    """Do it."""
    actions = undo(nodes, keeper_of(scheduler, os.environ))
    if not actions:
        sys.stdout.write("no node is out of service by us: nothing to do\n")
    return 0 if tell(actions) else 1
