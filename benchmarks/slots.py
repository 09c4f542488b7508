"""Whether jobs are submitted ahead: 48 jobs of one second in 16 slots need three seconds and a little."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Row

TEST = """
@program(["bash", "-c", "sleep 1; echo rate: 100.0"], RATE)
def test_second_{number}(run):
    assert run["rate"].value == 100.0
"""

SUITE = (
    'from pytest_mlhpc import Metric, program\n\nRATE = Metric("rate", r"rate: (\\S+)", "items/s")\n'
    + "".join(TEST.format(number=number) for number in range(48))
)


def run() -> list[Row]:
    """Time the whole pytest process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_second.py").write_text(SUITE)
        environment = {**os.environ, "MLHPC_STATE": str(folder / "state")}
        environment.pop("CI", None)
        argv = [sys.executable, "-m", "pytest", "-q", "--system", "local:cpu", "-o", "mlhpc_max_jobs=16"]
        begin = time.perf_counter()
        subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True)
        wall = time.perf_counter() - begin
    return [Row("48 `command` jobs of one second, 16 slots, wall", "<= 4.0 s", f"{wall:.2f} s", wall <= 4.0)]
