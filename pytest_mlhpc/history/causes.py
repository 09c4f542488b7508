"""What else changed when a level changed: environment, commit, nodes. Pure; candidates, not proof."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pytest_mlhpc.history.series import Night, Point

#: Nights on each side whose environments are compared.
NIGHTS = 7
#: What is said of one change, at most.
MOST = 8
#: Said of the checkout, not of the machine; the commit says more.
_IGNORED = frozenset({"commit_changed"})


@dataclass(frozen=True)
class Cause:
    """Something that was *before* on all nights before and *after* on all nights after. Empty: it was not there."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return it for people, as ``driver 570 -> 580``."""
        return f"{self.name} {self.before or '(absent)'} -> {self.after or '(absent)'}"


def causes(points: Sequence[Point], first: int, last: int) -> tuple[Cause, ...]:
    """Return what differs between the nights before *first* and those from *last* on.

    The level changed at one of the points *first* to *last*, both inclusive. What had a value on nights of one side that it
    also had on the other is no candidate: it did not change with the level. Commit first, then the environment by name,
    nodes last.
    """
    before = [point.night for point in points[max(0, first - NIGHTS) : first]]
    after = [point.night for point in points[last : last + NIGHTS]]
    if not before or not after:
        return ()
    names = {name for night in (before[-1], after[0]) for name in night.changes} - _IGNORED
    found = [
        _differs("commit", before, after, lambda night: night.commit),
        *(_differs(name, before, after, _environment(name)) for name in sorted(names)),
        _nodes(before, after),
    ]
    return tuple([cause for cause in found if cause][:MOST])


def _environment(name: str) -> Callable[[Night], str]:
    return lambda night: night.changes.get(name, "")


def _differs(
    name: str, before: Sequence[Night], after: Sequence[Night], value: Callable[[Night], str]
) -> Cause | None:
    """A commit is another one each night: what counts is that no value stands on both sides; the nearest two are told."""
    if {value(night) for night in before} & {value(night) for night in after}:
        return None
    return Cause(name, value(before[-1]), value(after[0]))


def _nodes(before: Sequence[Night], after: Sequence[Night]) -> Cause | None:
    """Nodes are a candidate only where those after are always the same few: otherwise they are drawn by the scheduler."""
    earlier, later = _hosts(before), _hosts(after)
    if not earlier or not later or earlier.keys() & later.keys():
        return None
    if len(after) > 1 and max(later.values()) < len(after):
        return None
    return Cause("nodes", _words(earlier), _words(later))


def _hosts(nights: Iterable[Night]) -> Counter[str]:
    return Counter(host for night in nights for host in night.nodes)


def _words(hosts: Counter[str], most: int = 4) -> str:
    names = sorted(hosts)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "+".join(names[:most]) + more
