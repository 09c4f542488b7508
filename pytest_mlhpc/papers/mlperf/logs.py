"""A set of logs of one benchmark: written from its runs, found again, and told of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.papers.mlperf import rules
from pytest_mlhpc.papers.mlperf.entries import Submission, entries
from pytest_mlhpc.papers.mlperf.groups import Group
from pytest_mlhpc.papers.mlperf.limits import QUALITY
from pytest_mlhpc.papers.mlperf.scoring import Score
from pytest_mlhpc.papers.mlperf.trained import Trained
from pytest_mlhpc.papers.mlperf.writing import RESULT, write_logs
from pytest_mlhpc.papers.mlperf.writing import text_of as text_of_entries
from pytest_mlhpc.store.text import table

Written = Sequence[tuple[Path, Trained]]


def write(
    folder: Path, group: Group, submission: Submission, *, replace: bool
) -> tuple[Written, tuple[str, ...]]:
    """Write the logs of *group*, and return each with its run; and which runs have none, and why.

    Raises:
        UsageError: mlperf-logging is not installed, *folder* holds results, or the workload is none of MLPerf HPC.
        StoreError: a log cannot be written.
    """
    told = [run for run in group.runs if run.events]
    texts = [text_of_entries(entries(run, submission, rules.departures(run))) for run in told]
    without = tuple(
        f"record {run.record} ({run.verdict}) ended before it told anything"
        for run in group.runs
        if not run.events
    )
    return list(zip(write_logs(folder, texts, replace=replace) if texts else [], told, strict=True)), without


def of(given: Path) -> list[Path]:
    """Return the log at *given*, or the logs in that folder and below it.

    Raises:
        UsageError: the folder holds none, or cannot be read.
    """
    try:
        if not given.is_dir():
            return [given]
        named = (path for path in given.rglob("result_*.txt") if RESULT.match(path.name))
        found = sorted((path for path in named if path.is_file()), key=_order)
    except OSError as error:
        raise UsageError(f"{given}: cannot be read: {error.strerror}") from error
    if not found:
        raise UsageError(f"{given} holds no logs (result_0.txt ...); `mlhpc papers mlperf log` writes them")
    return found


def _order(path: Path) -> tuple[str, int, str]:
    return str(path.parent), len(path.name), path.name


def text_of(group: Group, written: Written, division: str) -> str:
    """Return what people should know of logs that name *division*."""
    rows = [("log", "run", "quality", "training epochs", "time to train")]
    for path, run in written:
        state = "reached its target" if run.reached else "did not converge"
        rows.append((str(path), state, _figure(run.quality), _figure(run.epochs), _seconds(run.time_s)))
    quality = QUALITY[group.workload]
    asked = {quality.target if run.target is None else run.target for run in group.runs}
    targets = " and ".join(f"{one:g}" for one in sorted(asked))
    head = f"{group.name} on {group.machine}: {quality.name}, target {targets}\n"
    return head + table(rows) + f"{score_text(group.score)}\n" + _rules(group, division)


def _rules(group: Group, division: str) -> str:
    found = group.departures
    lines = [f"  {rule.name}: {'; '.join(texts)} ({rule})" for rule, texts in rules.by_rule(found).items()]
    if lines:
        lines.insert(0, "departures from the rules, which the logs name too (mlhpc_departure):")
    lines.append(
        f"by the rules these runs belong in {division_text(group.division)}; their logs say {division}"
    )
    return "".join(f"{line}\n" for line in lines)


def division_text(division: str) -> str:
    """Return what *division*, as :func:`rules.division` names it, is for people."""
    return "no division of MLPerf" if division == rules.NEITHER else f"the {division} division"


def score_text(score: Score) -> str:
    """Return a result for people."""
    if score.seconds is None:
        return f"no result: {score.why}"
    spread = f" \N{PLUS-MINUS SIGN} {100 * score.spread:.1f} %" if score.spread is not None else ""
    slowest = "the one that did not converge" if score.lost else "the slowest"
    return f"olympic mean of {score.runs} runs: {score.seconds:.4g} s{spread} (without the fastest and {slowest})"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g} s"
