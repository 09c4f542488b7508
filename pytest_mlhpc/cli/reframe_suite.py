"""The test classes of a ReFrame suite, read from the syntax trees of its files. No file is ever executed.

Open it when a class, what it inherits, or one of its figures is overlooked. The form is that of ReFrame 4.10
(reframe-hpc.readthedocs.io, "Test API Reference"). What becomes of a class is decided in ``reframe_stubs.py``.
"""

from __future__ import annotations

import ast
import copy
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.cli.reframe_python import (
    MAX_FILE,
    SanityCall,
    Scope,
    Unread,
    classes_in,
    fold,
    follow,
    follow_module,
    returned,
    too_large,
    unknown,
)
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.text import count

#: Most files and bytes of a suite; the largest public one (CSCS) has 230 files and 1.5 MB.
_MAX_FILES: Final = 5_000
_MAX_BYTES: Final = 64 << 20
#: Most classes that one inherits from.
_MAX_BASES: Final = 50
_ROOTS: Final = {
    "RegressionTest": "build and run", "RunOnlyRegressionTest": "run", "CompileOnlyRegressionTest": "build",
}  # fmt: skip


#: Attributes that are there before a class sets them, as it may add to them.
_LISTS: Final = (
    "executable_opts", "prerun_cmds", "postrun_cmds", "prebuild_cmds", "postbuild_cmds", "modules", "keep_files", "readonly_files",
    "maintainers", "tags", "build_system.cflags", "build_system.cxxflags", "build_system.fflags", "build_system.cppflags",
    "build_system.ldflags", "build_system.options", "container_platform.options", "job.options", "job.launcher.options",
)  # fmt: skip
_MAPPINGS: Final = (
    "env_vars",
    "variables",
    "extra_resources",
    "reference",
    "perf_patterns",
    "perf_variables",
)


@dataclass(frozen=True)
class ReframeFigure:
    """A figure of a test: its name, its unit, and how it is found (a :class:`SanityCall` of ``sn``, or a quotation)."""

    name: str
    unit: str
    found: Any


@dataclass
class ReframeTest:
    """A test class with all that it inherits: attributes by name, figures, conditions, and what was not followed."""

    name: str
    path: Path
    line: int
    kind: str  #: build and run, run, or build; empty: no base of ReFrame was found
    descr: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    fixtures: dict[str, str] = field(default_factory=dict)  #: name -> the class that makes it
    figures: dict[str, ReframeFigure] = field(default_factory=dict)
    sanity: Any = None  #: a :class:`SanityCall`, a truth, or a quotation; None: none was found
    unread: list[Unread] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  #: bases that no file of the suite defines


@dataclass(frozen=True)
class _Class:
    node: ast.ClassDef
    path: Path
    names: Mapping[str, Any]  #: of its module


@dataclass
class Suite:
    """The test classes of a suite, and the files that could not be read."""

    tests: list[ReframeTest] = field(default_factory=list)
    files: int = 0
    unreadable: list[str] = field(default_factory=list)


def read_suite(path: Path) -> Suite:
    """Return the tests of *path*, a file or a folder.

    Raises:
        UsageError: there is none, it is too large, its one file is no Python, or no class is a test of ReFrame.
    """
    paths = _files(path)
    found, classes = Suite(files=len(paths)), {}
    for one in paths:
        try:
            tree, scope = follow_module(one)
        except UsageError as error:
            if len(paths) == 1:
                raise
            found.unreadable.append(str(error))
            continue
        for node in classes_in(tree):
            classes[one, node.name] = _Class(node, one, scope.names)
    for chosen in classes.values():
        if any(ast.unparse(one).rpartition(".")[2] == "simple_test" for one in chosen.node.decorator_list):
            found.tests.append(_read(chosen, classes))
    if not found.tests:
        why = f"; {found.unreadable[0]}" if found.unreadable else ""
        raise UsageError(
            f"{path} holds no test of ReFrame: no class in {count(len(paths), 'file')} is decorated with @rfm.simple_test{why}"
        )
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {path}; SUITE is a file or a folder of ReFrame's tests")
    found = [one for one in sorted(path.rglob("*.py")) if one.is_file()]
    size = sum(min(one.stat().st_size, MAX_FILE) for one in found)
    if not found:
        raise UsageError(
            f"{path} has no file that ends in .py; SUITE is a file or a folder of ReFrame's tests"
        )
    if len(found) > _MAX_FILES or size > _MAX_BYTES:
        raise UsageError(
            f"{path} has {len(found)} files and {size >> 20} MiB of Python, more than {_MAX_FILES} files or "
            f"{_MAX_BYTES >> 20} MiB; name a folder of it"
        )
    return found


def _lineage(one: _Class, classes: Mapping[tuple[Path, str], _Class], test: ReframeTest) -> list[_Class]:
    """Return the classes that *one* is made of, its bases before it. A base is one of its file, else of another of that name."""
    found: list[_Class] = []

    def visit(each: _Class) -> None:
        if each in found or len(found) > _MAX_BASES:
            return
        found.append(each)
        for base in map(ast.unparse, each.node.bases):
            name = base.rpartition(".")[2]
            if kind := _ROOTS.get(name):
                test.kind = test.kind or kind
            elif other := classes.get((each.path, name)) or _elsewhere(name, each, classes):
                visit(other)
            elif name not in {"RegressionMixin", "RegressionTestPlugin", "object", "ABC"}:
                test.missing.append(base)

    visit(one)
    return found[::-1]


def _elsewhere(name: str, one: _Class, classes: Mapping[tuple[Path, str], _Class]) -> _Class | None:
    """Return the class *name* of another file: the one whose path has most in common with that of *one*."""
    others = [other for (_, known), other in classes.items() if known == name and other is not one]
    return max(others, key=lambda other: _shared(other.path, one.path)) if others else None


def _shared(path: Path, other: Path) -> int:
    return sum(1 for one, two in zip(path.parts, other.parts, strict=False) if one == two)


def _read(chosen: _Class, classes: Mapping[tuple[Path, str], _Class]) -> ReframeTest:
    defaults: dict[str, Any] = {name: [] for name in _LISTS} | {name: {} for name in _MAPPINGS}
    test = ReframeTest(chosen.node.name, chosen.path, chosen.node.lineno, "", attributes=defaults)
    try:
        lineage = _lineage(chosen, classes, test)
        scopes = [(one, ChainMap(test.attributes, _own(one.names))) for one in lineage]
        for one, names in scopes:
            _read_body(one.node, Scope(names, test.attributes), test)
        methods: dict[str, list[tuple[ast.FunctionDef, MutableMapping[str, Any]]]] = {}
        for one, names in scopes:
            for node in one.node.body:
                if isinstance(node, ast.FunctionDef):
                    methods.setdefault(node.name, []).append((node, names.parents))
        turns = [1_000]  # of all loops and calls in the class
        for read in (_read_method, _read_result):
            for name, defined in methods.items():
                node, module = defined[-1]
                place = (name, len(defined) - 1)
                scope = Scope(
                    ChainMap({}, module), test.attributes, methods=methods, method=place, turns=turns
                )
                read(node, scope, test)
    except RecursionError:
        raise UsageError(f"{chosen.path}: class {chosen.node.name} is nested too deeply") from None
    test.attributes = {
        name: value if not too_large(value) else f"⟨{name}⟩" for name, value in test.attributes.items()
    }
    _add_patterns(test)
    test.descr = str(test.attributes.get("descr") or ast.get_docstring(chosen.node) or "")
    return test


def _own(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a module, copied where a class could change them."""
    return {name: _copied(value) for name, value in names.items()}


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, (dict, list)) and not too_large(value) else value


def _read_body(node: ast.ClassDef, scope: Scope, test: ReframeTest) -> None:
    plain = []
    for statement in node.body:
        call = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        kind = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or kind not in {"parameter", "variable", "fixture"}:
            plain.append(statement)
            continue
        follow(plain, scope)
        plain = []
        target = (
            statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        )
        if isinstance(target, ast.Name):
            _declare(target.id, kind, call, scope, test)
    follow(plain, scope)
    test.unread += scope.unread


def _declare(name: str, kind: str, call: ast.Call, scope: Scope, test: ReframeTest) -> None:
    """Note a parameter, a variable or a fixture. A parameter or fixture is unknown wherever it is used."""
    if kind == "parameter":
        test.parameters[name] = fold(call.args[0], scope) if call.args else []
        test.attributes[name] = f"⟨self.{name}⟩"
    elif kind == "fixture":
        test.fixtures[name] = ast.unparse(call.args[0]) if call.args else unknown(call)
        test.attributes.pop(name, None)
    else:
        given = [one.value for one in call.keywords if one.arg == "value"]
        if given:
            test.attributes[name] = fold(given[0], scope)
        else:
            test.attributes.pop(name, None)


def _decorators(node: ast.FunctionDef) -> dict[str, ast.expr]:
    return {
        ast.unparse(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2]: one
        for one in node.decorator_list
    }


def _read_method(node: ast.FunctionDef, scope: Scope, test: ReframeTest) -> None:
    """Follow a hook, or the constructor: both set attributes."""
    if not {"run_before", "run_after"} & {*_decorators(node)} and node.name != "__init__":
        return
    follow(node.body, scope)
    test.unread += [one for one in scope.unread if "super" not in one.names]


def _read_result(node: ast.FunctionDef, scope: Scope, test: ReframeTest) -> None:
    """Take the figure or the condition that a decorated method returns."""
    decorators = _decorators(node)
    if "performance_function" not in decorators and "sanity_function" not in decorators:
        return
    follow(node.body, scope)
    found = returned(node, scope)
    if "sanity_function" in decorators:
        test.sanity = found
        return
    decorator = decorators["performance_function"]
    args = [fold(one, scope) for one in decorator.args] if isinstance(decorator, ast.Call) else []
    options = (
        {one.arg: fold(one.value, scope) for one in decorator.keywords}
        if isinstance(decorator, ast.Call)
        else {}
    )
    name = str(options.get("perf_key") or node.name)
    test.figures[name] = ReframeFigure(name, str(args[0] if args else options.get("units", "")), found)


def _add_patterns(test: ReframeTest) -> None:
    """Take figures and conditions that are set as attributes: ``perf_patterns``, ``perf_variables``, ``sanity_patterns``."""
    for holder in ("perf_patterns", "perf_variables"):
        given = test.attributes.get(holder)
        for name, found in given.items() if isinstance(given, dict) else ():
            unit = ""
            if isinstance(found, SanityCall) and found.name == "make_performance_function":
                rest = [*found.args[1:], found.options.get("unit", "")]
                unit, found = str(rest[0]), found.args[0] if found.args else found.source  # noqa: PLW2901 - unwrapped
            test.figures[str(name)] = ReframeFigure(str(name), unit, found)
        if isinstance(given, str):
            test.figures["performance"] = ReframeFigure("performance", "", given)
    if test.sanity is None:
        test.sanity = test.attributes.get("sanity_patterns")


def references_in(test: ReframeTest) -> Iterator[tuple[str, str, Any]]:
    """Yield system, figure and tuple of each reference; system ``*`` means every other one."""
    given = test.attributes.get("reference")
    for system, figures in given.items() if isinstance(given, dict) else ():
        for name, value in figures.items() if isinstance(figures, dict) else ():
            yield str(system), str(name), value


def texts(given: Any) -> Sequence[Any]:
    """Return the parts of an attribute that is a list, or one value."""
    if given is None:
        return ()
    return given if isinstance(given, (list, tuple)) else (given,)
