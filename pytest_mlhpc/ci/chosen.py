"""Which records a pipeline is about: of one system, since its job began or for some days, the newest of each benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record


@dataclass(frozen=True)
class Selection:
    """Which records are asked for; an empty text is no condition."""

    since_ns: int = 0
    system: str = ""
    commit: str = ""  #: or how it begins
    changes: bool = False  #: only of merge requests, not of nights


def chosen(index: Index, wanted: Selection) -> list[Record]:
    """Return what is asked for, in the order in which it was recorded.

    Raises:
        StoreError: The records cannot be read.
    """
    return newest(
        one
        for one in index.since(wanted.since_ns)
        if (not wanted.system or one.system == wanted.system)
        and one.commit.startswith(wanted.commit)
        and (not wanted.changes or one.purpose == "change")
    )


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest first attempt of each benchmark of each commit on each machine, oldest first.

    Args:
        records: Newest first.
    """
    found: dict[tuple[str, ...], Record] = {}
    for one in records:
        if one.attempt == 0:
            # A run that failed before it had a device would else stand beside the one that was made again.
            found.setdefault(
                (one.commit, one.system, one.partition, one.environment, one.benchmark, one.node_id), one
            )
    return list(found.values())[::-1]
