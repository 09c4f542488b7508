"""Turns pydantic's findings into problems that name file, line, key and the nearest valid word."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pytest_mlhpc.config.yaml import YamlNode
from pytest_mlhpc.errors import Problem, nearest

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
