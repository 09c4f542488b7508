"""``mlhpc ci``: what a CI service needs beside pytest."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.ci.comparison import CommitComparison, Selection, chosen
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NounGroup
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.text import object_text, one_line, tell

#: Exit code: GitLab is away, try again later (EX_TEMPFAIL of sysexits.h).
LATER = 75


@click.group(
    cls=NounGroup,
    help="CI services: the pipelines of GitLab CI, and notes of what they measured.",
    example="mlhpc ci note --since 1d",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    cls=DataCommand,
    help="Write a child pipeline for each system of mlhpc-ci.yaml.",
    example="mlhpc ci pipelines --output mlhpc-ci",
)
@click.option(
    "--config", type=Path, default=Path("mlhpc-ci.yaml"), metavar="FILE", help="[default: mlhpc-ci.yaml]"
)
@options.systems_file
@click.option("--output", type=Path, required=True, metavar="DIR", help="Files are called NAME.yml.")
def pipelines(config: Path, systems_file: str | None, output: Path) -> CommandReport:
    """Write them."""
    import yaml

    from pytest_mlhpc.ci import pipelines
    from pytest_mlhpc.ci.pipelines import child, idle, occasion_of
    from pytest_mlhpc.store.locations import replace_file

    archived = {name: entry.archived for name, entry in options.chosen_systems(systems_file).known.items()}
    found = pipelines.read(config, archived)
    occasion = occasion_of(os.environ)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, inputs in found.systems.items():
        text = yaml.safe_dump(
            child(name, found.template, inputs, occasion), sort_keys=False, allow_unicode=True
        )
        path = output / f"{name}.yml"
        replace_file(path, f"# Made by `mlhpc ci pipelines` from {config.name}.\n{text}")
        why = idle(name, inputs, occasion)
        written.append({"system": name, "file": str(path), "for": why or occasion.source})
    text = "".join(one_line(f"{one['file']}: {one['for']}") + "\n" for one in written)
    return CommandReport(text, {"pipelines": written})


@command.command(
    help="Compare what was measured with what was accepted and the last nights: as Markdown, or as files that --post "
    "makes comments of merge requests of. Exit code 75: GitLab is away, try again later.",
    example="mlhpc ci note --system cirrus --since 1d --output notes",
)
@options.pipeline
@options.baselines_dir
@click.option("--output", type=Path, metavar="DIR", help="Write files for --post.  [default: Markdown here]")
@click.option("--post", type=Path, metavar="DIR", help="Post the files of DIR to GitLab instead.")
@options.as_json
def note(
    *,
    system: str,
    since_ns: int,
    commit: str,
    changes: bool,
    state_dir: Path,
    baselines_dir: Path,
    output: Path | None,
    post: Path | None,
    as_json: bool,
) -> int:
    """Write or post them."""
    if as_json and (output or post):
        raise UsageError("--json prints the comparisons; leave out --output and --post")
    if post is not None:
        return _post(post)
    from pytest_mlhpc.ci import gitlab
    from pytest_mlhpc.ci.comparison import render

    comparisons = _comparisons(Selection(since_ns, system, commit, changes), state_dir, baselines_dir)
    if not comparisons:
        tell(f"no record in {state_dir} matches")
    if as_json:
        sys.stdout.write(object_text("ci note", {"comparisons": to_json(comparisons)}))
    elif output is None:
        sys.stdout.write("\n".join(map(render, comparisons)))
    else:
        for path in gitlab.write(output, comparisons):
            sys.stdout.write(f"written: {path}\n")
    return 0


def _comparisons(wanted: Selection, state_dir: Path, baselines_dir: Path) -> Sequence[CommitComparison]:
    from pytest_mlhpc.ci.comparison import compare
    from pytest_mlhpc.judge.baselines import BaselineBook
    from pytest_mlhpc.store.index import Index

    book = BaselineBook(baselines_dir, state_dir)
    branch = os.environ.get("CI_DEFAULT_BRANCH") or "main"
    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        return compare(
            chosen(index, wanted),
            book.lookup,
            lambda key, epoch, limit: index.history(key, epoch, limit=limit, default_branch=branch),
        )


def _post(folder: Path) -> int:
    from pytest_mlhpc.alert.channels.base import DeliveryError
    from pytest_mlhpc.ci.gitlab import MergeRequestNotes, place_of, read

    comparisons = read(folder)
    if not comparisons:
        sys.stdout.write(f"nothing to post: no comparison in {folder}\n")
        return 0
    notes = MergeRequestNotes(place_of(os.environ))
    try:
        for one in comparisons:
            requests = notes.post(one)
            where = ", ".join(f"!{request}" for request in requests) or "no open merge request"
            sys.stdout.write(one_line(f"{one.system}, commit {one.commit[:12]}: {where}") + "\n")
    except DeliveryError as error:
        if not error.retry:
            raise StoreError(str(error)) from None
        tell(f"Error: {one_line(str(error), 1000)}; the next pipeline tries again")
        return LATER
    return 0
