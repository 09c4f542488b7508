"""CPU seconds of tests and all processes that they waited for: ``pytest --cpu 20`` lists the most expensive tests.

Wall time is no measure where tests run side by side on a busy machine; user and system time are.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Generator
from typing import Any

import pytest


def cpu_s() -> float:
    """Return user and system seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Meter:
    """Notes in every report what was spent since the report before; sums up where the terminal is."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._last = cpu_s()
        self._spent: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Put the seconds into the report: pytest-xdist carries attributes of reports to its controller."""
        report = yield
        now = cpu_s()
        report.cpu_s, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Sum up by test."""
        self._spent[report.nodeid] += getattr(report, "cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List folders, then tests."""
        folders: collections.Counter[str] = collections.Counter()
        for node, seconds in self._spent.items():
            folders[node.partition("::")[0].rpartition("/")[0]] += seconds
        terminalreporter.section(f"CPU seconds of tests: {sum(self._spent.values()):.1f}")
        for spent in (folders, self._spent):
            for name, seconds in spent.most_common(self._rows):
                terminalreporter.write_line(f"{seconds:8.2f}  {name}")
