"""``make messages``: every text of the product that a user may read, by file and line, to be read for plain English.

A text is a string of two words or more: errors, warnings, findings, table headings, help. Docstrings are none, nor are
patterns of ``re``. What is put in is shown by its expression: ``{count(jobs, 'run')}``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "pytest_mlhpc"

#: Two words with a blank between, as all texts have.
_WORDS = re.compile(r"[A-Za-z,;:)'}`] +[A-Za-z({'`]")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of *source* in the order of its lines."""
    tree = ast.parse(source)
    skipped = {id(node) for owner in ast.walk(tree) for node in _no_texts(owner)}
    found = []
    for node in _outermost_strings(tree, skipped):
        text = _text(node)
        if _WORDS.search(text):
            found.append((node.lineno, text))
    yield from sorted(found)


def _no_texts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the docstring of *node* and, of a call of ``re``, the pattern."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "re":
            yield from node.args[:1]


def _outermost_strings(node: ast.AST, skipped: set[int]) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if id(child) in skipped:
            continue
        if isinstance(child, ast.JoinedStr) or (
            isinstance(child, ast.Constant) and isinstance(child.value, str)
        ):
            yield child
        else:
            yield from _outermost_strings(child, skipped)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.JoinedStr)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in node.values
        if isinstance(part, (ast.Constant, ast.FormattedValue))
    )


def main() -> None:
    """Print the texts of the files below the given paths, or of the whole product."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    for path in parser.parse_args().paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            lines = list(messages(file.read_text()))
            if lines:
                sys.stdout.write(
                    f"\n{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}\n"
                )
            for number, text in lines:
                sys.stdout.write(f"{number:>5}  {text!r}\n" if "\n" in text else f"{number:>5}  {text}\n")


if __name__ == "__main__":
    main()
