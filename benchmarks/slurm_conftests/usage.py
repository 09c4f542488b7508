"""A conftest of the suite in benchmarks/slurm_queued.py: writes down what the session took."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path


def pytest_unconfigure() -> None:
    """Write CPU seconds and the most memory of this process, and CPU seconds of the commands that it ran."""
    own, commands = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    usage = {
        "own": own.ru_utime + own.ru_stime,
        "commands": commands.ru_utime + commands.ru_stime,
        "mb": own.ru_maxrss / 1024,
    }
    Path(os.environ["MLHPC_BENCH_RESULT"]).write_text(json.dumps(usage), encoding="utf-8")
