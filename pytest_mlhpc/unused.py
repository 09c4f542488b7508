"""Which baseline entries no test uses: told only by a session that left out no test."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_mlhpc.options import MARKER_NAMES
from pytest_mlhpc.session import BenchmarkSession

#: Options of pytest that leave tests out; under pytest-xdist the workers do, and the controller counts none of them.
SELECTING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob")


def unused_baselines(
    reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config
) -> list[str]:
    """Return ``benchmark: metric`` of each entry that no declared test is judged by; empty if tests were left out.

    A test uses its entries whatever became of its run.
    """
    if not (_selected_all(reporter, session, config) and _ran_all(reporter, session)):
        return []
    used = {f"{job.spec.benchmark}: {metric}" for job in session.jobs.values() for metric in job.spec.judged}
    return [line for line in session.unused_baselines() if line not in used]


def _selected_all(
    reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config
) -> bool:
    """Whether nothing narrowed the selection: no option, no file or test as argument, no broken or deselected test."""
    return not (
        session.deselected
        or reporter.stats.get("deselected")
        or any(getattr(config.option, name, None) for name in SELECTING)
        or any("::" in argument or Path(argument).is_file() for argument in config.args)
        or any(isinstance(report, pytest.CollectReport) for report in reporter.stats.get("error", ()))
    )


def _ran_all(reporter: pytest.TerminalReporter, session: BenchmarkSession) -> bool:
    """Whether each marked test took its result: none was skipped, and no failure or signal ended the session early.

    Of a test that was skipped when it was collected it is unknown which entries it would use.
    """
    skipped, xfailed = reporter.stats.get("skipped", ()), reporter.stats.get("xfailed", ())
    left_out = [*skipped, *(report for report in xfailed if report.nodeid not in session.jobs)]
    return all(job.taken for job in session.jobs.values()) and not any(
        isinstance(report, pytest.CollectReport) or any(name in report.keywords for name in MARKER_NAMES)
        for report in left_out
    )
