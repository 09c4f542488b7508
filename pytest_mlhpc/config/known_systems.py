"""Systems that this package describes, and how one of them is copied into a systems.yaml: ``mlhpc systems add NAME``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Final

import yaml

from pytest_mlhpc.config.files import BUILT_IN
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.store.wholefile import replace_file

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
        hint = nearest(name, known_names())
        meant = f" (did you mean {hint!r}?)" if hint else ""
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
