"""``mlhpc systems list|show|check``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.errors import UsageError

if TYPE_CHECKING:
    from pytest_mlhpc.hookspecs import Preview
    from pytest_mlhpc.system.model import System
    from pytest_mlhpc.system.selection import Systems

SUMMARY = "list, show and check the systems of systems.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``list``, ``show NAME`` and ``check [FILE]``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|check")
    listing = actions.add_parser("list", help="all systems with their partitions")
    show = actions.add_parser("show", help="what a system became, with all that was filled in")
    show.add_argument("name", metavar="NAME")
    for action in (listing, show):
        action.add_argument("--systems-file", metavar="FILE", help="default: systems.yaml of this folder")
        action.add_argument("--json", action="store_true", help="for programs")
    check = actions.add_parser("check", help="report every problem of a file; exit 0 or 4")
    check.add_argument("systems_file", metavar="FILE", nargs="?", help="default: systems.yaml of this folder")
    check.add_argument(
        "--render", metavar="NAME[:PARTITION]", help="print the job scripts or manifests of its partitions"
    )
    check.add_argument(
        "--render-to", metavar="DIR", help="write job scripts and manifests there, of all systems or NAME"
    )


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 0, or 4 with every problem on stderr."""
    from pytest_mlhpc.plugins import make_manager

    hook = make_manager().hook
    try:
        systems = _load(args.systems_file, hook)
        if args.action == "check":
            _check(systems, hook, args.render, args.render_to)
        elif args.action == "list":
            _list(systems, as_json=args.json)
        else:
            _show(systems, args.name, as_json=args.json)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 4
    return 0


def _load(file: str | None, hook: Any) -> Systems:
    from pytest_mlhpc.system.loading import find_systems_file, load_systems

    return load_systems(
        find_systems_file(Path.cwd(), file),
        schedulers=_together(hook.mlhpc_schedulers()),
        launchers=_together(hook.mlhpc_launchers()),
        environ=os.environ,
    )


def _together(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for answer in answers for name, value in answer.items()}


def _check(systems: Systems, hook: Any, name: str | None, folder: str | None) -> None:
    """Render all that schedulers are given (or that of *name*), and say so, print it, or write it to *folder*."""
    from pytest_mlhpc.system.previews import previews

    shown = previews(systems, hook, name or "")
    if folder is not None:
        _write(Path(folder), shown.found)
    elif name is not None:
        for place, preview in shown.found.items():
            _say(f"##### {place}\n{preview.text}" if len(shown.found) > 1 else preview.text.rstrip("\n"))
        return
    missing: dict[str, list[str]] = {}
    for problem in systems.missing_variables():
        # The project's own test cluster sets these itself.
        if "variable MLHPC_TEST_" not in problem.message:
            missing.setdefault(problem.message, []).append(str(problem))
    for places in missing.values():
        _say(f"note: {places[0]}" + (f" (needed in {len(places)} places)" if len(places) > 1 else ""))
    for note in shown.notes:
        _say(f"note: {note}")
    text = f", {shown.counted()}" if shown.found else ""
    _say(f"{systems.path}: {len(systems.entries)} systems{text}, no problem")


def _write(folder: Path, previews: Mapping[str, Preview]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, preview in previews.items():
            (folder / f"{name}.{preview.suffix}").write_text(preview.text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from error


def _list(systems: Systems, *, as_json: bool) -> None:
    rows = [
        {
            "name": entry.name,
            "status": "archived" if entry.archived else "live",
            "as_of": entry.text("as_of"),
            "description": entry.text("description"),
            "partitions": list(entry.partitions),
        }
        for entry in systems.entries.values()
    ]
    if as_json:
        _say(json.dumps(rows, indent=2))
        return
    width = max(len(entry) for entry in systems.entries)
    for row in rows:
        archived = " (archived)" if row["status"] == "archived" else ""
        _say(
            f"{row['name']:<{width}}  {', '.join(row['partitions'])}{archived}  {row['description']}".rstrip()
        )


def _show(systems: Systems, name: str, *, as_json: bool) -> None:
    system, idle = systems.system(name, display=True)
    if as_json:
        _say(json.dumps({**asdict(system), "not_live": dict(idle)}, indent=2, default=sorted))
        return
    _say(f"{system.name}: {system.description or 'no description'}")
    as_of = f", facts as of {system.as_of}" if system.as_of else ""
    _say(f"  {system.status}{as_of}, from {system.source}")
    for line in _partition_lines(system):
        _say(line)
    for partition, reason in idle.items():
        _say(f"  {system.name}:{partition}: not live here: {reason}")
    for dataset in system.datasets.values():
        _say(f"  data {dataset.name}: {dataset.kind}, {dataset.path}")


def _partition_lines(system: System) -> Iterable[str]:
    from pytest_mlhpc.system.quantities import format_size

    for part in system.partitions:
        nodes = part.nodes
        devices = f", {nodes.devices} x {nodes.device_model or part.accelerator}" if nodes.devices else ""
        yield f"  {part.id}: scheduler {part.scheduler}, launcher {part.launcher}, accelerator {part.accelerator}"
        yield f"    nodes: {nodes.cores} cores, {format_size(nodes.memory)}{devices}, at most {nodes.max} a job"
        yield (
            f"    preset {part.preset}, time limit {part.time_limit_s:g} s, {part.max_jobs} jobs queued"
            + (f", budget {part.budget}" if part.budget else "")
            + (f", features {', '.join(sorted(part.features))}" if part.features else "")
        )
        if part.scheduler_options:
            yield f"    {part.scheduler}: {json.dumps(_said(part.scheduler_options), default=str)}"
        for environment in part.environments:
            yield f"    environment {environment.name}: {environment.python}"
            if environment.modules:
                yield f"      modules {' '.join(environment.modules)}"
            for name, value in environment.variables.items():
                yield f"      {name}={value}"
            for name, value in environment.extra.items():
                text = str(value).rstrip("\n").replace("\n", "\n        ")
                yield f"      {name} {text}"


def _said(value: Any) -> Any:
    """Return *value* without what says nothing."""
    if isinstance(value, Mapping):
        inner = {key: _said(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one not in (None, [], {}, "")}
    return [_said(one) for one in value] if isinstance(value, list) else value


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
