"""``mlhpc ci``: what a CI service needs beside pytest."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.results.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_mlhpc.ci.comparison import Comparison

SUMMARY = (
    "child pipelines, OpenMetrics, comparisons and proposals of baselines, for GitLab CI and GitHub Actions"
)

#: Exit codes: nothing to do, and try again later (EX_TEMPFAIL of sysexits.h).
_NOTHING, _LATER = 5, 75


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``generate``, ``metrics``, ``note``, ``post`` and ``propose``."""
    from pytest_mlhpc.ci import chosen

    actions = parser.add_subparsers(
        dest="action", required=True, metavar="generate|metrics|note|post|propose"
    )
    generate = actions.add_parser("generate", help="write a child pipeline for each system of mlhpc-ci.yaml")
    generate.add_argument(
        "--config", type=Path, default=Path("mlhpc-ci.yaml"), metavar="FILE", help="default: %(default)s"
    )
    generate.add_argument("--systems-file", metavar="FILE", help="default: systems.yaml of this folder")
    generate.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="files are called NAME.yml"
    )
    metrics = actions.add_parser("metrics", help="what was measured, as OpenMetrics")
    note = actions.add_parser("note", help="what was measured against what was accepted, and the last nights")
    for action in (metrics, note):
        chosen.add_arguments(action)
    metrics.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    note.add_argument(
        "--output", type=Path, metavar="DIR", help="files for `mlhpc ci post`; default: Markdown here"
    )
    post = actions.add_parser("post", help="comparisons as comments of merge requests on GitLab")
    post.add_argument("folder", type=Path, metavar="DIR", help="of `mlhpc ci note --output`")
    propose = actions.add_parser("propose", help="new accepted values as a merge request on GitLab")
    propose.add_argument("--branch", required=True, metavar="NAME", help="that is made for it")
    propose.add_argument("--reason", required=True, help="for those who review it")
    propose.add_argument("--target", metavar="NAME", help="default: $CI_DEFAULT_BRANCH, else main")
    propose.add_argument("--remote", metavar="URL", help="default: $CI_PROJECT_URL, else origin")
    for action in (note, propose):
        action.add_argument(
            "--baselines-dir",
            type=Path,
            default=Path("baselines"),
            metavar="DIR",
            help="default: ./baselines",
        )


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 0, 5 where there is nothing to do, 75 where GitLab is away or refuses."""
    actions = {"generate": _generate, "metrics": _metrics, "note": _note, "post": _post, "propose": _propose}
    return actions[args.action](args)


def _generate(args: argparse.Namespace) -> int:
    import yaml

    from pytest_mlhpc.ci import settings
    from pytest_mlhpc.ci.pipelines import child, idle, occasion_of
    from pytest_mlhpc.wholefile import replace_file

    found = settings.read(args.config, _systems(args.systems_file))
    occasion = occasion_of(os.environ)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, inputs in found.systems.items():
        text = yaml.safe_dump(
            child(name, found.template, inputs, occasion), sort_keys=False, allow_unicode=True
        )
        path = args.output / f"{name}.yml"
        replace_file(path, f"# Made by `mlhpc ci generate` from {args.config.name}.\n{text}")
        why = idle(name, inputs, occasion)
        sys.stdout.write(one_line(f"{path}: {why or occasion.source}") + "\n")
    return 0


def _systems(file: str | None) -> Mapping[str, bool]:
    from pytest_mlhpc.plugins import make_manager
    from pytest_mlhpc.system.loading import find_systems_file, load_systems

    hook = make_manager().hook
    schedulers = {name: model for answer in hook.mlhpc_schedulers() for name, model in answer.items()}
    systems = load_systems(find_systems_file(Path.cwd(), file), schedulers=schedulers, environ=os.environ)
    return {name: entry.archived for name, entry in systems.entries.items()}


def _metrics(args: argparse.Namespace) -> int:
    from pytest_mlhpc.ci.chosen import chosen, state_dir_of
    from pytest_mlhpc.ci.openmetrics import openmetrics
    from pytest_mlhpc.results.index import Index
    from pytest_mlhpc.wholefile import replace_file

    index = Index(state_dir_of(args), patience_s=0)
    try:
        records = chosen(index, args)
    finally:
        index.close()
    text = openmetrics(records)
    if args.output is None:
        sys.stdout.write(text)
    else:
        replace_file(args.output, text)  # whole or not at all: a scraper may read it at any moment
    return 0 if records else _NOTHING


def _note(args: argparse.Namespace) -> int:
    from pytest_mlhpc.ci import notes
    from pytest_mlhpc.ci.markdown import render

    comparisons = _comparisons(args)
    if args.output is None:
        sys.stdout.write("\n".join(map(render, comparisons)))
    else:
        for path in notes.write(args.output, comparisons):
            sys.stdout.write(f"written: {path}\n")
    return 0 if comparisons else _NOTHING


def _comparisons(args: argparse.Namespace) -> list[Comparison]:
    from pytest_mlhpc.ci.chosen import chosen, state_dir_of
    from pytest_mlhpc.ci.comparison import compare
    from pytest_mlhpc.judge.baselines import BaselineBook
    from pytest_mlhpc.results.index import Index

    state_dir = state_dir_of(args)
    book = BaselineBook(args.baselines_dir, state_dir)
    index = Index(state_dir, patience_s=0)
    branch = os.environ.get("CI_DEFAULT_BRANCH") or "main"
    try:
        return compare(
            chosen(index, args),
            book.lookup,
            lambda key, limit: index.history(key, limit=limit, default_branch=branch),
        )
    finally:
        index.close()


def _post(args: argparse.Namespace) -> int:
    from pytest_mlhpc.alert.channels.base import ChannelError
    from pytest_mlhpc.ci.notes import Notes, place_of, read

    comparisons = read(args.folder)
    if not comparisons:
        sys.stdout.write(f"nothing to post: no comparison in {args.folder}\n")
        return 0
    notes = Notes(place_of(os.environ))
    try:
        for one in comparisons:
            requests = notes.post(one)
            where = ", ".join(f"!{request}" for request in requests) or "no open merge request"
            sys.stdout.write(one_line(f"{one.system}, commit {one.commit[:12]}: {where}") + "\n")
    except ChannelError as error:
        if not error.retry:
            raise StoreError(str(error)) from None
        sys.stderr.write(f"mlhpc: error: {one_line(str(error), 1000)}; the next pipeline tries again\n")
        return _LATER
    return 0


def _propose(args: argparse.Namespace) -> int:
    from pytest_mlhpc.ci.proposal import Proposal, propose

    if not args.reason.strip():
        raise UsageError("--reason must say why the new values are right, for those who review them")
    project = os.environ.get("CI_PROJECT_URL", "")
    proposal = Proposal(
        root=Path.cwd(),
        folder=args.baselines_dir,
        branch=args.branch,
        reason=args.reason,
        target=args.target or os.environ.get("CI_DEFAULT_BRANCH") or "main",
        remote=args.remote or (f"{project}.git" if project else ""),
        token=os.environ.get("MLHPC_GITLAB_TOKEN", "").strip(),
    )
    commit = propose(proposal)
    if not commit:
        sys.stdout.write(f"nothing to propose: {args.baselines_dir} is as in this commit\n")
        return _NOTHING
    sys.stdout.write(f"pushed {commit[:12]} to {args.branch}, to be merged into {proposal.target}\n")
    return 0
