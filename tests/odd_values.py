"""Odd values for whatever reads files, markers or other programs' output: any value in the place of any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

_ABSENT = object()


def odd(
    words: Sequence[str] = ("", "a b", "${X}", "{", "nul\0", "\udcff", "9" * 400, "-1"),
) -> st.SearchStrategy[Any]:
    """Return a strategy of what JSON and YAML hold, *words* among it."""
    some = st.sampled_from(words)
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-1, 2**70),
        st.just(10**400),
        st.floats(),
        st.floats(-2, 2),
        some,
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(some, inner, max_size=2)),
        max_leaves=6,
    )


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value within *value* is."""
    entries = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
    for key, child in entries.items():
        yield (*path, key)
        yield from paths_of(child, (*path, key))


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Return *value* with something odd in one place, or without it, or with one key more."""
    made = copy.deepcopy(value)
    path = draw(st.sampled_from(list(paths_of(value))))
    place = made
    for part in path[:-1]:
        place = place[part]
    new = draw(st.one_of(odd(), st.just(_ABSENT)))
    if new is _ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    if isinstance(place, dict) and draw(st.booleans()):
        place["more"] = draw(odd())
    return made
