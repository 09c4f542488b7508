"""``mlhpc baseline``: show, compare, accept and propose accepted values."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pytest_mlhpc.alert import book as alert_book
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NounGroup
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.judge import baselines
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import SeriesKey, default_branch_of
from pytest_mlhpc.store.text import count, quantity, table

_NOTHING = "no value is accepted yet; accept one: mlhpc baseline accept TEST --reason TEXT\n"


@click.group(
    cls=NounGroup,
    help="Accepted values, which later runs are judged against. They lie in git, one file for each system.",
    example='mlhpc baseline accept suites/test_a.py::test_a --reason "new compiler"',
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    cls=DataCommand,
    help="Show the accepted values of SYSTEM, or of all.",
    example="mlhpc baseline show cirrus",
)
@click.argument("system", default="")
@options.baselines_dir
@options.state_dir
def show(system: str, baselines_dir: Path, state_dir: Path) -> CommandReport:
    """Return a row for each accepted value."""
    entries = _entries(BaselineBook(baselines_dir, state_dir), system)
    data = [dataclasses.asdict(key) | dataclasses.asdict(entry) for key, entry in entries.items()]
    return CommandReport(_table(entries) if entries else _NOTHING, {"baselines": data})


@command.command(
    cls=DataCommand,
    help="Compare the newest records with the accepted values of SYSTEM, or of all.",
    example="mlhpc baseline diff cirrus",
)
@click.argument("system", default="")
@options.baselines_dir
@options.state_dir
def diff(system: str, baselines_dir: Path, state_dir: Path) -> CommandReport:
    """Return a row for each accepted value."""
    entries = _entries(BaselineBook(baselines_dir, state_dir), system)
    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        text, rows = _diff(entries, index)
    return CommandReport(text if entries else _NOTHING, {"baselines": rows})


@command.command(
    cls=DataCommand,
    short_help="Make what was recorded last the accepted value: of a test, a record, a session, or what an alert tells of.",
    help="Make what was recorded last the accepted value: of a test, of one record, or of all that is new in a session, by "
    "their ids; or of all that an alert tells of, by its id: the alert ends, because this shall stay so.",
    example='mlhpc baseline accept suites/test_a.py::test_a --reason "new compiler"',
)
@click.argument("what", nargs=-1, required=True, metavar="TEST|RECORD|SESSION|ALERT...")
@click.option("--reason", required=True, metavar="TEXT", help="Why the new value is right; kept in the file.")
@options.baselines_dir
@options.state_dir
def accept(what: Sequence[str], reason: str, baselines_dir: Path, state_dir: Path) -> CommandReport:
    """Accept all that is named."""
    baselines.require_reason(reason)
    alerts = alert_book.alerts_of(state_dir, what)
    tests = [one for one in what if one not in alerts]
    book = BaselineBook(baselines_dir, state_dir)
    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        settled = _settled(book, index, state_dir, default_branch_of(Path.cwd())) if tests else {}
        accepted = [one for test in tests for one in baselines.accept(book, index, test, reason, settled)]
        worse = [series for subjects in alerts.values() for one in subjects if (series := one.series)]
        changed_levels = baselines.accept_series(book, index, worse, reason)
    written = [str(path) for path in book.save()]
    ended = [alert_book.accept(state_dir, one, reason) for one in sorted(alerts)]
    done = [one for one in ended if one is not None]
    lines = [
        *map(_accepted, [*accepted, *changed_levels]),
        *_left(len(worse) - len(changed_levels)),
        *(f"written: {path}" for path in written),
        *(one.text for one in done),
    ]
    data = {
        "accepted": [_accepted_data(one.key, one.entry, one.old) for one in [*accepted, *changed_levels]],
        "written": written,
        "alerts": [one.subject for one in done],
    }
    code = 0 if len(done) == len(ended) else alert_book.LATER
    return CommandReport("".join(f"{line}\n" for line in lines), data, code)


def _left(number: int) -> list[str]:
    """Return what is said of series of alerts that have nothing to accept."""
    text = "have no whole newest run in this store: their accepted values stay as they are"
    return [f"{count(number, 'series')} of what is accepted {text}"] if number else []


@command.command(
    cls=DataCommand,
    short_help="Accept the levels that new series have settled, and push the accepted values as a merge request.",
    help="Accept the levels that new series have settled by their first nights, and push the accepted values of this folder to "
    "a new branch, as a merge request on GitLab.",
    example='mlhpc baseline propose --branch baseline/42 --reason "new compiler"',
)
@click.option("--branch", required=True, metavar="NAME", help="That is made for it.")
@click.option("--reason", required=True, metavar="TEXT", help="For those who review it.")
@click.option("--target", metavar="NAME", help="[default: $CI_DEFAULT_BRANCH, else main]")
@click.option("--remote", metavar="URL", help="[default: $CI_PROJECT_URL, else origin]")
@options.baselines_dir
@options.state_dir
def propose(
    *, branch: str, reason: str, target: str | None, remote: str | None, baselines_dir: Path, state_dir: Path
) -> CommandReport:
    """Write what has settled, push a commit, and say where."""
    from pytest_mlhpc.ci.gitlab import Proposal
    from pytest_mlhpc.ci.gitlab import propose as push

    baselines.require_reason(reason)
    target = target or os.environ.get("CI_DEFAULT_BRANCH") or "main"
    book = BaselineBook(baselines_dir, state_dir)
    with contextlib.closing(Index(state_dir, patience_s=0)) as index:
        settled = _settled(book, index, state_dir, target)
    for key, entry in settled.items():
        book.put(key, replace(entry, reason=f"{reason.strip()} ({entry.reason})"))
    book.save()
    lines = [
        f"settled: {key.benchmark} {key.metric}: {quantity(entry.value, entry.unit)} (median of {entry.runs} nights)"
        for key, entry in settled.items()
    ]
    project = os.environ.get("CI_PROJECT_URL", "")
    proposal = Proposal(
        root=Path.cwd(),
        folder=baselines_dir,
        branch=branch,
        reason=reason,
        target=target,
        remote=remote or (f"{project}.git" if project else ""),
        token=os.environ.get("MLHPC_GITLAB_TOKEN", "").strip(),
    )
    commit = push(proposal)
    last = f"pushed {commit[:12]} to {branch}, to be merged into {proposal.target}"
    lines.append(last if commit else f"nothing to propose: {baselines_dir} is as in this commit")
    data = {
        "settled": [_accepted_data(key, entry) for key, entry in settled.items()],
        "commit": commit or None,
        "branch": branch,
        "target": target,
    }
    return CommandReport("".join(f"{line}\n" for line in lines), data)


def _settled(book: BaselineBook, index: Index, state_dir: Path, branch: str) -> Mapping[SeriesKey, Entry]:
    """Return the levels that nights have settled and nobody has accepted."""
    from pytest_mlhpc.history.events import events
    from pytest_mlhpc.history.judge_inputs import settled_entries
    from pytest_mlhpc.history.series import LocalSource

    source = LocalSource(state_dir, index=index)
    return dict(
        settled_entries(source, book, events(state_dir), default_branch=branch, now_ns=time.time_ns())
    )


def _entries(book: BaselineBook, system: str) -> Mapping[SeriesKey, Entry]:
    known = book.systems()
    found: dict[SeriesKey, Entry] = {}
    for name in [system] if system else sorted({*known, *book.provisional_systems()}):
        found |= {**book.provisional_entries(name), **book.entries(name)}  # reviewed ones win
    if system and not found:
        meant = did_you_mean(system, known)
        raise UsageError(f"system {system!r} has no accepted values{meant}")
    return dict(sorted(found.items(), key=lambda item: dataclasses.astuple(item[0])))


def _table(entries: Mapping[SeriesKey, Entry]) -> str:
    rows = [
        ("system:partition", "benchmark", "metric", "value", "tolerance", "runs", "accepted", "by", "reason")
    ]
    for key, entry in entries.items():
        value, tolerance = quantity(entry.value, entry.unit), f"{entry.tolerance:.1%}"
        where = f"{key.system}:{key.partition}"
        decision = entry.date[:10], entry.accepted_by, entry.reason
        rows.append((where, key.benchmark, key.metric, value, tolerance, str(entry.runs), *decision))
    return table(rows)


def _diff(entries: Mapping[SeriesKey, Entry], index: Index) -> tuple[str, list[dict[str, Any]]]:
    """Return the table, and its rows for programs."""
    rows = [("system:partition", "benchmark", "metric", "accepted", "newest", "change", "verdict")]
    data = []
    for key, entry in entries.items():
        record = index.newest_of(key)
        metric = record.measurement.metric(key.metric) if record and record.measurement else None
        epoch = changed(entry.epoch, record.epoch) if record else ""
        change = None if metric is None or epoch else -drop(metric.value, entry.value, entry.better)
        newest = {"newest": metric.value if metric else None, "change": change, "epoch": epoch}
        data.append({**dataclasses.asdict(key), "accepted": entry.value, "unit": entry.unit, **newest})
        where = f"{key.system}:{key.partition}", key.benchmark, key.metric
        newest_text = quantity(metric.value, metric.unit) if metric else "not recorded"
        change_text = f"new epoch: {epoch}" if epoch else "" if change is None else _change(change)
        verdict = record.verdict if record else ""
        rows.append((*where, quantity(entry.value, entry.unit), newest_text, change_text, verdict))
    return table(rows), data


def _accepted(one: baselines.Accepted) -> str:
    was = f", was {quantity(one.old.value, one.old.unit)}" if one.old else ""
    runs = f"median of {one.entry.runs} runs" if one.entry.runs > 1 else "one run"
    name = f"{one.key.benchmark} {one.key.metric}"
    return f"accepted: {name}: {quantity(one.entry.value, one.entry.unit)}{was} ({runs})"


def _accepted_data(key: SeriesKey, entry: Entry, old: Entry | None = None) -> dict[str, Any]:
    was = old.value if old else None
    return {
        **dataclasses.asdict(key),
        "value": entry.value,
        "unit": entry.unit,
        "runs": entry.runs,
        "was": was,
    }


def _change(change: float) -> str:
    word = "" if abs(change) < 0.0005 else " (better)" if change > 0 else " (worse)"
    return f"{change:+.1%}{word}"
