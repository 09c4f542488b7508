"""``mlhpc init``: the files with which a project begins."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from pytest_mlhpc.cli.commands import Command


@click.command(
    cls=Command,
    help="Write a first suite, systems.yaml, baselines/ and a CI job into FOLDER. No file that is there is changed.",
    example="mlhpc init benchmarks",
)
@click.argument("folder", type=Path, default=Path())
def command(folder: Path) -> None:
    """Write what the folder lacks, and say what can be done next."""
    from pytest_mlhpc.cli.project.files import project_files, write_project
    from pytest_mlhpc.cli.project.surroundings import find_surroundings

    surroundings = find_surroundings(os.environ)
    written, there = write_project(folder, project_files(surroundings))
    lines = [f"wrote {name}" for name in written] + [f"{name} is there and was not changed" for name in there]
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    lines.append(f"next: {change}pytest --system local")
    if "systems.yaml" in written and surroundings.slurm:
        lines.append("once the questions in systems.yaml are answered: pytest --system cluster")
    if "systems.yaml" in written and surroundings.kubernetes:
        lines.append("once the variables of systems.yaml are set: pytest --system kubernetes")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
