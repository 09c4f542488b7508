"""What a session did not test, after pytest's own last line: servers that were not there, and other skips, one line a reason."""

from __future__ import annotations

import collections
import re
from typing import Any

import pytest

#: How `services.needs` begins the reason of a skip.
_NEEDS = re.compile(r"(?:Skipped: )?needs (\S+): ")


class SkipSummary:
    """Counts skips by reason in the process that has the terminal."""

    def __init__(self) -> None:
        self._servers: collections.Counter[str] = collections.Counter()
        self._reasons: collections.Counter[str] = collections.Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a skip of set-up or body."""
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if server := _NEEDS.match(reason):
            self._servers[server[1]] += 1
        else:
            self._reasons[reason.removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Write the lines."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return  # a session without a terminal
        for line in self.lines():
            reporter.write_line(line)

    def lines(self) -> list[str]:
        """Return what is to be said, the servers last."""
        found = [f"{count} skipped: {reason}" for reason, count in self._reasons.most_common()]
        if self._servers:
            missing = ", ".join(f"{name} ({count} tests)" for name, count in self._servers.most_common())
            found += [
                f"NOT TESTED, because these real servers are not on this machine: {missing}",
                "`make servers` installs all of them on Debian (as root); then run `make test` again",
            ]
        return found
