"""The figures of the house, which `make house` prints: how many modules, how large, what imports what, how names are used.

A code line is a line of a statement; blank lines, comments and docstrings are none. Only files that git knows count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "pytest_mlhpc"
#: Modules with fewer code lines, and functions with more lines, need a reason.
SMALL, LARGE, LONG = 60, 400, 60


@dataclass(frozen=True)
class House:
    """The figures; each list names what it counts. Paths are relative to the checkout."""

    modules: tuple[str, ...]
    code_lines: Mapping[str, int]
    test_lines: int
    imports: Mapping[str, set[str]]  #: module -> modules of the package that it imports, wherever in it
    circle: tuple[str, ...]  #: the first circle of imports that was found, empty if there is none
    shared_names: Mapping[str, tuple[str, ...]]  #: class name -> modules, where there are several
    long_functions: tuple[str, ...]

    @property
    def small(self) -> list[str]:
        """Modules of fewer than 60 code lines, those that only mark a package aside."""
        return [name for name, lines in self.code_lines.items() if lines < SMALL and "__init__" not in name]

    @property
    def large(self) -> list[str]:
        """Modules of more than 400 code lines."""
        return [name for name, lines in self.code_lines.items() if lines > LARGE]

    def rows(self) -> Iterator[str]:
        """Yield a line for each figure."""
        at_the_root = sum(name.count("/") == 1 for name in self.modules)
        yield f"modules: {len(self.modules)}, of them {at_the_root} at the root"
        yield f"code lines: {sum(self.code_lines.values()):,}, of tests {self.test_lines:,}"
        yield f"modules under {SMALL} code lines: {len(self.small)}; over {LARGE}: {len(self.large)}"
        yield f"circle of imports: {' -> '.join(self.circle) or 'none'}"
        yield f"class names with more than one meaning: {', '.join(sorted(self.shared_names)) or 'none'}"
        yield f"functions of {LONG} lines and more: {', '.join(self.long_functions) or 'none'}"


def read_house(root: Path = ROOT) -> House:
    """Read the checkout at *root*."""
    found = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    paths = [path for path in found.stdout.split() if (root / path).exists()]
    modules = tuple(path for path in paths if path.startswith(f"{PACKAGE}/"))
    trees = {path: ast.parse((root / path).read_text(encoding="utf-8")) for path in paths}
    arrows = _imports({path: trees[path] for path in modules})
    classes: dict[str, set[str]] = defaultdict(set)
    long = []
    for path in modules:
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(path)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _length(node) >= LONG:
                long.append(f"{path}: {node.name}")
    return House(
        modules=modules,
        code_lines={path: _code_lines(trees[path]) for path in modules},
        test_lines=sum(_code_lines(tree) for path, tree in trees.items() if path.startswith("tests/")),
        imports=arrows,
        circle=_circle(arrows),
        shared_names={name: tuple(sorted(where)) for name, where in classes.items() if len(where) > 1},
        long_functions=tuple(long),
    )


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def _code_lines(tree: ast.Module) -> int:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or _is_docstring(node):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        lines.update(range(node.lineno, max(node.lineno, last) + 1))
    return len(lines)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    names = {path[:-3].replace("/", ".").removesuffix(".__init__"): path for path in trees}
    arrows: dict[str, set[str]] = {path: set() for path in trees}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            imported = []
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                imported = [name if name in names else node.module for name in whole]
            elif isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            arrows[path] |= {names[name] for name in imported if name in names} - {path}
    return arrows


def _circle(arrows: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return modules that import each other in a circle; empty if none do."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


if __name__ == "__main__":
    sys.stdout.writelines(f"{row}\n" for row in read_house().rows())
