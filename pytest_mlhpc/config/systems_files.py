"""Where systems.yaml is found, how it becomes one tree with the files it includes, and how a known system is copied into it."""

from __future__ import annotations

import errno
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from pytest_mlhpc.config.yaml import YamlNode, read_file
from pytest_mlhpc.errors import ConfigError, Problem, UsageError, did_you_mean
from pytest_mlhpc.store.locations import replace_file

#: Values of all systems together, defaults written out: enough for hundreds of partitions.
MAX_EXPANDED: Final = 100_000
_MAX_FILES: Final = 50
BUILT_IN: Final = Path(__file__).with_name("builtin.yaml")


def find_systems_file(rootdir: Path, option: str | Path | None) -> Path:
    """Return *option* if given, else *rootdir*/systems.yaml, else the built-in file with just ``local``.

    Raises:
        UsageError: *option* names no file.
    """
    if option:
        path = Path(option).expanduser()
        if not _exists(path):
            raise UsageError(f"systems file {str(path)[:500]!r}: there is no such file")
        return path
    path = rootdir / "systems.yaml"
    return path if _exists(path) else BUILT_IN


def _exists(path: Path) -> bool:
    """Say whether *path* is there, readable or not; a name that no file can have is not."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        return error.errno not in {errno.ENAMETOOLONG, errno.ELOOP}
    return True


@dataclass
class Tree:
    """All files as read: each file's own top level, and its systems with the defaults merged in."""

    files: list[YamlNode] = field(default_factory=list)
    systems: dict[str, YamlNode] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  #: system -> file
    problems: list[Problem] = field(default_factory=list)


def read_tree(path: Path, schedulers: Collection[str]) -> Tree:
    """Read *path* and all that it includes.

    A key with the name of a scheduler holds that scheduler's options; of those in ``defaults:`` a partition gets its
    own scheduler's only. ``owner``, ``maintenance`` and ``transport`` of a system are defaults of its partitions. Nothing is validated here but includes, and systems that are defined twice.
    """
    tree = Tree()
    reader = _Reader(tree)
    reader.read(path, YamlNode({}, ""), ())
    used = {scheduler_of(part) for system, _, _ in reader.found.values() for part in _partitions(system)}
    foreign = frozenset(schedulers) | used
    expanded = 0
    for name, (system, defaults, source) in reader.found.items():
        partitions = system.get("partitions")
        defaults = _with_system_keys(system, defaults)  # noqa: PLW2901 - the same, completed
        # Counted before it is written out: at least as many as there will be.
        expanded += system.size + len(_partitions(system)) * defaults.size
        if expanded > MAX_EXPANDED:
            message = f"more than {MAX_EXPANDED:,} values with defaults written out"
            tree.problems.append(Problem(system.where, system.key, message))
            break
        if partitions is not None and isinstance(partitions.value, dict):
            full = {key: _with_defaults(part, defaults, foreign) for key, part in partitions.items()}
            system = _replace(system, {"partitions": _replace(partitions, full)})  # noqa: PLW2901 - the same, completed
        tree.systems[name] = system
        tree.sources[name] = source
    return tree


@dataclass
class _Reader:
    tree: Tree
    #: system -> node, defaults, file
    found: dict[str, tuple[YamlNode, YamlNode, str]] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)

    def read(self, path: Path, defaults: YamlNode, chain: tuple[Path, ...]) -> None:
        try:
            root = read_file(path)
        except ConfigError as error:
            self.tree.problems.extend(error.problems)
            return
        self.tree.files.append(root)
        own = root.get("defaults")
        merged = merge(own, defaults) if own is not None else defaults
        systems = root.get("systems")
        for name, system in systems.items() if systems is not None else ():
            if name in self.found:
                message = f"the system {name!r} is also defined at {self.found[name][0].where}"
                self.tree.problems.append(Problem(system.where, system.key, message))
            else:
                self.found[name] = (system, merged, str(path))
        include = root.get("include")
        if include is None or not isinstance(include.value, list):
            return
        chain = (*chain, path.resolve())
        for item in include.value:
            self.include(item, path, merged, chain)

    def include(self, item: YamlNode, parent: Path, defaults: YamlNode, chain: tuple[Path, ...]) -> None:
        if not isinstance(item.value, str) or not item.value:
            return  # the schema says so
        path = parent.parent / item.value
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:  # a circle of symbolic links
            self.tree.problems.append(Problem(item.where, item.key, f"cannot be found: {error}"))
            return
        if real in chain:
            loop = " -> ".join(part.name for part in (*chain[chain.index(real) :], real))
            self.tree.problems.append(Problem(item.where, item.key, f"includes go round in a circle: {loop}"))
        elif real in self.texts:
            message = f"{item.value!r} is included twice, first at {self.texts[real]}"
            self.tree.problems.append(Problem(item.where, item.key, message))
        elif len(self.texts) >= _MAX_FILES:
            self.tree.problems.append(Problem(item.where, item.key, f"more than {_MAX_FILES} included files"))
        elif not _exists(path):
            self.tree.problems.append(Problem(item.where, item.key, f"there is no file {str(path)[:500]!r}"))
        else:
            self.texts[real] = item.where
            self.read(path, defaults, chain)


def _partitions(system: YamlNode) -> list[YamlNode]:
    partitions = system.get("partitions")
    return [part for _, part in partitions.items()] if partitions is not None else []


def scheduler_of(partition: YamlNode) -> str:
    """Return the name under ``scheduler:``, empty if there is none or it is no text."""
    scheduler = partition.get("scheduler")
    return scheduler.value if scheduler is not None and isinstance(scheduler.value, str) else ""


def _with_system_keys(system: YamlNode, defaults: YamlNode) -> YamlNode:
    own = {key: child for key, child in system.items() if key in _OF_PARTITIONS}
    return merge(YamlNode(own, system.where, system.key), defaults) if own else defaults


def _with_defaults(partition: YamlNode, defaults: YamlNode, foreign: frozenset[str]) -> YamlNode:
    if not isinstance(partition.value, dict):
        return partition
    merged = merge(partition, defaults)
    inherited = foreign - set(partition.value) - {scheduler_of(merged)}
    own = {key: child for key, child in merged.items() if key not in inherited}
    return _sized(own, merged)


def merge(over: YamlNode, under: YamlNode) -> YamlNode:
    """Return *over* with what it lacks taken from *under*; mappings merge key by key, anything else replaces."""
    if not isinstance(over.value, dict) or not isinstance(under.value, dict):
        return over
    values = {
        key: merge(child, under.value[key]) if key in under.value else child
        for key, child in over.value.items()
    }
    # What is written nearer comes first: the first environment is the one that is used.
    values.update((key, child) for key, child in under.value.items() if key not in values)
    return _sized(values, over)


def _replace(node: YamlNode, children: Mapping[str, YamlNode]) -> YamlNode:
    return _sized({**node.value, **children}, node)


def _sized(values: dict[str, YamlNode], like: YamlNode) -> YamlNode:
    return YamlNode(values, like.where, like.key, 1 + sum(child.size for child in values.values()))


#: Keys of a system that are defaults of its partitions.
_OF_PARTITIONS = frozenset({"owner", "maintenance", "transport"})
#: The systems file that includes all known systems.
KNOWN: Final = Path(__file__).with_name("known.yaml")


def known_names() -> list[str]:
    """Return the names of all known systems."""
    return sorted(path.stem for path in KNOWN.with_suffix("").glob("*.yaml"))


def known_text(name: str) -> str:
    """Return the entry of the known system *name*, with its comments, as it stands below ``systems:``.

    Raises:
        UsageError: no such system is known.
    """
    if name not in known_names():
        meant = did_you_mean(name, known_names())
        raise UsageError(f"no system {name!r} is known{meant}; `mlhpc systems list --known` lists them")
    return (
        KNOWN.with_suffix("")
        .joinpath(f"{name}.yaml")
        .read_text(encoding="utf-8")
        .partition("\nsystems:\n")[2]
    )


def variables_of(entry: str) -> list[str]:
    """Return the names of the environment variables that *entry* asks for, in order, each once."""
    return list(dict.fromkeys(re.findall(r"(?<!\$)\$\{(\w+)\}", entry)))


def with_system(text: str, entry: str) -> str:
    """Return the systems file *text* with *entry* after its last system, indented as its other systems are.

    Raises:
        UsageError: *text* cannot be read, or its systems are not one below the other.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UsageError("it is no YAML; `mlhpc systems check` says where") from error
    top = {key.value: value for key, value in root.value} if isinstance(root, yaml.MappingNode) else {}
    systems = top.get("systems")
    if not isinstance(systems, yaml.MappingNode) or systems.flow_style or not systems.value:
        raise UsageError("it has no `systems:` with one system a line")
    names = {key.value: key.start_mark for key, _ in systems.value}
    (added,) = yaml.safe_load(entry)
    if added in names:
        raise UsageError(f"line {names[added].line + 1} has a system {added!r} already")
    indent = next(iter(names.values())).column
    lines = text.splitlines()
    end = systems.end_mark.line if systems.end_mark.column == 0 else systems.end_mark.line + 1
    while not lines[end - 1].strip() or re.match(rf"\s{{0,{indent - 1}}}#", lines[end - 1]):
        end -= 1  # blank lines, and comments of the key that follows
    block = textwrap.indent(textwrap.dedent(entry), " " * indent).rstrip().splitlines()
    return "\n".join([*lines[:end], "", *block, *lines[end:]]) + "\n"


def add_system(path: Path, name: str) -> list[str]:
    """Add the known system *name* to the systems file *path*; a file that is not there begins with this machine.

    Returns the environment variables that the system asks for.

    Raises:
        UsageError: the system is not known, or is there already, or the file cannot take it; nothing is written.
        StoreError: the file cannot be written.
    """
    entry = known_text(name)
    try:
        text = (path if path.exists() else BUILT_IN).read_text(encoding="utf-8")
        text = with_system(text, entry)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}; nothing was written") from error
    replace_file(path, text)
    return variables_of(entry)
