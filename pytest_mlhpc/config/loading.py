"""systems.yaml becomes :class:`Systems`, of which ``--system`` selects the targets that tests run on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.build import (
    Findings,
    Words,
    check_partition,
    put_variables,
    sorted_problems,
    split_options,
)
from pytest_mlhpc.config.files import BUILT_IN, Tree, find_systems_file, read_tree
from pytest_mlhpc.config.schema import SystemsFile
from pytest_mlhpc.config.selection import Entry, Systems
from pytest_mlhpc.config.validation import validate
from pytest_mlhpc.config.yaml_reader import Node
from pytest_mlhpc.errors import ConfigError, Problem

__all__ = ["Systems", "find_systems_file", "load_systems"]


def load_systems(
    path: Path,
    *,
    schedulers: Mapping[str, type[Any] | None],
    environ: Mapping[str, str],
    launchers: Collection[str] | None = None,
    state_dir: Path | None = None,
) -> Systems:
    """Read and validate *path* and all that it includes.

    *schedulers* is what the hook ``mlhpc_schedulers`` returned, all answers in one mapping; *launchers* are the names of
    ``mlhpc_launchers`` if they are to be checked. *state_dir* keeps which accelerators were found since boot; without
    one it is found out each time. Variables are looked up in *environ* only when a partition is selected.

    ``local`` is always there: the built-in one, where no file has its own.

    Raises:
        ConfigError: with every problem of all files; nothing was written or started.
    """
    words = Words(schedulers, launchers)
    tree = read_tree(path, schedulers)
    problems = list(tree.problems)
    for file in tree.files:
        systems = file.get("systems")
        if systems is not None and isinstance(systems.value, dict):
            own = {key: child for key, child in file.items() if key != "systems"}
            file = Node(own, file.where, file.key)  # noqa: PLW2901 - its systems follow below, with their defaults
        problems.extend(validate(SystemsFile, file)[1])
    if tree.files and not tree.systems and not problems:
        problems.append(Problem(str(path), "systems", "no system is defined"))
    entries = _entries(tree)
    for entry in entries.values():
        problems.extend(_problems_of(entry, words))
    if problems:
        raise ConfigError(sorted_problems(problems))
    others = _entries(read_tree(BUILT_IN, schedulers))
    built_in = {name: entry for name, entry in others.items() if name not in entries}
    return Systems(path, entries, words, environ, state_dir, built_in=built_in)


def _entries(tree: Tree) -> dict[str, Entry]:
    return {
        name: Entry(name, node, node.key, Path(tree.sources[name])) for name, node in tree.systems.items()
    }


def _problems_of(entry: Entry, words: Words) -> list[Problem]:
    """Return what is wrong with a system whatever its variables will be."""
    findings = Findings()
    node = put_variables(entry.node, {}, findings)
    partitions = node.get("partitions")
    stripped = node
    if partitions is not None and isinstance(partitions.value, dict):
        bare = {key: split_options(part, words)[0] for key, part in partitions.items()}
        stripped = Node(
            {**node.value, "partitions": Node(bare, partitions.where, partitions.key)}, node.where, node.key
        )
    root = Node({"systems": Node({entry.name: stripped}, node.where, "systems")}, node.where)
    findings.problems.extend(validate(SystemsFile, root, extra_words=words.schedulers, lenient=True)[1])
    for _, part in partitions.items() if partitions is not None else ():
        check_partition(part, words, findings, archived=entry.archived, lenient=True)
    return findings.problems
