"""The exit code: what became of the session, in one number."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_mlhpc.session.phases import INFRA_ATTRIBUTE
from pytest_mlhpc.session.session import BenchmarkSession


@dataclass
class Tally:
    """Counts failed reports by whose fault they are."""

    infrastructure: int = 0
    other: int = 0

    def count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Take in a report of a phase of a test, or of a collector."""
        if report.failed:
            if getattr(report, INFRA_ATTRIBUTE, False):
                self.infrastructure += 1
            else:
                self.other += 1


#: Work is still queued: try again later (EX_TEMPFAIL of sysexits.h, 4.3BSD).
QUEUED = 75


def exit_code(status: int, tally: Tally, session: BenchmarkSession) -> int:
    """Return the code for pytest's *status*.

    0: all measured and passed; 1: a failure; ``mlhpc_infra_exit_code``: infrastructure errors only; 3: an error of our own;
    5: nothing was measured; 75: work is still queued, whatever became of the rest. 2 (interrupted) and 4 (usage) stay.
    """
    interrupted = status == pytest.ExitCode.INTERRUPTED and not session.told_to_end
    if session.queued and not session.crashed and not interrupted:
        return QUEUED
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        return status
    if session.crashed:
        return pytest.ExitCode.INTERNAL_ERROR
    if status == pytest.ExitCode.TESTS_FAILED:
        only_infrastructure = tally.infrastructure and not tally.other
        return session.settings.infra_exit_code if only_infrastructure else status
    if session.trouble:
        return session.settings.infra_exit_code
    return status if session.measured() else pytest.ExitCode.NO_TESTS_COLLECTED
