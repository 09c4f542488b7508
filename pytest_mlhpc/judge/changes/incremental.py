"""From night to night: what is long settled is not looked for again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pytest_mlhpc.judge.changes.detect import Change, Detector, find

#: Points after which a change is settled: enough for both its levels to be known far better than they vary.
SETTLED = 60


def find_next(
    values: Sequence[float], known: Sequence[Change], settings: Detector | None = None, settled: int = SETTLED
) -> tuple[Change, ...]:
    """Return the changes of *values*, of which those *known* were found when it was shorter.

    Of the known changes those with *settled* points behind them stay as they were; the search begins at the last of
    them. Its work depends on the age of that one, not on the length of the history.

    Raises:
        UsageError: NumPy is not installed.
    """
    kept = [change for change in known if change.index <= len(values) - settled]
    begin = kept[-1].index if kept else 0
    newer = (
        dataclasses.replace(
            change, index=change.index + begin, first=change.first + begin, last=change.last + begin
        )
        for change in find(values[begin:], settings)
    )
    return (*kept, *newer)
