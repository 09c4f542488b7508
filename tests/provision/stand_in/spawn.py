"""Starts the ranks as torchrun does, waits for all of them, and hides how they ended."""

from __future__ import annotations

import os
import subprocess
import sys

ranks = int(sys.argv[1])
argv = [sys.argv[2], "-m", "pytest_mlhpc.node.worker.main"]
places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
started = [subprocess.Popen(argv, env={**os.environ, **place}) for place in places]
codes = [process.wait() for process in started]
sys.exit(1 if any(codes) else 0)
