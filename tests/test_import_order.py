"""The packages stand in one order, and imports go down in it: also those inside functions and those for type checkers."""

import ast
from pathlib import Path

import pytest

import pytest_mlhpc

PACKAGE = Path(pytest_mlhpc.__file__).parent
TOP = PACKAGE.name

#: Each may import what stands after it. docs/architecture.md says what each is for.
ORDER = (
    "cli", "plugin", "session", "builtin", "hookspecs", "options", "papers", "vetting", "screen", "provision", "ci", "report",
    "alert", "influx", "history", "judge", "jobs", "config", "store", "node", "errors",
)  # fmt: skip


def dotted(path):
    name = ".".join((TOP, *path.relative_to(PACKAGE).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path):
    """Yield the modules of this package that a module imports, wherever in it."""
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            continue
        for name in names:
            module = name if name in MODULES else name.rpartition(".")[0]
            if module.startswith(f"{TOP}."):
                yield module


def owner(module):
    return module.split(".")[1]


ARROWS = {(module, other) for module, path in MODULES.items() if module != TOP for other in imported(path)}


def test_the_order_names_every_package_and_every_module_at_the_top_and_nothing_else():
    assert len(ARROWS) > 1000
    assert {owner(module) for module in MODULES if module != TOP} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down(name):
    below = set(ORDER[ORDER.index(name) :])
    assert not [(one, other) for one, other in ARROWS if owner(one) == name and owner(other) not in below]


def test_at_most_six_modules_stand_at_the_top():
    assert (
        len(
            [module for module in MODULES if module.count(".") == 1 and MODULES[module].name != "__init__.py"]
        )
        < 6
    )
