"""The order of tests on workers of pytest-xdist: those that wait for servers begin first, beside those that compute.

``--dist worksteal`` gives each worker a contiguous part of all tests, which it runs in order; a worker that has none left takes the
end of the longest queue. In the order of folders, the tests of real servers would all come to one worker, and begin last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

#: Tests below it wait for servers most of the time.
_REAL = Path(__file__).with_name("real")
#: Fixtures of shared servers. Tests of one server follow one another, since it costs CPU time for as long as it runs.
_SHARED = ({"kubernetes", "namespace"}, {"slurm"})


def arrange(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order that gives those of real servers to half of the workers, tests marked `long` first.

    Tests of one file stay together, but for those marked `long`.
    """
    long = [[item] for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    files = _by_file(item for item in others if item.path.is_relative_to(_REAL))
    queues: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for tests in [*long, *sorted(files, key=_server)]:
        min(queues[: (workers + 1) // 2], key=len).extend(tests)
    # As pytest-xdist divides them: parts of the same size, the last ones larger by one.
    sizes = [(len(items) + worker) // workers for worker in range(workers)]
    late = [item for queue, size in zip(queues, sizes, strict=True) for item in queue[size:]]
    rest = itertools.chain(late, (item for item in others if not item.path.is_relative_to(_REAL)))
    parts = [
        [*queue[:size], *itertools.islice(rest, max(0, size - len(queue)))]
        for queue, size in zip(queues, sizes, strict=True)
    ]
    return list(itertools.chain(*parts))


def _by_file(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    return [list(found) for _, found in itertools.groupby(items, key=lambda item: item.path)]


def _server(tests: Sequence[pytest.Item]) -> int:
    """Return the place in `_SHARED` of the first server that some test of a file uses."""
    used = {name for item in tests for name in getattr(item, "fixturenames", ())}
    return next((place for place, names in enumerate(_SHARED) if names & used), len(_SHARED))
