"""A folder with a suite and a systems file for the test cluster, whose pytest a test starts, signals and kills itself."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEMS = """
systems:
  lab:
    partitions:
      cpu:
        scheduler: slurm
        launcher: srun
        nodes: {{cores: 16, memory: 4GiB, max: 4}}
        slurm: {{partition: cpu, max_time: 30m}}
        environments: {{default: {{python: {python}}}}}
        preset: smoke
        time_limit: 2m
"""

#: Longest wait for nodes that tests beside these may hold, and for a session, in seconds; a limit, never a measure.
LIMIT_S = 600.0


@dataclass
class Lab:
    """Such a folder; ``state`` is where its sessions write."""

    folder: Path
    state: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "systems.yaml").write_text(SYSTEMS.format(python=sys.executable))

    def write(self, body: str) -> None:
        """Write the suite."""
        head = "import pathlib, time\nimport pytest\n"
        (self.folder / "test_suite.py").write_text(head + textwrap.dedent(body))

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start pytest with a user's reaction to signals; all that it says goes to its ``stdout``."""
        return subprocess.Popen(
            [
                *("env", "--default-signal=INT,HUP,TERM", sys.executable, "-m", "pytest", "test_suite.py"),
                *("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:benchmark", "--rootdir=."),
                *("--systems-file=systems.yaml", "--system", "lab", *options),
            ],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run pytest to its end."""
        process = self.start(*options)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all sessions."""
        files = sorted((self.state / "records").rglob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def until(what: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until *what* holds, as long as *process* lives."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
