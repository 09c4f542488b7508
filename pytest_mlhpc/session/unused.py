"""Which baseline entries judge nothing: no test uses them, or the systems file has no such place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_mlhpc.errors import nearest
from pytest_mlhpc.jobs.decorators import MARK
from pytest_mlhpc.session.bench import Bench
from pytest_mlhpc.session.session import BenchmarkSession

#: Options of pytest that leave tests out; under pytest-xdist the workers do, and the controller counts none of them.
SELECTING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob")


def unused_baselines(
    reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config
) -> list[str]:
    """Return ``benchmark: metric`` of each entry that no declared test is judged by; empty if tests were left out.

    A test uses its entries whatever became of its run. An entry that was misspelt names what it was most likely meant for.
    """
    if not (_selected_all(reporter, session, config) and _ran_all(reporter, session)):
        return []
    used = {f"{job.spec.benchmark}: {metric}" for job in session.jobs.values() for metric in job.spec.judged}
    waiting = session.unaccepted()
    return [_hinted(line, waiting) for line in session.unused_baselines() if line not in used]


def misplaced_baselines(session: BenchmarkSession, bench: Bench) -> list[str]:
    """Return each partition and environment of baseline files that the systems file does not have, with the nearest one.

    No test can ever use such an entry, whatever was selected.
    """
    found: Counter[str] = Counter()
    for key in session.accepted_series():
        known = bench.places.get(key.system)
        if known is None:
            continue
        if key.partition not in known:
            found[_unknown("partition", key.partition, key.system, known)] += 1
        elif key.environment not in (names := known[key.partition]):
            place = f"{key.system}:{key.partition}"
            found[_unknown("environment", key.environment, place, names)] += 1
    return [f"{text}: {number} {'entry' if number == 1 else 'entries'}" for text, number in found.items()]


def _unknown(kind: str, name: str, place: str, known: Iterable[str]) -> str:
    meant = nearest(name, known)
    hint = f" (did you mean {meant!r}?)" if meant else ""
    return f"{place} has no {kind} {name!r}{hint}"


def _hinted(line: str, waiting: Iterable[str]) -> str:
    test, _, metric = line.rpartition(": ")
    pairs = [one.rpartition(": ")[::2] for one in waiting]
    if name := nearest(test, [one for one, other in pairs if other == metric]):
        meant = f"{name}: {metric}"
    else:
        name = nearest(metric, [other for one, other in pairs if one == test])
        meant = f"{test}: {name}" if name else ""
    return f"{line} (did you mean {meant!r}, which has no baseline?)" if meant else line


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
    """Whether each benchmark took its result: none was skipped, and no failure or signal ended the session early.

    Of a test that declares no job (skipped when it was collected, or wrong) it is unknown which entries it would use.
    """
    without_job = (*reporter.stats.get("xfailed", ()), *reporter.stats.get("error", ()))
    left_out = [
        *reporter.stats.get("skipped", ()),
        *(report for report in without_job if report.nodeid not in session.jobs),
    ]
    return all(job.taken for job in session.jobs.values()) and not any(
        isinstance(report, pytest.CollectReport) or MARK in report.keywords for report in left_out
    )
