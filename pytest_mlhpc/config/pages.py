"""Where pages of the manual and suites lie that messages name: inside this package if it was installed, else in the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]


def page(name: str) -> str:
    """Return the path of docs/*name*.md, which a wheel holds if pyproject.toml names it."""
    installed = _PACKAGE / f"docs/{name}.md"
    return str(installed if installed.exists() else _PACKAGE.parent / f"docs/{name}.md")


def suite(name: str) -> str:
    """Return the words by which pytest runs suites/*name*."""
    installed = (_PACKAGE / "suites" / name).is_dir()
    return f"--pyargs pytest_mlhpc.suites.{name}" if installed else f"suites/{name}"
