"""A conftest of the suites in benchmarks/slurm*.py: writes down when pytest had the verdict of each test."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

#: Where lines ``{"name", "seen": epoch seconds, "outcome"}`` go.
REPORTS = "MLHPC_BENCH_REPORTS"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the first report that says how a test ended: its call, or a set-up that went wrong."""
    if report.when == "call" or (report.when == "setup" and report.failed):
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        line = {"name": name, "seen": time.time(), "outcome": f"{report.when} {report.outcome}"}
        with Path(os.environ[REPORTS]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
