"""``mlhpc systems``: list, show and check systems.yaml, add known systems to it, and its schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NounGroup
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.text import aligned, count

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Environment, Partition, System
    from pytest_mlhpc.config.systems import Systems
    from pytest_mlhpc.config.yaml import YamlNode
    from pytest_mlhpc.hookspecs import Preview


@click.group(
    cls=NounGroup,
    help="The systems of systems.yaml: what they are, what became of them, and whether the file is right.",
    example="mlhpc systems check",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    "list", cls=DataCommand, help="List all systems with their partitions.", example="mlhpc systems list"
)
@click.option(
    "--known", is_flag=True, help="Those that this package describes; `add` copies one to systems.yaml."
)
@options.systems_file
def list_(known: bool, systems_file: str | None) -> CommandReport:
    """Return a line for each system."""
    from pytest_mlhpc.config.systems_files import KNOWN

    rows = _rows(options.chosen_systems(str(KNOWN) if known else systems_file))
    lines = []
    for row in rows:
        archived = " (archived)" if row["status"] == "archived" else ""
        rest = f"{', '.join(row['partitions'])}{archived}  {row['description']}"
        lines.append(([row["name"]], [rest]))
    return CommandReport("".join(f"{line}\n" for line in aligned(lines)), {"systems": rows})


@command.command(
    cls=DataCommand,
    help="Show what a system became, with all that was filled in.",
    example="mlhpc systems show cirrus",
)
@click.argument("name")
@options.systems_file
def show(name: str, systems_file: str | None) -> CommandReport:
    """Return all of one system."""
    system, idle = options.chosen_systems(systems_file).system(name, display=True)
    data = json.loads(json.dumps({**asdict(system), "not_live": dict(idle)}, default=sorted))
    return CommandReport("".join(f"{line}\n" for line in _system_lines(system, idle)), {"system": data})


@command.command(
    cls=DataCommand,
    help="Name every problem of a systems file, and what its schedulers would be given. Exit code 2 if there is one.",
    example="mlhpc systems check --render cirrus:standard",
)
@click.argument("systems_file", metavar="[FILE]", required=False)
@click.option(
    "--render", metavar="NAME[:PARTITION]", help="Print the job scripts or manifests of its partitions."
)
@click.option(
    "--output",
    type=Path,
    metavar="DIR",
    help="Write job scripts and manifests there, of all systems or of --render.",
)
def check(systems_file: str | None, render: str | None, output: Path | None) -> CommandReport:
    """Load the file and render all that schedulers are given."""
    from pytest_mlhpc.builtin import make_manager

    hook = make_manager().hook
    return _check(options.chosen_systems(systems_file, hook), hook, render, output)


@command.command(
    cls=DataCommand,
    help="Add a system that this package describes to systems.yaml, which is made where there is none.",
    example="mlhpc systems add archer2",
)
@click.argument("name")
@options.systems_file
def add(name: str, systems_file: str | None) -> CommandReport:
    """Copy its entry, and name what must be set before it is used."""
    from pytest_mlhpc.config.systems_files import add_system

    path = Path(systems_file or "systems.yaml")
    variables = add_system(path, name)
    lines = [f"{path}: added {name}; its comments say what to check on the machine"]
    if variables:
        lines.append(f"to set before it is used; ask the site where you do not know: {', '.join(variables)}")
    lines.append(f"next: mlhpc systems check --render {name}")
    data = {"file": str(path), "system": name, "variables": variables}
    return CommandReport("".join(f"{line}\n" for line in lines), data)


@command.command(
    help="Print the JSON Schema of systems.yaml, for editors.",
    example="mlhpc systems schema --output systems.schema.json",
)
@click.option("--output", type=Path, metavar="FILE", help="Write it there; the file is replaced whole.")
def schema(output: Path | None) -> None:
    """Print or write the schema."""
    from pytest_mlhpc.config.schema import json_schema
    from pytest_mlhpc.store.locations import replace_file

    if output is None:
        sys.stdout.write(json_schema())
    else:
        replace_file(output, json_schema())


def _check(systems: Systems, hook: Any, name: str | None, folder: Path | None) -> CommandReport:
    """Render all that schedulers are given (or that of *name*), and say so, return it, or write it to *folder*."""
    from pytest_mlhpc.config.systems_files import BUILT_IN

    shown = previews(systems, hook, name or "")
    data: dict[str, Any] = {
        "file": str(systems.path),
        "systems": list(systems.entries),
        "rendered": {place: preview.text for place, preview in shown.found.items()},
    }
    if folder is not None:
        _write(folder, shown.found)
    elif name is not None:
        texts = [
            f"##### {place}\n{preview.text}" if len(shown.found) > 1 else preview.text.rstrip("\n")
            for place, preview in shown.found.items()
        ]
        return CommandReport("".join(f"{text}\n" for text in texts), {**data, "notes": list(shown.notes)})
    missing: dict[str, list[str]] = {}
    for problem in systems.missing_variables():
        # The project's own test cluster sets these itself.
        if "variable MLHPC_TEST_" not in problem.message:
            missing.setdefault(problem.message, []).append(str(problem))
    notes = [
        places[0] + (f" (needed in {len(places)} places)" if len(places) > 1 else "")
        for places in missing.values()
    ]
    notes += shown.notes
    text = f", {shown.counted()}" if shown.found else ""
    last = f"{systems.path}: {count(len(systems.entries), 'system')}{text}, no problem"
    if systems.path == BUILT_IN:
        last = "there is no systems.yaml here, only `local`; `mlhpc init` writes one, `mlhpc systems add NAME` adds a known system"
    lines = [*(f"note: {note}" for note in notes), last]
    return CommandReport("".join(f"{line}\n" for line in lines), {**data, "notes": notes})


def _write(folder: Path, previews: Mapping[str, Preview]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, preview in previews.items():
            (folder / f"{name}.{preview.suffix}").write_text(preview.text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from error


def _rows(systems: Systems) -> list[dict[str, Any]]:
    return [
        {
            "name": entry.name,
            "status": "archived" if entry.archived else "live",
            "as_of": entry.text("as_of"),
            "description": entry.text("description"),
            "partitions": list(entry.partitions),
        }
        for entry in systems.known.values()
    ]


def _system_lines(system: System, idle: Mapping[str, str]) -> Iterator[str]:
    yield f"{system.name}: {system.description or 'no description'}"
    as_of = f", facts as of {system.as_of}" if system.as_of else ""
    yield f"  {system.status}{as_of}, from {system.source}"
    yield from _partition_lines(system)
    for partition, reason in idle.items():
        yield f"  {system.name}:{partition}: not live here: {reason}"
    for dataset in system.datasets.values():
        yield f"  data {dataset.name}: {dataset.kind}, {dataset.path}"


def _partition_lines(system: System) -> Iterable[str]:
    from pytest_mlhpc.config.quantities import format_size

    for part in system.partitions:
        nodes = part.nodes
        devices = f", {nodes.devices} x {nodes.device_model or part.accelerator}" if nodes.devices else ""
        yield f"  {part.id}: scheduler {part.scheduler}, launcher {part.launcher}, accelerator {part.accelerator}"
        yield f"    nodes: {nodes.cores} cores, {format_size(nodes.memory)}{devices}, at most {nodes.max} a job"
        yield (
            f"    preset {part.preset}, time limit {part.time_limit_s:g} s, {part.max_jobs} jobs queued"
            + (f", budget {part.budget}" if part.budget else "")
            + (f", features {', '.join(sorted(part.features))}" if part.features else "")
            + (f", losses from {100 * part.matters:.3g} % on fail a test" if part.matters else "")
            + (f", owner {part.owner}" if part.owner else "")
        )
        if part.scheduler_options:
            yield f"    {part.scheduler}: {json.dumps(_without_empty(part.scheduler_options), default=str)}"
        for environment in part.environments:
            yield f"    environment {environment.name}: {environment.python}"
            if environment.modules:
                yield f"      modules {' '.join(environment.modules)}"
            for name, value in environment.variables.items():
                yield f"      {name}={value}"
            for name, value in environment.extra.items():
                text = str(value).rstrip("\n").replace("\n", "\n        ")
                yield f"      {name} {text}"


def _without_empty(value: Any) -> Any:
    """Return *value* without what says nothing."""
    if isinstance(value, Mapping):
        inner = {key: _without_empty(one) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one not in (None, [], {}, "")}
    return [_without_empty(one) for one in value] if isinstance(value, list) else value


#: What a file of these kinds is called.
_NAMES: Final = {"sh": "job script", "yaml": "manifest"}


@dataclass(frozen=True)
class Previews:
    """``system.partition.environment`` -> what its scheduler would be given; and why a partition was left out."""

    found: Mapping[str, Preview]
    notes: tuple[str, ...] = ()

    def counted(self) -> str:
        """Return how many there are of each kind: ``6 job scripts, 2 manifests``; empty if there are none."""
        suffixes = [preview.suffix for preview in self.found.values()]
        return ", ".join(
            count(suffixes.count(suffix), _NAMES.get(suffix, f".{suffix} file"))
            for suffix in sorted(set(suffixes))
        )


def previews(systems: Systems, hook: Any, name: str = "") -> Previews:
    """Return the previews of all partitions, or of *name* (``NAME[:PARTITION]``), by *hook*'s ``mlhpc_preview``.

    A variable that is not set stays in the text as ``${NAME}``.

    Raises:
        UsageError: there is no such system or partition, nothing is shown of it, or a preview cannot be made.
    """
    from pytest_mlhpc.config.build import LOCAL
    from pytest_mlhpc.config.systems_files import scheduler_of

    system, _, wanted = name.partition(":")
    if system and system not in systems.known:
        systems.system(system)  # raises, with the nearest name
    found: dict[str, Preview] = {}
    notes: list[str] = []
    for entry in systems.entries.values():
        scheduled = {key for key, node in entry.partitions.items() if scheduler_of(node) != LOCAL}
        if not scheduled or system not in {"", entry.name}:
            continue
        built, left_out = systems.system(entry.name, display=True)
        notes += [
            f"{entry.name}:{key}: not rendered: {left_out[key]}"
            for key in sorted(scheduled & left_out.keys())
        ]
        for partition in built.partitions:
            if partition.name not in scheduled or wanted not in {"", partition.name}:
                continue
            for environment in partition.environments:
                shown = _shown(hook, entry.partitions[partition.name], partition, environment)
                if shown is not None:
                    found[f"{entry.name}.{partition.name}.{environment.name}"] = shown
    if name and not found:
        raise UsageError("; ".join([f"{systems.path}: {name!r} has no partition to render", *notes]))
    return Previews(found, tuple(notes))


def _shown(hook: Any, node: YamlNode, partition: Partition, environment: Environment) -> Preview | None:
    try:
        shown: Preview | None = hook.mlhpc_preview(partition=partition, environment=environment)
    except UsageError as error:
        raise UsageError(f"{node.where}: {node.key}: {error}") from error
    return shown
