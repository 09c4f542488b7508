"""Host lists as Slurm writes them, ``rack[1-2]node[01-04],login``, expanded without a query; lists of numbers as Linux writes them, ``0-3,8``."""

from __future__ import annotations

import itertools
import re
from typing import Iterable, List, Tuple

#: Most nodes of one list; Slurm's own limit for one range is 64 k (MAX_RANGE of its hostlist).
MAX_NODES = 65536

#: What Slurm prints where there is no list.
_NO_HOSTS = frozenset({"", "(null)", "None", "None assigned", "N/A", "n/a"})

_SEPARATORS = frozenset(", \t\n")
_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")


class HostlistError(ValueError):
    """A text is no host list; the error names the fault."""


def expand_hostlist(hostlist: str) -> Tuple[str, ...]:
    """Return the nodes of *hostlist* in its order and Slurm's, duplicates included.

    Raises:
        HostlistError: unbalanced or empty brackets, a range that runs backwards, more than MAX_NODES names.
    """
    if hostlist.strip() in _NO_HOSTS:
        return ()
    names: List[str] = []
    for word in _split_hostlist(hostlist.strip()):
        names.extend(_expand_word(word, hostlist, MAX_NODES - len(names)))
    return tuple(names)


def number_list(text: str, most: int = MAX_NODES) -> List[int]:
    """Return the numbers of ``0-3,8``, at most *most*.

    Raises:
        HostlistError: it is no list of numbers, or a longer one.
    """
    try:
        return [int(number) for number in _expand_ranges(text, text, most)]
    except HostlistError as error:
        raise HostlistError(f"{text[:40]!r} is no list of processors") from error


def number_ranges(numbers: Iterable[int], width: int = 0) -> List[str]:
    """Return the parts of a list that Linux would write for *numbers*, ``0-3`` and ``8``, each at least *width* digits wide."""
    ranges = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [f"{number:0{width}d}" for _, number in run]
        ranges.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ranges


def _split_hostlist(hostlist: str) -> List[str]:
    """Split at separators outside brackets: comma, blank, tab, newline, as scontrol does."""
    names, depth, start = [], 0, 0
    for position, character in enumerate(hostlist):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character in _SEPARATORS and depth == 0:
            names.append(hostlist[start:position])
            start = position + 1
        if depth not in {0, 1}:
            raise HostlistError(f"host list {hostlist!r}: brackets do not match")
    if depth:
        raise HostlistError(f"host list {hostlist!r}: brackets do not match")
    names.append(hostlist[start:])
    return [word for word in names if word]


def _expand_word(word: str, hostlist: str, room: int) -> List[str]:
    """Return the names of one word, at most *room*."""
    pieces = re.split(r"\[([^\]]*)\]", word)  # text, inside, text, inside, ..., text
    texts, brackets, count = pieces[::2], [], 1
    for inside in pieces[1::2]:
        brackets.append(_expand_ranges(inside, hostlist, room // count))
        count *= len(brackets[-1])
    if count > room:
        raise HostlistError(f"host list {hostlist[:80]!r}: more than {MAX_NODES} nodes")
    if not brackets:
        return texts
    # Slurm's order, the same from 22.05 to 26.05: the last brackets vary fastest, then the first, the second ...
    slow_to_fast = [*reversed(range(len(brackets) - 1)), len(brackets) - 1]
    names = []
    for numbers in itertools.product(*(brackets[place] for place in slow_to_fast)):
        chosen = [number for _, number in sorted(zip(slow_to_fast, numbers))]
        names.append("".join(map("".join, zip(texts, [*chosen, ""]))))
    return names


def _expand_ranges(inside: str, hostlist: str, room: int) -> List[str]:
    """Return the numbers of ``1-4,07``, as wide as their range's first one, at most *room*."""
    numbers: List[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HostlistError(f"host list {hostlist[:80]!r}: {part!r} is no range of numbers")
        first = match["first"]
        last = match["last"] or first
        size = int(last) - int(first) + 1
        if size < 1:
            raise HostlistError(f"host list {hostlist[:80]!r}: the range {part!r} runs backwards")
        if len(numbers) + size > room:
            raise HostlistError(f"host list {hostlist[:80]!r}: more than {MAX_NODES} nodes")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
