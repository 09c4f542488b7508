"""Accepted values and the files that hold them: read strictly, with file, line and key of every problem, and written sorted, with the comments of users."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import ConfigError, Problem, StoreError, nearest
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.protocol.schema import BETTER, SCHEMA, UNITS
from pytest_mlhpc.store.locations import open_regular
from pytest_mlhpc.store.record import Epoch, SeriesKey
from pytest_mlhpc.store.text import nanoseconds

#: Width of the fence before there are enough records (the design page's figures; fractions of the baseline).
TOLERANCE = 0.05
LOCAL_TOLERANCE = 0.10


@dataclass(frozen=True)
class Entry:
    """The baseline of one series.

    ``spread`` is the robust relative deviation of the ``runs`` values behind ``value`` (their median), None for one
    run. ``date`` is when it was accepted (ISO 8601, UTC); history before it belongs to an earlier baseline epoch.
    ``definition`` and ``device_model`` are those of the runs; another run's figure is not judged by this one.
    ``environment`` is the digest of the software environment, ``calibration`` the rate of the calibration kernel at
    that time (1/s), on `local` only.
    """

    value: float
    unit: str
    better: str
    tolerance: float
    definition: str
    device_model: str = ""
    spread: float | None = None
    runs: int = 1
    accepted_by: str = ""
    reason: str = ""
    date: str = ""
    environment: str = ""
    calibration: float | None = None

    def __post_init__(self) -> None:
        """Refuse figures that nothing can be compared with."""
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"value must be a positive number, found {self.value}")
        if not (math.isfinite(self.tolerance) and 0 < self.tolerance < 1):
            raise ValueError(f"tolerance must lie between 0 and 1, found {self.tolerance}")
        if self.better not in {"higher", "lower"}:
            raise ValueError(f"better must be higher or lower, found {self.better!r}")
        if self.runs < 1:
            raise ValueError("runs start at 1")
        if not self.definition:
            raise ValueError("definition must say what was computed")
        for name, figure in (("spread", self.spread), ("calibration", self.calibration)):
            if figure is not None and not (math.isfinite(figure) and figure >= 0):
                raise ValueError(f"{name} must be a number that is not negative, found {figure}")

    @property
    def epoch(self) -> Epoch:
        """Whose figures it may judge."""
        return Epoch(self.definition, self.device_model)


def series_of(spec: JobSpec, metric: str) -> SeriesKey:
    """Return the series of *metric* of *spec*."""
    target = spec.target
    return SeriesKey(
        system=target.partition.system,
        partition=target.partition.name,
        environment=target.environment.name,
        fingerprint=target.fingerprint,
        benchmark=spec.benchmark,
        metric=metric,
    )


#: Parts of a run's environment that say where, of which commit and by a rank started how, not which software.
PLACE = frozenset({"host", "commit", "commit_changed", "interpreter"})


def environment_digest(environment: Mapping[str, str]) -> str:
    """Return a short digest of a software environment; the same on another node and for another commit."""
    software = {name: value for name, value in environment.items() if name not in PLACE}
    return hashlib.sha256(json.dumps(software, sort_keys=True).encode()).hexdigest()[:16]


#: What comments at the head and the end of a file belong to.
HEAD, END = ("head",), ("end",)
#: Keys of a series, in the order in which they are sorted and written; the last one on `local` only.
IDENTITY = ("benchmark", "partition", "environment", "fingerprint")
#: Fields of an entry, in the order in which they are written.
FIELDS = tuple(one.name for one in dataclasses.fields(Entry))

HEADER = (
    "# Accepted values, one entry for each series. Reviewed in git, written by `mlhpc baseline accept` and\n"
    "# `pytest --mlhpc-baseline=update`; comments of yours above a series or a metric are kept.\n"
)


@dataclass(frozen=True)
class BaselineFile:
    """What one file holds. ``comments`` maps a series (identity, '') or a metric (identity, name) to its lines."""

    system: str
    entries: Mapping[SeriesKey, Entry]
    comments: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)


def render(content: BaselineFile) -> str:
    """Return the text of a file: sorted, one field a line."""
    head = content.comments.get(HEAD, ())
    lines = [
        *HEADER.splitlines(),
        *head,
        f"schema: {SCHEMA}",
        f"system: {_scalar(content.system)}",
        "series:",
    ]
    grouped: dict[tuple[str, ...], dict[str, Entry]] = {}
    for key, entry in content.entries.items():
        identity = tuple(getattr(key, name) for name in IDENTITY)
        grouped.setdefault(identity, {})[key.metric] = entry
    if not grouped:
        lines[-1] += " []"
    for identity in sorted(grouped):
        lines += content.comments.get((*identity, ""), ())
        pairs = [
            f"{name}: {_scalar(text)}"
            for name, text in zip(IDENTITY, identity, strict=True)
            if text or name != "fingerprint"
        ]
        lines += [f"- {pairs[0]}", *(f"  {pair}" for pair in pairs[1:]), "  metrics:"]
        for metric in sorted(grouped[identity]):
            lines += [f"    {comment}" for comment in content.comments.get((*identity, metric), ())]
            lines.append(f"    {_scalar(metric)}:")
            lines += [f"      {pair}" for pair in _fields(grouped[identity][metric])]
    lines += content.comments.get(END, ())
    return "\n".join(lines) + "\n"


def _fields(entry: Entry) -> list[str]:
    values = {name: getattr(entry, name) for name in FIELDS}
    return [
        f"{name}: {_scalar(value)}" for name, value in values.items() if value is not None and value != ""
    ]


#: Texts that YAML readers take as they are: no number, date, boolean or syntax among them.
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*\Z")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def _scalar(value: object) -> str:
    """Return *value* as one YAML scalar; texts that are no plain word are quoted (JSON strings are YAML)."""
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, int):
        return str(value)
    text = str(value).encode("utf-8", "replace").decode()
    if _PLAIN.match(text) and text.lower() not in _RESERVED:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)


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
        with open_regular(path) as file:
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
        self._visited: set[int] = set()
        self._lines: dict[str, int] = {}  #: path of a key -> its line, from 0
        #: first line, end line, what a comment belongs to
        self._spans: list[tuple[int, int, tuple[str, ...]]] = []

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
        if id(node) in self._visited:
            self._problem(node, where, "aliases are not allowed here")
            return {}
        self._visited.add(id(node))
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
