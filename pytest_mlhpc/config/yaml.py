"""A YAML reader for files that people (or enemies) wrote: keeps the line of every key, refuses what could do harm.

It takes the subset that a configuration file needs: mappings with text keys, lists, and the scalars of YAML 1.2's core
schema (https://yaml.org/spec/1.2.2/#103-core-schema), so ``off`` is a word, ``010`` a text and ``2025-01-31`` no date.
Refused, each with its line: duplicate keys, tabs as indentation, tags, merge keys, aliases that expand to more
than :data:`MAX_NODES` values, nesting deeper than :data:`MAX_DEPTH`, control characters, files over :data:`MAX_BYTES`.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import ConfigError, Problem

#: Larger files are refused before they are read. The largest sites' files have some hundred lines.
MAX_BYTES: Final = 1_000_000
#: Values in a file with all aliases written out; ten levels of ten aliases each would be 10**10.
MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 40

_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?\Z")
_WORDS: Final = {"": None, "~": None, "null": None, "true": True, "false": False}
#: C0 and C1 control characters but tab and newline, and lone surrogates: nothing that we configure may hold them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class YamlNode:
    """One value with the place it was written at.

    ``value`` is a scalar, a list of nodes, or a mapping of text to nodes. ``where`` is ``file:line`` of the key (or of
    the list item); ``key`` its dotted path in that file; ``size`` the number of values in it, aliases written out;
    ``written`` the text in which variables were put in, empty if there were none.
    """

    value: Any
    where: str
    key: str = ""
    size: int = 1
    written: str = ""

    def get(self, key: str) -> YamlNode | None:
        """Return the child called *key* if this is a mapping that has it."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def items(self) -> Iterator[tuple[str, YamlNode]]:
        """Yield the entries of a mapping, nothing for any other value."""
        if isinstance(self.value, dict):
            yield from self.value.items()

    def plain(self) -> Any:
        """Return the value as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def read_file(path: Path, top: str = "systems") -> YamlNode:
    """Return the mapping that *path* holds; *top* is the key that it should have, empty: any.

    Raises:
        ConfigError: it cannot be read or is not a mapping in our subset of YAML; names every problem found.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise _refusal(path, "is not a file")
        if info.st_size > MAX_BYTES:
            raise _refusal(
                path, f"has {info.st_size:,} bytes, more than {MAX_BYTES:,}: this is no configuration file"
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _refusal(path, f"cannot be read: {reason}") from None
    return read_bytes(data, str(path), top)


def read_bytes(data: bytes, name: str, top: str = "systems") -> YamlNode:
    """Like :func:`read_file`, of the content of a file called *name*."""
    if len(data) > MAX_BYTES:
        raise ConfigError([Problem(name, "", f"is longer than {MAX_BYTES:,} bytes")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise ConfigError([Problem(f"{name}:{line}", "", message)]) from None
    tabs = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip() and line.lstrip(" ").startswith("\t")
    ]
    if tabs:
        message = "a tab is used for indentation; YAML wants spaces"
        raise ConfigError([Problem(f"{name}:{number}", "", message) for number in tabs[:20]])
    return _parse(text, name, top)


def _refusal(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem(str(path), "", message)])


def _parse(text: str, name: str, top: str) -> YamlNode:
    import yaml

    builder = _Builder(name)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # only its parser: events, no objects
    try:
        root = builder.document(yaml.parse(text, loader))
    except _TooMuchError as error:
        builder.problems.append(error.problem)
        root = None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        said = ", ".join(part for part in (error.context, error.problem) if part)
        builder.problems.append(Problem(where, "", f"this is not YAML: {said}"))
        root = None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        builder.problems.append(Problem(name, "", f"this is not YAML: {said[:300]}"))
        root = None
    if root is not None and root.value is None and not builder.problems:
        builder.problems.append(
            Problem(name, "", f"is empty; it should have `{top}:`" if top else "is empty")
        )
    elif root is not None and not isinstance(root.value, dict):
        wanted = f"a mapping with the key `{top}`" if top else "a mapping"
        builder.problems.append(Problem(root.where, "", f"should be {wanted}"))
    if builder.problems or root is None:
        raise ConfigError(builder.problems)
    return root


class _TooMuchError(Exception):
    """Reading must stop here: going on would cost time or memory without bound."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass
class _Builder:
    """Builds nodes from the parser's events, so that nothing is expanded before it was counted."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, YamlNode | None] = field(default_factory=dict)  #: None: still being built
    count: int = 0

    def document(self, events: Iterator[Any]) -> YamlNode:
        import yaml

        root: YamlNode | None = None
        for event in events:
            if isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                continue
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.problem(event, "", "a second document starts here; one file holds one document")
                    break
                continue
            root = self.node(event, events, "", 0)
        return root if root is not None else YamlNode(None, f"{self.name}:1")

    def node(self, event: Any, events: Iterator[Any], key: str, depth: int, where: str = "") -> YamlNode:
        import yaml

        where = where or self.where(event)
        if depth > MAX_DEPTH:
            raise _TooMuchError(Problem(where, key[:200], f"is nested deeper than {MAX_DEPTH} levels"))
        if isinstance(event, yaml.AliasEvent):
            node = self.alias(event, where, key)
            self.add(node.size, where, key)
            return node
        self.add(1, where, key)
        if event.anchor:
            self.anchors[event.anchor] = None
        self.check_tag(event, where, key)
        if isinstance(event, yaml.ScalarEvent):
            node = YamlNode(self.scalar(event, where, key), where, key)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(events, where, key, depth)
        else:
            node = self.mapping(events, where, key, depth)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def sequence(self, events: Iterator[Any], where: str, key: str, depth: int) -> YamlNode:
        import yaml

        values: list[YamlNode] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            values.append(self.node(event, events, f"{key}[{len(values)}]", depth + 1))
        return YamlNode(values, where, key, 1 + sum(node.size for node in values))

    def mapping(self, events: Iterator[Any], where: str, key: str, depth: int) -> YamlNode:
        import yaml

        values: dict[str, YamlNode] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            name, line = self.key(event, events, key, depth)
            path = f"{key}.{name}" if key else name
            node = self.node(next(events), events, path, depth + 1, line)
            if name in values:
                first = values[name].where.rpartition(":")[2]
                self.problems.append(Problem(line, path, f"is given twice, first in line {first}"))
                continue
            values[name] = node
        return YamlNode(values, where, key, 1 + sum(node.size for node in values.values()))

    def key(self, event: Any, events: Iterator[Any], parent: str, depth: int) -> tuple[str, str]:
        import yaml

        line = self.where(event)
        if not isinstance(event, yaml.ScalarEvent):
            self.problem(event, parent, "a key should be a plain word")
            self.node(event, events, parent, depth + 1)  # reads past it, within the same limits
            return "?", line
        self.add(1, line, parent)
        self.check_tag(event, line, parent)
        name = str(event.value)
        if event.anchor:
            self.anchors[event.anchor] = YamlNode(name, line, parent)
        if name == "<<" and event.implicit[0]:
            self.problem(
                event, parent, "merge keys (<<) are not supported; put what is shared under `defaults:`"
            )
        elif _CONTROL.search(name) or "\n" in name or "\t" in name:
            self.problem(event, parent, f"the key {name[:60]!r} holds a control character")
        return name, line

    def scalar(self, event: Any, where: str, key: str) -> Any:
        text = str(event.value)
        if bad := _CONTROL.search(text):
            self.problems.append(Problem(where, key, f"holds the control character {bad.group()!r}"))
        if not event.implicit[0]:  # quoted or a block: text, whatever its form
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.match(text):
            return int(text)
        return float(text) if _FLOAT.match(text) else text

    def alias(self, event: Any, where: str, key: str) -> YamlNode:
        if event.anchor not in self.anchors:
            self.problem(event, key, f"*{event.anchor} refers to nothing; there is no &{event.anchor} above")
            return YamlNode(None, where, key)
        node = self.anchors[event.anchor]
        if node is None:
            raise _TooMuchError(Problem(where, key, f"*{event.anchor} refers to a value that contains it"))
        return YamlNode(node.value, where, key, node.size)

    def check_tag(self, event: Any, where: str, key: str) -> None:
        if event.tag is not None:
            message = (
                f"the tag {str(event.tag)[:80]!r} is refused: tags may run code, and nothing here needs one"
            )
            self.problems.append(Problem(where, key, message))

    def add(self, size: int, where: str, key: str) -> None:
        self.count += size
        if self.count > MAX_NODES:
            message = f"the file has more than {MAX_NODES:,} values with its aliases written out"
            raise _TooMuchError(Problem(where, key[:200], message))

    def where(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}"

    def problem(self, event: Any, key: str, message: str) -> None:
        self.problems.append(Problem(self.where(event), key, message))
