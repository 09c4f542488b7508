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
@click.option(
    "--from-reframe",
    type=Path,
    metavar="SETTINGS",
    help="Take systems over from ReFrame's site configuration. A file in Python is run.",
)
def command(folder: Path, from_reframe: Path | None) -> None:
    """Write what the folder lacks, and say what can be done next."""
    from pytest_mlhpc.cli.project.files import project_files, with_systems, write_project
    from pytest_mlhpc.cli.project.surroundings import find_surroundings

    surroundings = find_surroundings(os.environ)
    files, questions = project_files(surroundings), []
    if from_reframe is not None:
        from pytest_mlhpc.cli.project.reframe import convert, read_settings

        taken = convert(read_settings(from_reframe))
        files["systems.yaml"] = with_systems(taken.text())
        questions = [f"{taken.summary}; what needs a person:" if taken.questions else taken.summary]
        questions += [f"  {one}" for one in taken.questions]
    written, there = write_project(folder, files)
    lines = [f"wrote {name}" for name in written] + [f"{name} is there and was not changed" for name in there]
    change = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    lines.append(f"next: {change}pytest --system local")
    if from_reframe is not None:
        lines += (
            questions
            if "systems.yaml" in written
            else ["systems.yaml is there already: nothing was taken over"]
        )
    elif "systems.yaml" in written and surroundings.slurm:
        lines.append("once the questions in systems.yaml are answered: pytest --system cluster")
    if "systems.yaml" in written and surroundings.kubernetes:
        lines.append("once the variables of systems.yaml are set: pytest --system kubernetes")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
