"""Regular expressions by which a test takes metrics out of a program's output: refused early if they cannot work."""

from __future__ import annotations

import re


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


def _nested_repeat(pattern: str) -> bool:
    """Return whether an open-ended repeat lies within another, as in ``(a+)+``.

    Looks at the text: groups are brackets outside classes, each remembered with whether it holds a repeat.
    """
    bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\.", "x", pattern))
    holds = [False]
    for match in re.finditer(r"\(|(\)?)(\*|\+|\{\d*,\})?", bare):
        if match[0] == "(":
            holds.append(False)
            continue
        inner = holds.pop() if match[1] and len(holds) > 1 else False
        if inner and match[2]:
            return True
        holds[-1] = holds[-1] or inner or bool(match[2])
    return False
