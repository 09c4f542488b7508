"""PAYLOAD. Whether the kernel has killed something in this container for its memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Tuple

#: Where a container sees its own counts, under cgroup v2 and v1 (Linux, admin-guide/cgroup-v2.rst and
#: cgroup-v1/memory.rst; the count in v1 is there since Linux 4.13).
COUNTERS: Tuple[str, ...] = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def kills(counters: Tuple[str, ...] = COUNTERS) -> int:
    """Return how many processes of this container were killed for its memory limit; 0 where that is not told."""
    for path in counters:
        with contextlib.suppress(OSError, ValueError):
            found = _KILLS.search(Path(path).read_text(encoding="ascii"))
            if found:
                return int(found.group(1))
    return 0


class Watch:
    """Whether the count has grown since this was made."""

    def __init__(self, counters: Tuple[str, ...] = COUNTERS) -> None:
        self._counters = counters
        self._before = kills(counters)

    def grown(self) -> bool:
        """Return whether something has been killed for the memory limit."""
        return kills(self._counters) > self._before
