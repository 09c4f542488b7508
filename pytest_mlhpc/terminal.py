"""What the terminal shows: the header line, and the closing table with what there is to know beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_mlhpc.bench import Bench, bench_of
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.judge.verdict import Verdict
from pytest_mlhpc.live import Live
from pytest_mlhpc.results.run import change, figure
from pytest_mlhpc.session import BenchmarkSession
from pytest_mlhpc.unused import unused_baselines
from pytest_mlhpc.vet.verdict import Verdict as NodesVerdict

if TYPE_CHECKING:
    from pytest_mlhpc.sweep import Sweep

_LIVE = pytest.StashKey[Live]()

#: Most lines of a list (deselected tests, unused baselines) below the table.
MOST_LINES = 20

HEADINGS = ("benchmark", "metric", "value", "baseline", "change", "verdict")


def header(bench: Bench) -> str:
    """Return the line for pytest's header."""
    targets = ", ".join(_places(bench)) or "nothing"
    changed = "".join(f"; set {name}={value}" for name, value in bench.settings.overrides.items())
    preset = f", preset {bench.settings.preset}" if bench.settings.preset else ""
    return (
        f"mlhpc: running on {targets}{preset}{changed}; "
        f"baselines: {bench.settings.baselines_dir}; state: {bench.settings.state_dir}"
    )


def _places(bench: Bench) -> list[str]:
    """Return the targets; of a sweep's, how many nodes each partition has."""
    if bench.sweep is None:
        here = " (in this allocation)" if bench.settings.here else ""
        return [target.id + here for target in bench.targets]
    return [f"each of {len(nodes)} nodes of {name}" for name, nodes in bench.sweep.nodes.items()]


def _swept(reporter: pytest.TerminalReporter, session: BenchmarkSession, sweep: Sweep) -> None:
    """Write each node against its peers, and the same to a file for programs."""
    from pytest_mlhpc import sweep_report

    settings, jobs = session.settings, list(session.jobs.values())
    tables, missing = sweep_report.tables_of(jobs), sweep_report.not_measured(sweep, jobs)
    reporter.section("nodes", sep="=")
    for line in sweep_report.lines_of(tables, missing):
        reporter.write_line(line)
    folder = settings.state_dir / "runs" / session.id
    try:
        path = sweep_report.write(
            folder, sweep, tables, state_dir=settings.state_dir, missing=missing, overrides=settings.overrides
        )
        reporter.write_line(f"the same for programs: {path}")
    except StoreError as error:
        reporter.write_line(str(error), red=True)


def live_of(config: pytest.Config) -> Live | None:
    """Return who draws progress; None in processes that have no terminal or no session."""
    bench = bench_of(config)
    if bench is None or bench.session is None or not config.pluginmanager.hasplugin("terminalreporter"):
        return None
    if _LIVE not in config.stash:
        jobs = bench.session.jobs
        config.stash[_LIVE] = Live(config, jobs.values)
    return config.stash[_LIVE]


def summarise(reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config) -> None:
    """Write the closing section."""
    rows = _rows(reporter, session, config)
    provisional = [path for path in session.changed_files if path.parent.name == "provisional"]
    lists = [
        ("not run, as the target lacks what they ask for", session.deselected),
        ("not ended; the same command, or with --resume, goes on", _queued(session)),
        ("baseline entries that no test uses", unused_baselines(reporter, session, config)),
        ("baselines written", [str(path) for path in session.changed_files if path not in provisional]),
        ("first runs on this machine: provisional baselines written", list(map(str, provisional))),
        ("baselines that may be too low", _doubtful(session)),
    ]
    if not rows and not session.trouble and not session.notes and not any(lines for _, lines in lists):
        return
    reporter.section("benchmarks", sep="=")
    for line in table(rows):
        reporter.write_line(line)
    for title, lines in lists:
        if lines:
            reporter.write_line(f"{title}:")
            for line in lines[:MOST_LINES]:
                reporter.write_line(f"  {line}")
            if len(lines) > MOST_LINES:
                reporter.write_line(f"  ... and {len(lines) - MOST_LINES} more")
    for line in session.notes:
        reporter.write_line(line, yellow=True)
    for line in session.trouble:
        reporter.write_line(line, red=True)


def _rows(
    reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config
) -> list[tuple[str, ...]]:
    """Return the rows of the table; none where the tables of a sweep say more, a row for each of a thousand nodes."""
    bench = bench_of(config)
    if bench is not None and bench.sweep is not None and session.jobs:
        _swept(reporter, session, bench.sweep)
        return []
    if config.option.no_summary:
        return []  # pytest asks plug-ins all the same; what they have to complain of is no summary
    return [row for job in session.jobs.values() if job.taken for row in rows_of(job)]


def _queued(session: BenchmarkSession) -> list[str]:
    return [
        f"{job.spec.node_id.rpartition('::')[2]}: {job.outcome.failure.text}"
        for job in session.queued
        if job.outcome is not None and job.outcome.failure is not None
    ]


def _doubtful(session: BenchmarkSession) -> list[str]:
    """Return a line for each new baseline that was taken while the machine was busy."""
    return [
        f"{job.spec.node_id.rpartition('::')[2]}: {verdict.name}: {verdict.reason.partition('; ')[2]}"
        for job in session.jobs.values()
        if job.outcome is not None and job.outcome.judgement is not None
        for verdict in job.outcome.judgement.metrics
        if verdict.verdict is Verdict.NEW and "; " in verdict.reason
    ]


def rows_of(job: Job) -> list[tuple[str, ...]]:
    """Return the table rows of one run: a row for each judged metric, or what kept it from being judged."""
    outcome, name = job.outcome, job.spec.node_id.rpartition("::")[2]
    if outcome is None:
        return []
    judgement, measurement = outcome.judgement, outcome.measurement
    if judgement is not None and judgement.metrics:
        return [
            (name, v.name, f"{figure(v.value)} {v.unit}", figure(v.baseline), change(v), v.verdict.value)
            for v in judgement.metrics
        ]
    if outcome.vetting is not None:
        return [(name, "nodes", _nodes(outcome.vetting), "-", "-", Verdict.UNJUDGED.value)]
    if outcome.held is not None:
        return [(name, "nodes", ",".join(outcome.held.nodes)[:40], "-", "-", Verdict.UNJUDGED.value)]
    if outcome.failure is not None or measurement is None:
        return [(name, "-", "-", "-", "-", outcome.failure.outcome if outcome.failure else "no_result")]
    shown = [m for m in measurement.metrics if m.name in job.spec.expected_metrics] or measurement.metrics
    return [
        (name, m.name, f"{figure(m.value)} {m.unit}", "-", "-", Verdict.UNJUDGED.value) for m in shown[:3]
    ]


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return aligned lines with headings; nothing for no rows."""
    if not rows:
        return []
    cells = [HEADINGS, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _nodes(verdict: NodesVerdict) -> str:
    from pytest_mlhpc.vet.files import node_name

    names = ",".join(dict.fromkeys(map(node_name, verdict.exclude)))
    away = f", without {names}" if names else ""
    return f"{len(verdict.good)}/{len(verdict.nodes)} fit{away}"[:60]
