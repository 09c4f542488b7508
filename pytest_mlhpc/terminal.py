"""What the terminal shows: the header line, and the closing table with what there is to know beyond it."""

from __future__ import annotations

import pytest

from pytest_mlhpc.bench import Bench, bench_of
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.judge.verdict import Verdict
from pytest_mlhpc.live import Live
from pytest_mlhpc.results.run import change, figure
from pytest_mlhpc.session import BenchmarkSession
from pytest_mlhpc.unused import unused_baselines

_LIVE = pytest.StashKey[Live]()

#: Most lines of a list (deselected tests, unused baselines) below the table.
MOST_LINES = 20

HEADINGS = ("benchmark", "metric", "value", "baseline", "change", "verdict")


def header(bench: Bench) -> str:
    """Return the line for pytest's header."""
    targets = ", ".join(target.id for target in bench.targets) or "nothing"
    preset = f", preset {bench.settings.preset}" if bench.settings.preset else ""
    return (
        f"mlhpc: running on {targets}{preset}; "
        f"baselines: {bench.settings.baselines_dir}; state: {bench.settings.state_dir}"
    )


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
    rows = [row for job in session.jobs.values() if job.taken for row in rows_of(job)]
    provisional = [path for path in session.changed_files if path.parent.name == "provisional"]
    lists = [
        ("not run, as the target lacks what they ask for", session.deselected),
        ("not ended; the same command, or with --resume, goes on", _queued(session)),
        ("baseline entries that no test uses", unused_baselines(reporter, session, config)),
        ("baselines written", [str(path) for path in session.changed_files if path not in provisional]),
        ("first runs on this machine: provisional baselines written", list(map(str, provisional))),
        ("baselines that may be too low", _doubtful(session)),
    ]
    if not rows and not session.trouble and not any(lines for _, lines in lists):
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
    for line in session.trouble:
        reporter.write_line(line, red=True)


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
