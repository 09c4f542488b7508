"""``${ENV}`` and ``{derived}`` in values of systems.yaml; there is no other evaluation.

``${NAME}`` is a variable of the environment in which pytest runs, put in when a partition is selected. ``{name}`` is one
of :data:`DERIVED`, allowed in an environment's ``variables`` (called templates here) and put in for each run by
:func:`fill`. ``$${`` stands for ``${``; in templates ``{{`` stands for ``{`` and ``}}`` for ``}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from pytest_mlhpc.errors import UsageError, nearest

#: What ``{name}`` may be, and what it becomes.
DERIVED: Final[Mapping[str, str]] = {
    "cores": "cores of a node",
    "cores_per_rank": "cores that one rank may use, at least 1",
    "devices": "accelerators of a node, 0 where there are none",
    "memory": "bytes of memory of a node",
    "memory_per_rank": "bytes of memory of a node over its ranks",
    "nodes": "nodes of the run",
    "ranks": "processes of the run",
    "ranks_per_node": "processes on each node",
}

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLAIN = re.compile(rf"\$\$\{{|\$\{{(?P<env>{_NAME})\}}|(?P<bad_env>\$\{{[^}}]*\}}?)", re.DOTALL)
_TEMPLATE = re.compile(
    rf"{_PLAIN.pattern}|\{{\{{|\}}\}}|\{{(?P<derived>{_NAME})\}}|(?P<bad_brace>\{{[^}}]*\}}?)", re.DOTALL
)
_FILL = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|\{")


class Hidden(str):
    """A text that may hold a secret: its repr, which tracebacks show of arguments and locals, does not tell it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return what stands for it."""
        return "'***'"


def resolve(
    text: str,
    environ: Mapping[str, str],
    *,
    missing: Callable[[str], None],
    complain: Callable[[str, str], None],
    template: bool = False,
) -> str:
    """Put variables of *environ* into *text*; a template keeps its ``{name}`` for :func:`fill`.

    ``missing(name)`` is called for each variable that is not set, ``complain(message, suggestion)`` for each mistake;
    both stay in the text as they were written. A variable's value is never looked at again: braces in it are text.
    """

    def put(match: re.Match[str]) -> str:
        found = match.group()
        groups = match.groupdict()
        if groups["env"] is not None:
            value = environ.get(groups["env"])
            if value is None:
                missing(groups["env"])
                return found
            return value.replace("{", "{{").replace("}", "}}") if template else value
        if groups["bad_env"] is not None:
            complain(
                f"{found[:40]!r} names no variable; write ${{NAME}}, or $${{ for the two characters themselves",
                "",
            )
        elif groups.get("bad_brace") is not None:
            complain(f"{found[:40]!r} is no derived value; write {{{{ for a brace itself", "")
        elif groups.get("derived") is not None and groups["derived"] not in DERIVED:
            name = groups["derived"]
            complain(f"{{{name}}} is not one of {', '.join(DERIVED)}", nearest(name, DERIVED))
        elif found == "$${":
            return "${{" if template else "${"
        return found

    return (_TEMPLATE if template else _PLAIN).sub(put, text)


def fill(text: str, values: Mapping[str, object]) -> Hidden:
    """Put *values* of one run (see :func:`derived_values`) into a template that :func:`resolve` returned.

    Raises:
        UsageError: a ``{name}`` has no value.
    """

    def put(match: re.Match[str]) -> str:
        found = match.group()
        if found in {"{{", "}}"}:
            return found[0]
        if match[1] not in values:
            raise UsageError(f"{text!r}: {found} has no value here; known are {', '.join(sorted(values))}")
        return str(values[match[1]])

    return Hidden(_FILL.sub(put, text))


def derived_values(*, cores: int, memory: int, devices: int, nodes: int, ranks: int) -> dict[str, int]:
    """Return a value for every name in :data:`DERIVED`: *cores*, *memory* and *devices* of a node, the run's totals."""
    ranks_per_node = max(1, ranks // max(1, nodes))
    return {
        "cores": cores,
        "cores_per_rank": max(1, cores // ranks_per_node),
        "devices": devices,
        "memory": memory,
        "memory_per_rank": memory // ranks_per_node,
        "nodes": nodes,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
    }
