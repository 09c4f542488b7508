"""What ``--expect NAME=VALUE`` says. A wrong word is refused before any node is put under load."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_mlhpc.config.policy import OF_NODES, PROPERTIES, trouble
from pytest_mlhpc.errors import Problem, UsageError

#: All names, as help and message list them.
NAMES = (*OF_NODES, *PROPERTIES)


def expected(words: Sequence[str]) -> dict[str, str]:
    """Return what *words* say, by name.

    Raises:
        UsageError: one is not NAME=VALUE, has a name that no check reads, or a value that no node can have.
    """
    found: dict[str, str] = {}
    for word in words:
        name, between, value = (part.strip() for part in word.partition("="))
        if not (name and between and value):
            raise UsageError(f"--expect {word!r}: write it as NAME=VALUE, such as cores=64")
        message, suggestion = trouble(name, value, NAMES)
        if message:
            raise UsageError(str(Problem(f"--expect {word}", "", message, suggestion)))
        found[name] = value
    return found
