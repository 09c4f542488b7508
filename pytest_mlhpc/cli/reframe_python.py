"""Values of the Python in ReFrame's settings and tests, read from the syntax tree. No file is ever executed.

Open it when a value that stands plainly in a file is called unknown. Folded are literals, names, attributes of ``self``, sums,
f-strings, conditions of known values, and a few calls (``os.path.join``, methods of texts). Everything else becomes a text in
angle brackets that quotes the expression: ``⟨osext.osuser()⟩``.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import math
import operator
import posixpath
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import UsageError

#: Largest file that is read, in bytes; the largest public settings file (EPCC) has 30 KB.
MAX_FILE: Final = 4 << 20
#: Longest text or list that a sum may make, and most values of a whole configuration.
_MAX_LENGTH: Final = 65_536
MAX_VALUES: Final = 200_000
#: Longest quotation of an expression, in characters.
_QUOTED: Final = 120
_UNKNOWN: Final = re.compile("⟨[^⟩]*⟩")


@dataclass(frozen=True)
class SanityCall:
    """A call of ReFrame's module of sanity functions, which the name ``sn`` mostly stands for."""

    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Unread:
    """A statement that was not followed: its line, its text, the names that it mentions, and those that it sets."""

    line: int
    text: str
    names: frozenset[str]
    sets: frozenset[str]


@dataclass
class Scope:
    """Names and attributes of ``self`` at one place of a file, and the statements that were not followed there."""

    names: MutableMapping[str, Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)
    #: Methods of ``self`` by name, those of bases first, each with the names of its module.
    methods: Mapping[str, Sequence[tuple[ast.FunctionDef, MutableMapping[str, Any]]]] = field(
        default_factory=dict
    )
    method: tuple[str, int] = ("", 0)  #: the one that is followed: its name, and which of that name
    depth: int = 0  #: of the call that is followed
    #: how many turns of loops, and calls, are still followed
    turns: list[int] = field(default_factory=lambda: [1_000])


def read_python(path: Path) -> ast.Module:
    """Return the syntax tree of *path*.

    Raises:
        UsageError: it cannot be read, is too large, or is no Python; names the line.
    """
    try:
        if path.stat().st_size > MAX_FILE:
            raise UsageError(f"{path} has more than {MAX_FILE >> 20} MiB; it is no file of ReFrame")
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise UsageError(f"{path} is not Python 3: line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; brackets in brackets
        raise UsageError(f"{path} is not Python 3: {error or 'it is nested too deeply'}") from None
    numbers = (
        one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, int)
    )
    if any(one.bit_length() > 256 for one in numbers):
        raise UsageError(f"{path} holds a number of more than 256 bits; it is no file of ReFrame")
    return tree


def one_line(text: str) -> str:
    """Return *text* without line ends and control characters: it goes into comments of files that Python and YAML read."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def unknown(node: ast.AST) -> str:
    """Return the quotation that stands for the value of *node*."""
    text = " ".join(ast.unparse(node).split()).replace("⟨", "(").replace("⟩", ")")
    return f"⟨{text if len(text) <= _QUOTED else text[: _QUOTED - 3] + '...'}⟩"


def unknown_in(value: Any) -> str:
    """Return the first unknown expression that *value*, of any depth, holds; empty: none."""
    for one in _nested(value):
        if isinstance(one, SanityCall):
            return one.source
        if isinstance(one, str) and (found := _UNKNOWN.search(one)):
            return found[0][1:-1]
    return "a value of too many parts" if too_large(value) else ""


def too_large(value: Any) -> bool:
    """Return whether *value* has more than MAX_VALUES parts. One that holds itself has."""
    return sum(1 for _ in _nested(value)) > MAX_VALUES


def _nested(value: Any) -> Iterator[Any]:
    """Yield *value*, and depth first all that it holds, but not more than MAX_VALUES and one."""
    waiting = [value]
    for _ in range(MAX_VALUES + 1):
        if not waiting:
            return
        one = waiting.pop()
        yield one
        if isinstance(one, Mapping):
            waiting += reversed([part for pair in one.items() for part in pair])
        elif isinstance(one, (list, tuple)):
            waiting += reversed(one)


def follow(body: Sequence[ast.stmt], scope: Scope) -> None:
    """Follow the statements of a module, a class or a function. Those that cannot be followed are listed in *scope*."""
    for statement in body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            _assign(statement, scope)
        elif isinstance(statement, ast.If) and isinstance(truth := fold(statement.test, scope), bool):
            follow(statement.body if truth else statement.orelse, scope)
        elif isinstance(statement, (ast.Try, ast.With)):
            follow(statement.body, scope)
        elif (isinstance(statement, ast.For) and _is_followed(statement, scope)) or (
            isinstance(statement, ast.Expr)
            and (_is_change(statement.value, scope) or _entered(statement.value, scope) is not None)
        ):
            continue
        elif not isinstance(statement, _SILENT) and not _is_text(statement):
            scope.unread.append(_unread(statement))
            for name in scope.unread[-1].sets & scope.names.keys():
                if not isinstance(scope.names[name], (dict, list)):  # of these, the known part stays
                    scope.names[name] = f"⟨{name}⟩"


def _is_followed(loop: ast.For, scope: Scope) -> bool:
    """Follow a loop over a known list. Return whether it could be; a ``break`` or ``continue`` cannot."""
    values = fold(loop.iter, scope)
    jumps = any(isinstance(one, (ast.Break, ast.Continue)) for one in ast.walk(loop))
    if jumps or not isinstance(values, (list, tuple, dict)) or len(values) > scope.turns[0]:
        return False
    scope.turns[0] -= len(values)
    for one in [*values]:
        _set(loop.target, one, scope)
        follow(loop.body, scope)
    return True


#: How deep calls of a test's own methods are followed.
_MAX_DEPTH: Final = 4


def _entered(call: ast.expr, scope: Scope) -> tuple[ast.FunctionDef, Scope] | None:
    """Follow a call of a method of ``self``. Return the method and its scope; None: it is none, or cannot be followed."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    number = len(scope.methods.get(name, ())) - 1
    if ast.unparse(call.func.value).startswith("super("):
        number = scope.method[1] - 1 if name == scope.method[0] else -1
    elif not _is_self(call.func.value):
        return None
    if number < 0 or scope.depth >= _MAX_DEPTH or scope.turns[0] <= 0:
        return None
    method, module = scope.methods[name][number]
    scope.turns[0] -= 1
    wanted = [one.arg for one in method.args.args][1:]
    given = dict(zip(wanted[::-1], [fold(one, scope) for one in method.args.defaults[::-1]], strict=False))
    given |= dict(zip(wanted, [fold(one, scope) for one in call.args], strict=False))
    given |= {one.arg: fold(one.value, scope) for one in call.keywords if one.arg}
    inner = Scope(
        ChainMap(given, module),
        scope.attributes,
        methods=scope.methods,
        method=(name, number),
        depth=scope.depth + 1,
        turns=scope.turns,
    )
    follow(method.body, inner)
    scope.unread += inner.unread
    return method, inner


def returned(method: ast.FunctionDef, scope: Scope) -> Any:
    """Return what *method* returns, whose statements *scope* has followed; a quotation where one was not followed."""
    last = method.body[-1]
    if scope.unread or not isinstance(last, ast.Return) or last.value is None:
        return f"⟨{method.name}()⟩"
    return fold(last.value, scope)


_SILENT: Final = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass, ast.Return, ast.Assert, ast.Global,
)  # fmt: skip


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _unread(statement: ast.stmt) -> Unread:
    found = [one for one in ast.walk(statement) if isinstance(one, (ast.Name, ast.Attribute))]
    sets = frozenset(ast.unparse(one) for one in found if isinstance(one.ctx, ast.Store))
    first = ast.unparse(statement).split("\n")[0]
    return Unread(statement.lineno, first[:_QUOTED], frozenset(map(ast.unparse, found)), sets)


def _assign(statement: ast.Assign | ast.AnnAssign | ast.AugAssign, scope: Scope) -> None:
    if isinstance(statement, ast.AugAssign):
        both = ast.BinOp(_loaded(statement.target), statement.op, statement.value)
        _set(statement.target, fold(ast.copy_location(both, statement), scope), scope)
    elif statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            _set(target, fold(statement.value, scope), scope)


def _loaded(target: ast.expr) -> ast.expr:
    loaded = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(loaded, target)


def _set(target: ast.expr, value: Any, scope: Scope) -> None:
    if isinstance(target, ast.Name):
        scope.names[target.id] = value
    elif isinstance(target, ast.Attribute) and _is_self(target.value):
        scope.attributes[target.attr] = value
    elif isinstance(target, ast.Attribute):
        # an attribute of an attribute, such as self.build_system.cflags, has its path as its name
        scope.attributes[ast.unparse(target).removeprefix("self.")] = value
    elif isinstance(target, ast.Subscript):
        holder, key = fold(target.value, scope), fold(target.slice, scope)
        if isinstance(holder, dict) and isinstance(key, (str, int)):
            holder[key] = value
    elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (list, tuple)):
        for one, part in zip(target.elts, value, strict=False):
            _set(one, part, scope)


def _is_change(call: ast.expr, scope: Scope) -> bool:
    """Return whether *call* changes a known list or mapping in a known way, having done so."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    holder, name = fold(call.func.value, scope), call.func.attr
    if isinstance(holder, dict) and name in {"setdefault", "pop"}:
        return not isinstance(fold(call, scope), str)
    given = [fold(one, scope) for one in call.args]
    if isinstance(holder, list) and name in {"append", "extend"} and len(given) == 1:
        more = given if name == "append" or not isinstance(given[0], (list, tuple)) else given[0]
        if len(holder) + len(more) <= _MAX_LENGTH:
            holder.extend(more)
        return True
    if isinstance(holder, dict) and name == "update" and len(given) <= 1:
        for more in given:
            holder.update(more if isinstance(more, dict) else {})
        holder.update({one.arg: fold(one.value, scope) for one in call.keywords if one.arg})
        return all(isinstance(more, dict) for more in given)
    return False


def fold(node: ast.expr, scope: Scope) -> Any:
    """Return the value of *node*: text, number, truth, None, list, tuple or mapping of them, a :class:`SanityCall`, or a quotation."""
    folder = _FOLDERS.get(type(node))
    return unknown(node) if folder is None else folder(node, scope)


def _constant(node: ast.Constant, _scope: Scope) -> Any:
    finite = not isinstance(node.value, float) or math.isfinite(node.value)  # 1e999 is infinite
    return node.value if finite and isinstance(node.value, (str, int, float, type(None))) else unknown(node)


def _name(node: ast.Name, scope: Scope) -> Any:
    return scope.names[node.id] if node.id in scope.names else unknown(node)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _attribute(node: ast.Attribute, scope: Scope) -> Any:
    name = ast.unparse(node).removeprefix("self.").removeprefix("cls.")
    return scope.attributes.get(name, unknown(node))


def _elements(node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> Any:
    found: list[Any] = []
    for one in node.elts:
        value = fold(one.value if isinstance(one, ast.Starred) else one, scope)
        found += value if isinstance(one, ast.Starred) and isinstance(value, (list, tuple)) else [value]
        if len(found) > _MAX_LENGTH:
            return unknown(node)
    return tuple(found) if isinstance(node, ast.Tuple) else found


def _mapping(node: ast.Dict, scope: Scope) -> Any:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        folded = fold(value, scope)
        if key is not None:
            name = fold(key, scope)
            found[name if isinstance(name, (str, int, float)) or name is None else unknown(key)] = folded
        elif isinstance(folded, dict):
            found |= folded
        else:
            found[unknown(value)] = unknown(value)
    return found


def _joined(node: ast.JoinedStr, scope: Scope) -> str:
    parts = []
    for one in node.values:
        inner = one.value if isinstance(one, ast.FormattedValue) else one
        value = fold(inner, scope)
        plain = not (isinstance(one, ast.FormattedValue) and one.format_spec)
        parts.append(str(value) if plain and isinstance(value, (str, int, float)) else unknown(inner))
    return _short("".join(parts), node)


def _short(text: str, node: ast.expr) -> str:
    return text if len(text) <= _MAX_LENGTH else unknown(node)


#: Operators of two numbers; a power could take all memory.
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
#: Largest number that is computed with.
_MAX_NUMBER: Final = 1e15


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _binary(node: ast.BinOp, scope: Scope) -> Any:
    left, right = fold(node.left, scope), fold(node.right, scope)
    made = None
    if _is_number(left) and _is_number(right) and type(node.op) in _ARITHMETIC:
        with contextlib.suppress(ZeroDivisionError):
            made = _ARITHMETIC[type(node.op)](left, right)
    elif isinstance(node.op, ast.Mod) and isinstance(left, str):
        made = _filled(left, right if isinstance(right, tuple) else (right,), node)
    elif isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
        made = left | right
    elif isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str):
        made = _short(left + right, node)
    elif isinstance(node.op, ast.Add) and (isinstance(left, list) or isinstance(right, list)):
        both = [*_as_list(left), *_as_list(right)]
        made = both if len(both) <= _MAX_LENGTH else None
    return unknown(node) if made is None else made


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _filled(text: str, values: Sequence[Any], node: ast.expr) -> str:
    """Return *text* with plain ``%s`` and ``%d`` filled in."""
    pieces = re.split(r"%[sd]", text)
    plain = len(pieces) == len(values) + 1 and all(isinstance(one, (str, int, float)) for one in values)
    if not plain or "%" in "".join(pieces):
        return unknown(node)
    return _short("".join(a + b for a, b in zip(pieces, [*map(str, values), ""], strict=True)), node)


def _unary(node: ast.UnaryOp, scope: Scope) -> Any:
    value = fold(node.operand, scope)
    if isinstance(node.op, ast.USub) and _is_number(value):
        return -value
    return not value if isinstance(node.op, ast.Not) and isinstance(value, bool) else unknown(node)


def _subscript(node: ast.Subscript, scope: Scope) -> Any:
    holder, key = fold(node.value, scope), fold(node.slice, scope)
    if isinstance(holder, dict) and isinstance(key, (str, int)) and key in holder and not unknown_in(key):
        return holder[key]
    if isinstance(holder, (list, tuple)) and type(key) is int and -len(holder) <= key < len(holder):
        return holder[key]
    return unknown(node)


def _condition(node: ast.IfExp, scope: Scope) -> Any:
    truth = fold(node.test, scope)
    return unknown(node) if not isinstance(truth, bool) else fold(node.body if truth else node.orelse, scope)


def _compare(node: ast.Compare, scope: Scope) -> Any:
    left, right = fold(node.left, scope), fold(node.comparators[0], scope)
    if len(node.ops) > 1 or unknown_in(left) or unknown_in(right):
        return unknown(node)
    equal, scalar = isinstance(node.ops[0], (ast.Eq, ast.Is)), (str, int, float, type(None))
    if isinstance(left, scalar) and isinstance(right, scalar):
        different = isinstance(node.ops[0], (ast.NotEq, ast.IsNot))
        return (left == right) != different if equal or different else unknown(node)
    if isinstance(left, scalar) and isinstance(right, (list, tuple, dict)):
        if isinstance(node.ops[0], ast.In):
            return left in right
        return left not in right if isinstance(node.ops[0], ast.NotIn) else unknown(node)
    return unknown(node)


def _call(node: ast.Call, scope: Scope) -> Any:
    if (entered := _entered(node, scope)) is not None:
        return returned(*entered)
    name = ast.unparse(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""
    args = [fold(one, scope) for one in node.args]
    options = {one.arg: fold(one.value, scope) for one in node.keywords if one.arg}
    if name.startswith(("sn.", "sanity.", "util.sanity.")):
        return SanityCall(name.rpartition(".")[2], tuple(args), options, unknown(node)[1:-1])
    made = _FUNCTIONS[name](args, options) if name in _FUNCTIONS else None
    if made is None and isinstance(node.func, ast.Attribute):
        made = _method(fold(node.func.value, scope), node.func.attr, args, node)
    return unknown(node) if made is None else made


def _path(args: Sequence[Any], _options: Mapping[str, Any]) -> str | None:
    if not args or not all(isinstance(one, str) for one in args):
        return None
    path = posixpath.join(*args)
    return path if len(path) <= _MAX_LENGTH else None


def _listed(args: Sequence[Any], _options: Mapping[str, Any]) -> list[Any] | None:
    return [*args[0]] if len(args) == 1 and isinstance(args[0], (list, tuple, dict)) else None


def _copied(args: Sequence[Any], _options: Mapping[str, Any]) -> Any:
    return copy.deepcopy(args[0]) if len(args) == 1 and not too_large(args[0]) else None


def _text(args: Sequence[Any], _options: Mapping[str, Any]) -> str | None:
    return str(args[0]) if len(args) == 1 and isinstance(args[0], (str, int, float)) else None


#: Functions whose value is that of their arguments: these in order, those by name -> value, None where it is unknown.
_FUNCTIONS: Final[Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], Any]]] = {
    **dict.fromkeys(("os.path.join", "path.join"), _path),
    **dict.fromkeys(("list", "tuple", "set"), _listed),
    **dict.fromkeys(("copy.deepcopy", "deepcopy", "copy.copy"), _copied),
    "dict": lambda args, options: {**options} if not args else None,
    "str": _text,
}


def _method(holder: Any, method: str, args: Sequence[Any], node: ast.Call) -> Any:
    """Return what a method of a mapping or a text returns; None: unknown."""
    if isinstance(holder, dict):
        return _of_mapping(holder, method, args, node)
    if not isinstance(holder, str):
        return None
    if method == "join" and len(args) == 1 and isinstance(args[0], list):
        parts = args[0]
        size = sum(len(one) + len(holder) for one in parts if isinstance(one, str))
        return (
            holder.join(parts) if size <= _MAX_LENGTH and all(isinstance(one, str) for one in parts) else None
        )
    if unknown_in(holder) or not all(isinstance(one, str) for one in args):
        return None
    if method in {"strip", "lower", "upper", "split"} and len(args) <= 1:
        return getattr(holder, method)(*(args if method in {"strip", "split"} and "" not in args else ()))
    small = (
        method == "replace" and len(args) == 2 and args[0] and len(holder) * (len(args[1]) + 1) <= _MAX_LENGTH
    )
    return holder.replace(*args) if small else None


def _of_mapping(holder: dict[Any, Any], method: str, args: Sequence[Any], node: ast.Call) -> Any:
    if method in {"keys", "values", "items", "copy"} and not args:
        return {
            "keys": [*holder],
            "values": [*holder.values()],
            "items": [*holder.items()],
            "copy": {**holder},
        }[method]
    key = args[0] if args and isinstance(args[0], (str, int)) and not unknown_in(args[0]) else None
    if method in {"get", "setdefault", "pop"} and len(args) <= 2 and key is not None:
        if method == "setdefault":
            return holder.setdefault(args[0], args[1] if len(args) == 2 else None)
        return (holder.pop if method == "pop" else holder.get)(args[0], *args[1:] or [None])
    return unknown(node)


_FOLDERS: Final[Mapping[type[ast.expr], Callable[[Any, Scope], Any]]] = {
    ast.Constant: _constant, ast.Name: _name, ast.Attribute: _attribute, ast.List: _elements, ast.Tuple: _elements,
    ast.Set: _elements, ast.Dict: _mapping, ast.JoinedStr: _joined, ast.BinOp: _binary, ast.UnaryOp: _unary,
    ast.Subscript: _subscript, ast.IfExp: _condition, ast.Compare: _compare, ast.Call: _call,
}  # fmt: skip


def follow_module(path: Path) -> tuple[ast.Module, Scope]:
    """Return the syntax tree of *path* and what its names are after its last statement.

    Raises:
        UsageError: see :func:`read_python`.
    """
    tree = read_python(path)
    scope = Scope(ChainMap({"__file__": str(path)}))
    try:
        follow(tree.body, scope)
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    return tree, scope


def classes_in(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes of a module that stand at its top, also under an ``if`` or ``try``."""
    waiting: list[ast.stmt] = [*reversed(tree.body)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ast.ClassDef):
            yield one
        elif isinstance(one, (ast.If, ast.Try)):
            waiting += reversed(one.body)
