"""Mutations of Python source: which changes a function offers, and how one is made. Pure functions of text.

A mutation is named by the qualified name of its function, the source of the expression or statement that it changes, and
what it becomes (both as :func:`ast.unparse` writes them), and by its number where a function has that more than once. A
constant is named with the expression around it. No line and no file is part of the name, so that it survives moves and
reformatting.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

_Node = ast.expr | ast.stmt

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass(frozen=True)
class Mutation:
    """One change of one function."""

    function: str
    original: str
    mutated: str
    nth: int


@dataclass(frozen=True)
class Place:
    """Where a mutation stands in a source text: lines from 1, columns in UTF-8 bytes from 0, as the parser counts them."""

    line: int
    column: int
    end_line: int
    end_column: int
    #: What stands there instead.
    text: str
    is_expression: bool


def mutations(source: str) -> Iterator[tuple[Mutation, Place]]:
    """Yield every mutation that the functions of a module offer, in the order of the text."""
    for name, function in _functions(ast.parse(source), ""):
        count: Counter[tuple[str, str]] = Counter()
        for node, parent in _own_nodes(function):
            for changed in _changes(node):
                pair = _names(node, changed, parent)
                if pair[0] == pair[1]:
                    continue
                yield Mutation(name, *pair, count[pair]), _place(node, ast.unparse(changed))
                count[pair] += 1


def _names(node: _Node, changed: ast.AST, parent: _Node) -> tuple[str, str]:
    """Return the text before and after, of the parent where the node is a constant."""
    if not isinstance(node, ast.Constant) or hasattr(parent, "body"):
        return ast.unparse(node), ast.unparse(changed)
    after = copy.deepcopy(parent)
    where = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    for one in ast.walk(after):
        if isinstance(one, ast.Constant) and where == (
            one.lineno,
            one.col_offset,
            one.end_lineno,
            one.end_col_offset,
        ):
            one.value = cast("ast.Constant", changed).value
    return ast.unparse(parent), ast.unparse(after)


def _place(node: _Node, text: str) -> Place:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return Place(node.lineno, node.col_offset, end_line, end_column, text, isinstance(node, ast.expr))


def apply(source: str, mutation: Mutation) -> str:
    """Return the source with one mutation made.

    Raises:
        LookupError: no function of this module offers it.
    """
    for found, place in mutations(source):
        if found == mutation:
            return replace(source, place)
    raise LookupError(f"{mutation.function} has no {mutation.original!r} that becomes {mutation.mutated!r}")


def replace(source: str, place: Place) -> str:
    """Return the source with another text at a place."""
    lines = source.encode().splitlines(keepends=True)
    first, last = lines[place.line - 1], lines[place.end_line - 1]
    before, after = first[: place.column], last[place.end_column :]
    text = f"({place.text})" if place.is_expression else place.text
    new = before + text.encode() + after
    # Later lines keep their numbers, so that tracebacks still fit the source.
    padding = b"" if place.is_expression else b"\n" * (place.end_line - place.line)
    return b"".join([*lines[: place.line - 1], new + padding, *lines[place.end_line :]]).decode()


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _functions(child, prefix)


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[_Node, _Node]]:
    """Yield the nodes of a function's body with the expression or statement around each, in the order of the text.

    Left out are nested functions, which are yielded by themselves, annotations, raised errors and formatted texts.
    """
    pending: list[tuple[ast.AST, _Node]] = [(node, node) for node in reversed(function.body)]
    while pending:
        node, parent = pending.pop()
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.JoinedStr
        ):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node, parent
            parent = node
        children = [
            child
            for name, value in ast.iter_fields(node)
            if name != "annotation"
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        pending.extend((child, parent) for child in reversed(children))


def _changes(node: _Node) -> Iterator[ast.AST]:
    yield from _changed_operators(node)
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 + 1.0)
        case ast.Return(value=value) if value is not None and not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _changed_operators(node: _Node) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]):
            yield _with(node, ops=[_COMPARED[type(operator)]()])
        case ast.BoolOp(op=operator):
            yield _with(node, op=ast.And() if isinstance(operator, ast.Or) else ast.Or())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED:
            yield _with(node, op=_COMPUTED[type(operator)]())
        case ast.IfExp(body=body, orelse=other):
            yield _with(node, body=other, orelse=body)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
