"""Baseline files are read strictly: every problem with file, line and key; nothing is guessed, nothing is executed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import ConfigError, Problem, StoreError, nearest
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.judge.rendering import END, FIELDS, HEAD, HEADER, IDENTITY, BaselineFile
from pytest_mlhpc.node.protocol.schema import BETTER, SCHEMA, UNITS
from pytest_mlhpc.store.record import SeriesKey
from pytest_mlhpc.store.text import nanoseconds

#: A larger file is refused: ten thousand series take about 8 MB.
MAX_BYTES = 32 << 20
#: Levels of values within values: the composer in C ends the process at some ten thousand of them.
_MOST_LEVELS = 40
#: Problems that are listed; the rest is counted.
_MOST_PROBLEMS = 20

#: Tags that plain and quoted scalars get by themselves; their text is what counts here.
_TAGS = frozenset({"str", "int", "float", "null", "bool", "timestamp", "merge", "value"})
_FLOATS = frozenset({"value", "tolerance", "spread", "calibration"})
_INTS = frozenset({"runs"})
_NEEDED = ("value", "unit", "better", "tolerance", "definition")


def read(path: Path, system: str, *, comments: bool = False) -> BaselineFile | None:
    """Return what *path* holds, None where there is no such file; *comments* only when asked, they take time to find.

    An empty *system* takes the file of any.

    Raises:
        ConfigError: it is damaged, or of another schema, or another system's.
        StoreError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError([Problem(str(path), "", "is not a file")])
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return parse(data, str(path), system, comments=comments)


def parse(data: bytes, name: str, system: str, *, comments: bool = False) -> BaselineFile:
    """Like :func:`read`, of the content of a file called *name*."""
    import yaml

    if len(data) > MAX_BYTES:
        raise ConfigError([Problem(name, "", f"is longer than {MAX_BYTES:,} bytes")])
    try:
        text = data.decode("utf-8")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        if _too_deep(text, loader):
            raise ConfigError([Problem(name, "", f"is nested deeper than {_MOST_LEVELS} levels")])
        root = yaml.compose(text, loader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(f"{name}:{line}", "", "is not UTF-8")]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError([Problem(where, "", f"is not YAML: {what}")]) from None
    reader = _Reader(name, system)
    reader.root(root)
    if reader.problems:
        more = len(reader.problems) - _MOST_PROBLEMS
        listed = reader.problems[:_MOST_PROBLEMS]
        if more > 0:
            listed.append(Problem(name, "", f"and {more} more problems"))
        raise ConfigError(listed)
    return BaselineFile(reader.system, reader.entries, reader.comments(text) if comments else {})


def _too_deep(text: str, loader: Any) -> bool:
    import yaml

    level = 0
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1
        if level > _MOST_LEVELS:
            return True
    return False


class _Reader:
    """Walks the composed nodes, strictly by the expected shape, and collects entries and problems."""

    def __init__(self, name: str, system: str) -> None:
        self._name = name
        self.system = system
        self.problems: list[Problem] = []
        self.entries: dict[SeriesKey, Entry] = {}
        self._seen: set[int] = set()
        self._lines: dict[str, int] = {}  #: path of a key -> its line, from 0
        self._spans: list[
            tuple[int, int, tuple[str, ...]]
        ] = []  #: first line, end line, what a comment belongs to

    def root(self, node: Any) -> None:
        if node is None:
            self._problem(None, "", "is empty; remove it, or restore it from git")
            return
        parts = self._mapping(node, "", {"schema", "system", "series"})
        if not self._schema(parts, node):
            return
        found = self._text(parts["system"], "system") if "system" in parts else ""
        if not self.system:
            self.system = found
        if found != self.system or not found:
            self._problem(parts.get("system", node), "system", f"is {found!r} in the file of {self.system!r}")
        series = parts.get("series")
        if series is None:
            self._problem(node, "series", "is missing")
        elif series.id != "sequence":
            self._problem(series, "series", "must be a list")
        else:
            self._spans.append((0, self._lines["series"], HEAD))
            for number, item in enumerate(series.value):
                self._series(item, f"series[{number}]")

    def _schema(self, parts: Mapping[str, Any], node: Any) -> bool:
        text = self._text(parts["schema"], "schema") if "schema" in parts else ""
        if not re.fullmatch(r"[0-9]{1,9}", text):
            self._problem(parts.get("schema", node), "schema", f"must be a whole number, found {text!r}")
            return not self.problems
        if int(text) != SCHEMA:
            age, edge = ("newer", "newest") if int(text) > SCHEMA else ("older", "oldest")
            message = f"{text} is {age} than {SCHEMA}, the {edge} this version reads"
            self._problem(parts["schema"], "schema", message)
            return False
        return True

    def _series(self, node: Any, where: str) -> None:
        parts = self._mapping(node, where, {*IDENTITY, "metrics"})
        names = [self._text(parts[name], f"{where}.{name}") if name in parts else "" for name in IDENTITY]
        missing = [name for name in (*IDENTITY[:-1], "metrics") if name not in parts]
        if missing:
            self._problem(node, where, f"{', '.join(missing)} missing")
            return
        identity = dict(zip(IDENTITY, names, strict=True))
        first, start = node.start_mark.line, parts["metrics"].start_mark.line
        self._spans.append((first, start, (*names, "")))
        metrics = self._mapping(parts["metrics"], f"{where}.metrics", None)
        for metric, value in metrics.items():
            key = SeriesKey(system=self.system, metric=metric, **identity)
            entry = self._entry(value, f"{where}.metrics.{metric}")
            if key in self.entries:
                self._problem(value, f"{where}.metrics.{metric}", "this series has an entry above already")
            elif entry is not None:
                self.entries[key] = entry
                self._spans.append(
                    (self._lines[f"{where}.metrics.{metric}"], _end_line(value), (*names, metric))
                )

    def _entry(self, node: Any, where: str) -> Entry | None:
        before = len(self.problems)
        parts = self._mapping(node, where, set(FIELDS))
        missing = [name for name in _NEEDED if name not in parts]
        if missing:
            self._problem(node, where, f"{', '.join(missing)} missing")
        values: dict[str, Any] = {}
        for name, value in parts.items():
            values[name] = self._value(name, value, f"{where}.{name}")
        if len(self.problems) > before:
            return None
        try:
            return Entry(**values)
        except ValueError as error:
            self._problem(node, where, str(error))
            return None

    def _value(self, name: str, node: Any, where: str) -> Any:
        text = self._text(node, where)
        if name in _FLOATS or name in _INTS:
            try:
                return float(text) if name in _FLOATS else int(text)
            except ValueError:
                self._problem(node, where, f"must be a number, found {text[:60]!r}")
                return None
        choices = {"unit": UNITS, "better": BETTER[:2]}.get(name)
        if choices and text not in choices:
            self._problem(
                node, where, f"{text[:60]!r} is not one of {', '.join(choices)}", nearest(text, choices)
            )
        if name == "date" and text:
            try:
                nanoseconds(text)
            except (ValueError, OverflowError):
                self._problem(node, where, f"{text[:60]!r} is no date (ISO 8601)")
        return text

    def _mapping(self, node: Any, where: str, allowed: set[str] | None) -> dict[str, Any]:
        """Return key -> node; unknown and duplicate keys, aliases and other kinds of node become problems."""
        if node.id != "mapping":
            self._problem(node, where, "must be a mapping")
            return {}
        if id(node) in self._seen:
            self._problem(node, where, "aliases are not allowed here")
            return {}
        self._seen.add(id(node))
        found: dict[str, Any] = {}
        for key_node, value in node.value:
            key = self._text(key_node, where)
            path = f"{where}.{key}".lstrip(".")
            if key in found:
                self._problem(key_node, path, f"is here twice, first on line {self._lines[path] + 1}")
            elif allowed is not None and key not in allowed:
                self._problem(key_node, path, "is not known", nearest(key, allowed))
            else:
                found[key], self._lines[path] = value, key_node.start_mark.line
        return found

    def _text(self, node: Any, where: str) -> str:
        if node.id != "scalar":
            self._problem(node, where, "must be a single value")
            return ""
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            self._problem(node, where, f"tag {node.tag!r} is not allowed")
        return str(node.value)

    def _problem(self, node: Any, key: str, message: str, suggestion: str = "") -> None:
        where = f"{self._name}:{node.start_mark.line + 1}" if node is not None else self._name
        self.problems.append(Problem(where, key, message, suggestion))

    def comments(self, text: str) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Return the user's comments by what they belong to: the next series or metric, or the one they stand in."""
        found: dict[tuple[str, ...], list[str]] = {}
        ours = set(HEADER.splitlines())
        for line, comment in _comment_lines(text):
            if comment in ours:
                continue
            owner = next(
                (what for first, end, what in sorted(self._spans) if line < max(end, first + 1)), END
            )
            found.setdefault(owner, []).append(comment)
        return {owner: tuple(lines) for owner, lines in found.items()}


def _end_line(mapping: Any) -> int:
    """Return the line after the last value; a block mapping's own end mark lies behind the comments that follow it."""
    ends = [value.end_mark for _key, value in mapping.value]
    return int(max((end.line + (end.column > 0) for end in ends), default=mapping.end_mark.line))


def _comment_lines(text: str) -> list[tuple[int, str]]:
    """Return (line, comment) of all comments: what is left of a line behind its last token, if it starts with #."""
    import yaml

    if not re.search(r"(^|\s)#", text):
        return []
    lines = text.split("\n")
    ends = [0] * len(lines)
    for token in yaml.scan(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        start, end = token.start_mark, token.end_mark
        for line in range(start.line, min(end.line, len(lines))):
            ends[line] = len(lines[line])
        if end.line < len(lines):
            ends[end.line] = max(ends[end.line], end.column)
    rests = ((number, lines[number][column:].strip()) for number, column in enumerate(ends))
    return [(number, rest) for number, rest in rests if rest.startswith("#")]
