"""What a session prints: the header line, the closing table, and unused baselines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_mlhpc.errors import Problem, StoreError, did_you_mean, nearest
from pytest_mlhpc.jobs.decorators import MARK
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import JobSpec, cut_names
from pytest_mlhpc.judge.rules import MAY_BE_TOO_LOW, NIGHTS
from pytest_mlhpc.node.vet.finding import VetVerdict as NodesVerdict
from pytest_mlhpc.session.bench import Bench, bench_of
from pytest_mlhpc.session.run import change
from pytest_mlhpc.store.record import FINE, NOTABLE, MetricVerdict, Verdict
from pytest_mlhpc.store.text import aligned, count, quantity

if TYPE_CHECKING:
    from pytest_mlhpc.session.against import Comparison
    from pytest_mlhpc.session.each_node import Sweep
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

    No test can ever use such an entry, whatever was selected. A whole file of a system that is not there may be another systems
    file's; it is named if a system is called nearly so.
    """
    found: Counter[str] = Counter()
    strangers = [system for system in session.baseline_files() if system not in bench.places]
    files = [
        f"there is no system {system!r}{hint}: all of its file"
        for system in strangers
        if (hint := did_you_mean(system, bench.places))
    ]
    for key in session.accepted_series():
        known = bench.places.get(key.system)
        if known is None:
            continue
        if key.partition not in known:
            found[_unknown("partition", key.partition, key.system, known)] += 1
        elif key.environment not in (names := known[key.partition]):
            place = f"{key.system}:{key.partition}"
            found[_unknown("environment", key.environment, place, names)] += 1
    return [
        *files,
        *(f"{text}: {number} {'entry' if number == 1 else 'entries'}" for text, number in found.items()),
    ]


def _unknown(kind: str, name: str, place: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known)
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


#: Most lines of a list (deselected tests, unused baselines) below the table.
MOST_LINES = 20

#: Characters of a test's name that are shown however narrow the terminal is.
LEAST_NAME = 20

HEADINGS = ("benchmark", "metric", "value", "baseline", "change", "verdict")


def header(bench: Bench) -> str:
    """Return the line for pytest's header."""
    targets = ", ".join(_places(bench)) or "nothing"
    changed = "".join(f"; set {name}={value}" for name, value in bench.settings.overrides.items())
    changed += f"; against {bench.settings.against}" if bench.settings.against else ""
    preset = f", preset {bench.settings.preset}" if bench.settings.preset else ""
    return (
        f"mlhpc: running on {targets}{preset}{changed}; "
        f"baselines: {bench.settings.baselines_dir}; state: {bench.settings.state_dir}"
    )


def announced(session: BenchmarkSession) -> list[str]:
    """Return what to say before anything runs: presets of trainings, what the session may cost, what became of earlier jobs."""
    return [
        *presets((job.spec for job in session.jobs.values()), session.settings.preset),
        *session.announcement,
    ]


def presets(specs: Iterable[JobSpec], asked: str | None) -> list[str]:
    """Return which presets the trainings among *specs* use and what chose each. *asked*: what --mlhpc-preset says.

    A second line warns of partitions of this machine that train by default, which takes long.
    """
    found: dict[str, None] = {}
    slow: set[str] = set()
    for spec in specs:
        if not spec.is_training:
            continue
        partition, source = spec.target.partition, "systems file"
        if "preset" in spec.asked:
            source = "test"
        elif asked:
            source = "--mlhpc-preset"
        elif partition.preset_is_default:
            source = "default"
            slow |= {partition.id} if partition.scheduler == "local" else set()
        found[f"{spec.preset} ({source})"] = None
    lines = [f"preset: {', '.join(found)}"] if found else []
    if slow:
        lines.append(
            f"{', '.join(sorted(slow))}: trainings of this preset may take hours on this machine; for short ones write "
            "`preset: smoke` in the partition, or give --mlhpc-preset smoke"
        )
    return lines


def list_faults(reporter: pytest.TerminalReporter, faults: Mapping[str, Sequence[Problem]]) -> None:
    """Write what is wrong with tests that --collect-only does not run, once for all targets and parameters."""
    reporter.section("tests that cannot run", sep="=", red=True)
    for line in dict.fromkeys(str(problem) for problems in faults.values() for problem in problems):
        reporter.write_line(f"ERROR {line}")


def _places(bench: Bench) -> list[str]:
    """Return the targets; of a sweep's, how many nodes each partition has."""
    if bench.sweep is None:
        here = " (in this allocation)" if bench.settings.here else ""
        return [target.id + here for target in bench.targets]
    return [f"each of {count(len(nodes), 'node')} of {name}" for name, nodes in bench.sweep.nodes.items()]


def _misplaced(session: BenchmarkSession, config: pytest.Config) -> list[str]:
    bench = bench_of(config)
    return misplaced_baselines(session, bench) if bench is not None else []


def _swept(reporter: pytest.TerminalReporter, session: BenchmarkSession, sweep: Sweep) -> None:
    """Write each node against its peers, and the same to a file for programs."""
    from pytest_mlhpc.session.each_node import lines_of, not_measured, tables_of, write

    settings, jobs = session.settings, list(session.jobs.values())
    tables, missing = tables_of(jobs), not_measured(sweep, jobs)
    reporter.section("nodes", sep="=")
    for line in lines_of(tables, missing):
        reporter.write_line(line)
    folder = settings.state_dir / "runs" / session.id
    try:
        path = write(
            folder, sweep, tables, state_dir=settings.state_dir, missing=missing, overrides=settings.overrides
        )
        reporter.write_line(f"the same for programs: {path}")
    except StoreError as error:
        reporter.write_line(str(error), red=True)


def _compared(reporter: pytest.TerminalReporter, session: BenchmarkSession, comparison: Comparison) -> None:
    """Write the table of A against B, and the same to a file for programs."""
    from pytest_mlhpc.session.against import table_of, write

    jobs = [job for job in session.jobs.values() if job.taken and job.opponent is not None]
    if not jobs:
        return
    reporter.section("A against B", sep="=")
    for line in table_of(jobs, comparison):
        texts = line.rsplit(None, 1)
        reporter.write_line(line, red=texts[-1:] == ["worse"], yellow=texts[-1:] == ["unclear"])
    folder = session.settings.state_dir / "runs" / session.id
    try:
        path = write(folder, jobs, comparison, session.settings.state_dir)
        reporter.write_line(f"the same for programs: {path}")
    except StoreError as error:
        reporter.write_line(str(error), red=True)


def summarise(reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config) -> None:
    """Write the closing section."""
    rows = _rows(reporter, session, config)
    lists = [
        ("not run, as the target lacks what they ask for", folded(session.deselected)),
        ("not ended; the same command, or with --mlhpc-resume, goes on", _queued(session)),
        ("measured beside another user of this machine", _other_users(session)),
        (
            f"baseline entries that no test uses, in {os.path.relpath(session.settings.baselines_dir)}; delete those that are no longer needed",
            unused_baselines(reporter, session, config),
        ),
        ("baseline entries of places that the systems file does not have", _misplaced(session, config)),
    ]
    facts = [line for line in (session.baseline_line(), _doubtful(session), session.history_line()) if line]
    loud = session.trouble or session.notes or facts
    if not rows and not loud and not any(lines for _, lines in lists):
        return
    reporter.section("benchmarks", sep="=")
    columns = config.get_terminal_writer().fullwidth if reporter.isatty else None
    for line, row in zip(table(rows, columns), [HEADINGS, *rows], strict=False):
        reporter.write_line(line, red=_urgency(row) == 0, yellow=_urgency(row) == 1)
    for title, lines in lists:
        if lines:
            reporter.write_line(f"{title}:")
            for line in lines[:MOST_LINES]:
                reporter.write_line(f"  {line}")
            if len(lines) > MOST_LINES:
                reporter.write_line(f"  ... and {len(lines) - MOST_LINES} more")
    for line in facts:
        reporter.write_line(line)
    for line in session.notes:
        reporter.write_line(line, yellow=True)
    for line in session.trouble:
        reporter.write_line(line, red=True)


def folded(lines: Iterable[str]) -> list[str]:
    """Return lines like ``test: reason`` with the tests of each reason together."""
    tests: dict[str, list[str]] = {}
    for line in lines:
        test, _, reason = line.partition(": ")
        tests.setdefault(reason, []).append(test)
    return [
        f"{', '.join(names[:2])}{f' and {len(names) - 2} more' * (len(names) > 2)}: {reason}"
        for reason, names in tests.items()
    ]


def _other_users(session: BenchmarkSession) -> list[str]:
    attempts = [(job, attempt) for job in session.jobs.values() if job.taken for attempt in job.attempts]
    return [f"{job.spec.node_id}: {attempt.beside}" for job, attempt in attempts if attempt.beside]


def _rows(
    reporter: pytest.TerminalReporter, session: BenchmarkSession, config: pytest.Config
) -> list[tuple[str, ...]]:
    """Return the rows of the table, failures first; none where the tables of a sweep or a comparison say more."""
    bench = bench_of(config)
    if bench is not None and bench.sweep is not None and session.jobs:
        _swept(reporter, session, bench.sweep)
        return []
    if session.comparison is not None:
        _compared(reporter, session, session.comparison)
        return []
    if config.option.no_summary:
        return []  # pytest asks plug-ins all the same; what they have to complain of is no summary
    rows = [row for job in session.jobs.values() if job.taken for row in rows_of(job)]
    return sorted(rows, key=_urgency)


def _urgency(row: tuple[str, ...]) -> int:
    """Return 0 for what failed, 1 for what is to be looked at, 2 for what is fine, and the headings."""
    verdict = row[-1].partition(",")[0]
    return 2 if verdict in {*FINE, HEADINGS[-1]} else 1 if verdict in NOTABLE else 0


def _queued(session: BenchmarkSession) -> list[str]:
    return [
        f"{job.spec.node_id.rpartition('::')[2]}: {job.outcome.failure.text}"
        for job in session.queued
        if job.outcome is not None and job.outcome.failure is not None
    ]


def _doubtful(session: BenchmarkSession) -> str:
    """Say of how many new baselines the machine was busy, and with what the first time; empty if of none."""
    judgements = [job.outcome.judgement for job in session.jobs.values() if job.outcome]
    metrics = [metric for judgement in judgements if judgement for metric in judgement.metrics]
    busy = [one.reason.partition(MAY_BE_TOO_LOW)[2] for one in metrics if one.verdict is Verdict.NEW]
    busy = [texts for texts in busy if texts]
    return f"{len(busy)} of them may be too low, as the machine was busy: {busy[0]}" if busy else ""


def rows_of(job: Job) -> list[tuple[str, ...]]:
    """Return the table rows of one run: a row for each judged metric, or what prevented that."""
    outcome, name = job.outcome, job.spec.node_id.partition("::")[2]
    if outcome is None:
        return []
    judgement, measurement = outcome.judgement, outcome.measurement
    if judgement is not None and judgement.metrics:
        return [
            (
                name,
                v.name,
                quantity(v.value, v.unit),
                quantity(v.baseline, v.unit),
                change(v),
                verdict_text(v),
            )
            for v in judgement.metrics
        ]
    if outcome.vetting is not None:
        return [(name, "nodes", _nodes(outcome.vetting), "-", "-", Verdict.UNJUDGED.value)]
    if outcome.granted is not None:
        return [(name, "nodes", ",".join(outcome.granted.nodes)[:40], "-", "-", Verdict.UNJUDGED.value)]
    if outcome.failure is not None or measurement is None:
        return [(name, "-", "-", "-", "-", outcome.failure.outcome if outcome.failure else "no_result")]
    shown = [m for m in measurement.metrics if m.name in job.spec.expected_metrics] or measurement.metrics
    return [(name, m.name, quantity(m.value, m.unit), "-", "-", Verdict.UNJUDGED.value) for m in shown[:3]]


def verdict_text(metric: MetricVerdict) -> str:
    """Return the verdict; of a new series with how many nights it has of those that settle its level."""
    if not metric.settling:
        return metric.verdict.value
    return f"{metric.verdict.value}, {metric.settling} of {NIGHTS} nights"


def table(rows: list[tuple[str, ...]], columns: int | None = None) -> list[str]:
    """Return aligned lines with headings; nothing for no rows.

    Names are cut in the middle where a terminal of so many *columns* would break the lines.
    """
    if not rows:
        return []
    beside = sum(
        2 + max(len(cell) for cell in column) for column in list(zip(HEADINGS, *rows, strict=True))[1:]
    )
    names = [row[0] for row in rows]
    if columns is not None:
        names = cut_names(names, max(LEAST_NAME, columns - 1 - beside))
    cells = [HEADINGS, *[(name, *row[1:]) for name, row in zip(names, rows, strict=True)]]
    return aligned([[[cell] for cell in row] for row in cells])


def _nodes(verdict: NodesVerdict) -> str:
    from pytest_mlhpc.node.vet.verdict_files import node_name

    names = ",".join(dict.fromkeys(map(node_name, verdict.exclude)))
    away = f", without {names}" if names else ""
    return f"{len(verdict.good)}/{len(verdict.nodes)} fit{away}"[:60]
