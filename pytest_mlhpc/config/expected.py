"""What ``vet: expect:`` of a partition, and ``mlhpc vet --expect``, may say of a node. Pure."""

from __future__ import annotations

from collections.abc import Collection

from pytest_mlhpc.config.quantities import parse_memory
from pytest_mlhpc.errors import nearest
from pytest_mlhpc.node.vet.checks.inventory import EXPECTABLE, OF_DEVICES

#: Properties that a check of ours compares, by name.
PROPERTIES = tuple(sorted({*EXPECTABLE, *OF_DEVICES}))

#: What a systems file says under ``nodes:``, by its name in ``--expect``.
OF_NODES = {"cores": "cores", "memory": "memory", "model": "device_model"}

#: Names whose value is a whole number, and those that have words.
_WHOLE = ("cores", "numa", "hugepages")
_WORDS = {"ecc": ("on", "off", "any"), "mig": ("on", "off", "any")}


def trouble(name: str, value: str, known: Collection[str] = PROPERTIES) -> tuple[str, str]:
    """Return what is wrong with an expectation and the nearest right word; both are empty where nothing is.

    Args:
        name: the property, which must be one of *known*.
        value: what each node should have, as text.
        known: names that may be used here.
    """
    if name not in known and name in OF_NODES:
        return f"write it under `nodes:`, as `{OF_NODES[name]}`", ""
    if name not in known:
        return f"no check reads {name!r}; there are {', '.join(known)}", nearest(name, known)
    if name in _WHOLE and not _is_count(value, least=int(name == "cores")):
        return f"{value} is no number of {name}", ""
    words = _WORDS.get(name)
    if words and value.lower() not in words:
        return f"{value!r} is none of {', '.join(words)}", nearest(value.lower(), words)
    if name == "memory":
        try:
            parse_memory(value)
        except ValueError as error:
            return str(error), ""
    return "", ""


def _is_count(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text) < 10**6
