"""`python -m pytest_mlhpc.node.vet.main SETTINGS` with scripted checks and a scripted child."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from pytest_mlhpc.node.vet import main, place, verdict_files
from pytest_mlhpc.node.vet.workers import WorkerModules


class Stuck:
    """A memory on a file server that does not answer."""

    grace_s = 0.5

    def before(self, *_):
        threading.Event().wait()

    after = before


if __name__ == "__main__":
    stuck = os.environ.get("MLHPC_SCRIPT_STUCK")
    main.MEMORY_S = 0.5 if stuck else main.MEMORY_S
    if stuck == "files":
        verdict_files.prepare = Stuck().before
    place.MOUNTS = Path(os.environ.get("MLHPC_SCRIPT_MOUNTS") or place.MOUNTS)
    memory = Stuck() if stuck == "memory" else None
    main.leave(main.main(sys.argv[1:], WorkerModules("scripted_passive", "scripted_child"), memory))
