"""A YAML reader for files that people (or enemies) wrote: keeps the line of every key, refuses what could do harm.

It takes the subset that a configuration file needs: mappings with text keys, lists, and the scalars of YAML 1.2's core
schema (https://yaml.org/spec/1.2.2/#103-core-schema), so ``off`` is a word, ``010`` a text and ``2025-01-31`` no date.
Refused, each with its line: duplicate keys, tabs as indentation, tags, merge keys, aliases that expand to more
than :data:`MAX_NODES` values, nesting deeper than :data:`MAX_DEPTH`, control characters, files over :data:`MAX_BYTES`.

:func:`validate` turns pydantic's findings into problems with file, line, key and the nearest word.
"""

from __future__ import annotations

import re
import stat
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from pytest_mlhpc.errors import ConfigError, Problem, nearest

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


_SENTENCES: Mapping[str, str] = {
    "too_short": "is empty",
    "model_type": "should be a mapping",
    "dict_type": "should be a mapping",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
}


def validate(
    model: type[BaseModel],
    node: YamlNode,
    *,
    extra_keys: Collection[str] = (),
    lenient: bool = False,
    leave_out: bool = False,
    folder: Path | None = None,
) -> tuple[Any, list[Problem]]:
    """Return *node* as an instance of *model*, or None, and what is wrong with it.

    ``extra_keys`` are valid keys that the model does not list. ``lenient`` says nothing of a value that still holds a
    ``${`` and is not valid for it (it is checked when the variable is put in): None comes with no problem then, or with
    ``leave_out`` an instance that has the default in place of such a value. *folder* is the one to which names of files are
    relative, without it that of the node's file; the model's validators find it in their context.
    """
    context = {"folder": folder or Path(node.where.rpartition(":")[0]).parent}
    data, left_out = node.plain(), set[tuple[Any, ...]]()
    while True:
        try:
            return model.model_validate(data, context=context), []
        except ValidationError as error:
            found = error.errors(include_url=False)
        awaiting = [item["loc"] for item in found if lenient and _awaits_variable(model, item)]
        real = [item for item in found if item["loc"] not in {*awaiting, *left_out}]
        removed = {place for loc in awaiting if leave_out and (place := _place(data, loc)) != ()}
        if real or not removed:
            return None, [_problem(model, node, item, extra_keys) for item in real]
        for place in sorted(removed, key=str, reverse=True):  # from the end: items of lists keep their places
            _remove(data, place)
        left_out |= removed


def holds_variable(value: object) -> bool:
    """Say whether *value* is text with a variable in it, whose content is not known yet."""
    return isinstance(value, str) and "${" in value


def _awaits_variable(model: type[BaseModel], item: Any) -> bool:
    """Whether a finding may be none when variables are put in. A key that there is not stays unknown."""
    given, kind = item.get("input"), item["type"]
    if kind == "value_error" and isinstance(given, dict) and _fields(_model_at(model, item["loc"])):
        return any(map(holds_variable, given.values()))  # values that do not go together
    return kind != "extra_forbidden" and holds_variable(given)


def _place(data: Any, loc: Sequence[Any]) -> tuple[Any, ...]:
    """Return the way to the deepest value of *data* on the way of *loc*: a finding also names types and keys."""
    way: list[Any] = []
    for part in loc:
        there = part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int)
        if not there:
            break
        data = data[part]
        way.append(part)
    return tuple(way)


def _remove(data: Any, way: Sequence[Any]) -> None:
    for part in way[:-1]:
        data = data[part]
    del data[way[-1]]


def _problem(model: type[BaseModel], root: YamlNode, item: Any, extra_keys: Collection[str]) -> Problem:
    loc = [part for part in item["loc"] if part != "[key]"]
    node, rest = _walk(root, loc)
    key = ".".join([part for part in (node.key, *map(str, rest)) if part])
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        known = [*_fields(_model_at(model, loc[:-1])), *extra_keys]
        return Problem(node.where, key, "unknown key", nearest(str(loc[-1]), known))
    if kind == "missing":
        return Problem(node.where, key, "is missing")
    value = item["input"]
    # What a variable holds may be a secret, so that no message repeats it.
    given = f"the value of {node.written!r:.80}" if node.written else f"{value!r:.80}"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        message = f"{given} is not one of {context['expected']}"
        return Problem(node.where, key, message, nearest(str(value), known))
    if kind == "value_error":
        message = str(context["error"])
        if node.written:
            without = message.replace(f"{value!r:.80}", "")
            quoted = without != message and str(value)[:8] not in without
            message = message.replace(f"{value!r:.80}", given) if quoted else f"{given} is not valid here"
        return Problem(node.where, key, message)
    sentence = _SENTENCES.get(kind, item["msg"][:1].lower() + item["msg"][1:])
    if value is None:
        return Problem(node.where, key, f"has no value; it {sentence}")
    return Problem(
        node.where, key, sentence if isinstance(value, (dict, list)) else f"{sentence}, not {given}"
    )


def _walk(node: YamlNode, loc: Sequence[Any]) -> tuple[YamlNode, list[Any]]:
    """Return the deepest node on the way of *loc*, and what of *loc* has no node (a missing key)."""
    for index, part in enumerate(loc):
        if isinstance(part, int) and isinstance(node.value, list) and part < len(node.value):
            node = node.value[part]
        elif (child := node.get(str(part))) is not None:
            node = child
        else:
            return node, list(loc[index:])
    return node, []


def _model_at(annotation: Any, loc: Sequence[Any]) -> Any:
    """Return the model that describes the mapping at *loc*, or None where the annotations do not tell."""
    annotation = _bare(annotation)
    if not loc:
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, info in annotation.model_fields.items():
            if loc[0] in {name, info.alias}:
                return _model_at(info.annotation, loc[1:])
        return None
    arguments = typing.get_args(annotation)
    return _model_at(arguments[-1], loc[1:]) if arguments else None


def _bare(annotation: Any) -> Any:
    """Strip Annotated and ``| None``."""
    while True:
        arguments = typing.get_args(annotation)
        optional = len(arguments) == 2 and arguments[1] is type(None)
        if typing.get_origin(annotation) is typing.Annotated or optional:
            annotation = arguments[0]
        else:
            return annotation


def _fields(model: Any) -> list[str]:
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [info.alias or name for name, info in model.model_fields.items()]
