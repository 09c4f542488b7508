"""What a server has silently left out of an object that it was given: an old one drops fields that it does not know. Pure.

Sent and stored objects are compared. Defaults and additions of the server and its webhooks are no matter, neither are
quantities written in another way, nor empty values. What we sent and is gone is told, by its path; and so is a value
without which a run is another run, where something has changed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.merge import key_of

#: Fields whose loss does no harm: texts for people, and what only tells the server how to take the object.
_HARMLESS: Final = frozenset({"metadata.creationTimestamp", "metadata.managedFields", "status"})

#: Fields that no webhook may change either, as the run would be another one; by the end of their path.
_EXACT: Final = (
    "completionMode", "completions", "parallelism", "backoffLimit", "restartPolicy", "command", "args", "replicas",
)  # fmt: skip

#: Factors of quantities (kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity).
_SUFFIXES: Final[Mapping[str, Decimal]] = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3),
    "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(rf"([+-]?[0-9.]+(?:[eE][+-]?[0-9]{{1,3}})?)({'|'.join(_SUFFIXES)})\Z")


def dropped(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of what was *sent* and is not in what the server has *stored*, each with both values where changed."""
    return tuple(_compare(sent, stored, ""))


def same_quantity(one: Any, other: Any) -> bool:
    """Whether two quantities are one amount: ``1000m`` and 1, ``1Gi`` and 1073741824."""
    amount = quantity(one)
    return amount is not None and amount == quantity(other)


def quantity(value: Any) -> Decimal | None:
    """Return the amount of a quantity as Kubernetes writes it, or None: it is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = _QUANTITY.match(str(value))
    try:
        return Decimal(match[1]) * _SUFFIXES[match[2]] if match else None
    except InvalidOperation:
        return None


def _compare(sent: Any, stored: Any, path: str) -> Iterator[str]:
    if path in _HARMLESS or _empty(sent):
        return
    if isinstance(sent, Mapping):
        if not isinstance(stored, Mapping):
            yield from [path] if list(_compare(sent, {}, path)) else []
            return
        for key, value in sent.items():
            yield from _compare(value, stored.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(sent, list):
        yield from _compare_lists(sent, stored, path)
    elif _empty(stored):
        # Go leaves out what is false, 0 or empty; where that is not the default, _EXACT finds it.
        if sent not in (False, 0):
            yield path
    elif _exact(path) and not _same(sent, stored):
        yield f"{path} ({sent!r} became {stored!r})"


def _compare_lists(sent: list[Any], stored: Any, path: str) -> Iterator[str]:
    if not isinstance(stored, list) or not stored:
        yield path
        return
    name = path.rpartition(".")[2]
    key = key_of(name, sent, stored)
    if key is not None:
        for one in sent:
            if not isinstance(one, Mapping):
                continue
            where = f"{path}[{one.get(key)}]"
            match = next(
                (other for other in stored if isinstance(other, Mapping) and other.get(key) == one.get(key)),
                None,
            )
            yield from [where] if match is None else _compare(one, match, where)
    elif _exact(path):
        if [str(one) for one in sent] != [str(one) for one in stored]:
            yield f"{path} ({sent!r} became {stored!r})"
    elif all(isinstance(one, Mapping) for one in sent):
        for index, one in enumerate(sent):
            # Some webhooks add items in front: it is enough that one has all of ours.
            if not any(not list(_compare(one, other, "")) and _alike(one, other) for other in stored):
                other = stored[index] if index < len(stored) else None
                yield from list(_compare(one, other, f"{path}[{index}]")) or [f"{path}[{index}]"]
    else:
        yield from (f"{path}[{index}]" for index, one in enumerate(sent) if one not in stored)


def _alike(sent: Any, stored: Any) -> bool:
    """Whether all scalars that both have are the same."""
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        return all(_alike(value, stored[key]) for key, value in sent.items() if key in stored)
    if isinstance(sent, (Mapping, list)) or isinstance(stored, (Mapping, list)):
        return True
    return _same(sent, stored)


def _exact(path: str) -> bool:
    return path.rpartition(".")[2] in _EXACT or path.endswith(".suspend")


def _same(sent: Any, stored: Any) -> bool:
    return sent == stored or str(sent) == str(stored) or same_quantity(sent, stored)


def _empty(value: Any) -> bool:
    """Whether *value* says nothing: null, and mappings and lists of nothing."""
    if isinstance(value, Mapping):
        return all(_empty(one) for one in value.values())
    if isinstance(value, list):
        return all(_empty(one) for one in value)
    return value is None or value == ""
