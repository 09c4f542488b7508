"""`python -m pytest_mlhpc.vet.main SETTINGS` with scripted checks and a scripted child."""

from __future__ import annotations

import os
import sys
import threading

from pytest_mlhpc.vet import files, session
from pytest_mlhpc.vet.main import leave, main
from pytest_mlhpc.vet.programs import Programs


class Stuck:
    """A memory on a file server that does not answer."""

    grace_s = 0.5

    def before(self, *_):
        threading.Event().wait()

    after = before


if __name__ == "__main__":
    stuck = os.environ.get("MLHPC_SCRIPT_STUCK")
    session.MEMORY_S = 0.5 if stuck else session.MEMORY_S
    if stuck == "files":
        files.prepare = Stuck().before
    memory = Stuck() if stuck == "memory" else None
    leave(main(sys.argv[1:], Programs("scripted_passive", "scripted_child"), memory))
