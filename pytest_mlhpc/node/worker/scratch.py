"""PAYLOAD, standard library only. Where a run keeps files that are of no use after it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def of_run(directory: Path) -> Path:
    """Return a folder below *directory*, the plan's, that goes with the allocation, also where ranks are killed outright.

    What lies there is removed by the session when the allocation is over, else by the next session or by ``mlhpc reap``.
    """
    folder = directory / "data"
    with contextlib.suppress(OSError):  # told by what follows
        folder.mkdir(exist_ok=True)
    return folder
