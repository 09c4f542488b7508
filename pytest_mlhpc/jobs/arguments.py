"""The arguments of a program as a test may write them, made the text that the program gets. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_mlhpc.errors import Problem, SpecError


def with_plain_argv(node_id: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return *asked*, the fields of a `command` test, with text alone in ``argv``, which is then fit for a record.

    Raises:
        SpecError: names each element that is neither text nor number nor path.
    """
    if "argv" not in asked:
        return dict(asked)
    if texts := _wrong(asked["argv"]):
        raise SpecError([Problem(node_id, "argv", text) for text in texts])
    return {**asked, "argv": [_text(value) for value in asked["argv"]]}


def _text(value: Any) -> str:
    return str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)


def _wrong(argv: Sequence[Any]) -> list[str]:
    """Return a text for each element that is no argument: ``str()`` of any object would start something unmeant."""
    return [
        f"element {index} is {value!r}, expected text, a number or a path"
        for index, value in enumerate(argv)
        if isinstance(value, bool)
        or not isinstance(value, (str, int, float, os.PathLike))
        or (isinstance(value, os.PathLike) and not isinstance(os.fspath(value), str))
    ]
