"""Regular expressions by which a test takes metrics out of a program's output: refused early if they cannot work.

Whether an expression takes exponential time is judged by its text, and only the plain cases are: what is left is counted
by :func:`choices`, and searched where it can be ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

#: What :func:`choices` says of a pattern that repeats a group.
MANY = 1_000_000

#: A pattern's parts: what a quantifier can follow, brackets, bars, and quantifiers with a lazy or possessive mark.
_TOKEN = re.compile(
    r"(?P<skip>\(\?[a-zA-Z]+\)|\(\?\#[^)]*\))"
    r"|(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P=\w+\))"
    r"|(?P<open>\((?:\?(?:P<\w+>|<?[=!]|[:>]|[a-zA-Z-]+:|\(\w+\)))?)"
    r"|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})[?+]?)"
    r"|(?P<plain>.)",
    re.DOTALL,
)


def wrong_pattern(pattern: object) -> str:
    """Return why *pattern* cannot name a metric, or an empty string: no expression, no group, or without end."""
    if not isinstance(pattern, str):
        return f"pattern {pattern!r} is no text"
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"pattern {pattern!r} is no regular expression: {error}"
    if groups != 1:
        return f"pattern {pattern!r} has {groups} groups; exactly one must catch the figure"
    if _nested_repeat(pattern):
        return f"pattern {pattern!r} repeats a repeat, which can take for ever"
    return ""


def choices(pattern: str) -> int:
    """Return how many repeats of any kind and alternatives a search may have to try again; MANY if it repeats a group.

    The time of a search grows at most like the text's length to the power of one more than this, below MANY.
    """
    count, before = 0, ""
    for kind, text in _tokens(pattern):
        if kind == "repeat" and before == "close":
            return MANY
        count += kind == "bar" or (kind == "repeat" and _span(text) != "fixed")
        before = kind
    return count


@dataclass
class _Group:
    """What has been seen of one group so far; ``needed``: its current branch holds what must match by itself."""

    open_ended: bool = False  #: holds an open-ended repeat
    variable: bool = False  #: its current branch holds a `?` or a repeat of bounded but varying length
    needed: bool = False
    loose: bool = False  #: some branch is made of varying repeats alone: two of its turns can match like one
    branches: list[str] = field(default_factory=lambda: [""])

    def end_branch(self) -> None:
        self.loose = self.loose or (self.variable and not self.needed)
        self.variable = self.needed = False

    @property
    def endless(self) -> bool:
        """Whether repeating it without bound can take exponential time."""
        return self.open_ended or self.loose or len(set(self.branches)) < len(self.branches)


def _nested_repeat(pattern: str) -> bool:
    r"""Return whether an open-ended repeat holds another, as in ``(a+)+``, or a body that can split in many ways.

    Such are ``(\d{1,3},?)+``, of varying repeats alone, and ``(a|a)+``, of equal alternatives.
    """
    stack = [_Group()]
    tokens = [*_tokens(pattern), ("end", "")]
    for (kind, text), (after, quantifier) in pairwise(tokens):
        if kind == "open":
            stack.append(_Group())
        elif kind == "bar":
            stack[-1].end_branch()
            stack[-1].branches.append("")
        elif kind in {"atom", "plain", "close"}:
            inner, body = _Group(), text
            if kind == "close" and len(stack) > 1:
                inner = stack.pop()
                inner.end_branch()
                body = f"({'|'.join(inner.branches)})"
            span = _span(quantifier) if after == "repeat" else "fixed"
            if span == "open" and inner.endless:
                return True
            _take(stack[-1], inner, span, body + (quantifier if after == "repeat" else ""))
    return False


def _take(outer: _Group, inner: _Group, span: str, text: str) -> None:
    """Note in *outer* an atom or a whole group, repeated as *span* says."""
    outer.open_ended = outer.open_ended or inner.open_ended or span == "open"
    outer.variable = outer.variable or inner.loose or span == "varying"
    outer.needed = outer.needed or (span == "fixed" and not inner.loose)
    outer.branches[-1] += text


def _span(quantifier: str) -> str:
    """Return open, varying or fixed, as the number of turns is without bound, between two bounds, or one number."""
    bounds = re.match(r"\{(\d*)(,?)(\d*)\}", quantifier)
    if bounds is None:
        return "varying" if quantifier.startswith("?") else "open"
    low, comma, high = bounds.groups()
    if comma and not high:
        return "open"
    return "varying" if comma and int(low or 0) != int(high) else "fixed"


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    for match in _TOKEN.finditer(pattern):
        if match.lastgroup and match.lastgroup != "skip":
            yield match.lastgroup, match[0]
