"""``mlhpc reap``: end own jobs whose session is dead."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pytest_mlhpc.alert.drill import left, remove, states
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger import Ledger, Prepare, reap_expired_leases
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, describe
from pytest_mlhpc.jobs.ledger_files import OpenEntry, open_entries
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.session.revision import remove_left


@click.command(
    cls=DataCommand,
    help="End own jobs whose session is dead or whose lease has expired. Exit code 1 if something is left that could not "
    "be ended; with --dry-run, if there is something to do. Jobs of other clusters are named and left.",
    example="mlhpc reap --dry-run",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be ended.")
@options.state_dir
def command(dry_run: bool, state_dir: Path) -> CommandReport:
    """Do it."""
    from pytest_mlhpc.provision.reapers import clear_retained, our_reapers, reachable_with

    reachable = reachable_with(os.environ)
    if dry_run:
        return _dry(state_dir, reachable)
    _notes(reap_drills(state_dir))
    report = _reap(state_dir, our_reapers(os.environ), reachable)
    cleared = [(str(one), one.done) for one in clear_retained(state_dir, os.environ)]
    return _with_objects(report, cleared, failed=not all(done for _, done in cleared))


@dataclass(frozen=True)
class _Row:
    """One allocation: what becomes of it, and whether that is its end."""

    entry: LedgerEntry
    why: str
    done: str
    ended: bool

    def __str__(self) -> str:
        return clean(f"{describe(self.entry)}: {self.why}: {self.done}")


def _anywhere(_entry: LedgerEntry) -> bool:
    return True


def _dry(state_dir: Path, reachable: Callable[[LedgerEntry], bool] = _anywhere) -> CommandReport:
    survey = open_entries(state_dir)
    reapable = [entry for entry in survey.entries if entry.reapable]
    rows = [
        *_elsewhere(reapable, reachable),
        *(
            _Row(entry.submitted, entry.why, "would be ended", ended=True)
            for entry in reapable
            if reachable(entry.submitted)
        ),
    ]
    from pytest_mlhpc.provision.kubernetes.reap import overdue_retained

    objects = [(line, True) for line in overdue_retained(state_dir, time.time())]
    _notes([f"{folder}: left by a drill that was killed; would be removed" for folder in left(state_dir)])
    _notes(survey.left_alone)
    report = _report(rows, len(survey.entries) - len(reapable), "would be ended")
    return _with_objects(report, objects, failed=bool(objects) or any(row.ended for row in rows))


def _elsewhere(expired: Sequence[OpenEntry], reachable: Callable[[LedgerEntry], bool]) -> Iterator[_Row]:
    """Yield what cannot be ended here, as it is another cluster's."""
    for entry in expired:
        if not reachable(entry.submitted):
            name = entry.submitted.cluster
            cluster = f"the cluster {name}" if name else "another cluster"
            done = f"left, as it is a job of {cluster}; run `mlhpc reap` there"
            yield _Row(entry.submitted, entry.why, done, ended=False)


def _reap(
    state_dir: Path, reapers: Mapping[str, Prepare], reachable: Callable[[LedgerEntry], bool] = _anywhere
) -> CommandReport:
    # Without a state directory there is nothing to reap, and none is made.
    ledger = Ledger(state_dir, f"reap-{uuid7()}")
    try:
        adoption, reaped = reap_expired_leases(ledger, reapers, reachable=reachable)
        ledger.close()
        stuck = remove_left([state_dir], state_dir, "")
    except StoreError as error:  # a full or read-only disk: what is open stays so
        _notes([str(error)])
        return _report((), None, "ended", failed=True)
    _notes([*adoption.left_alone, *adoption.notes, *stuck])
    survey = open_entries(state_dir, me=ledger.name)
    reapable = [entry for entry in survey.entries if entry.reapable]
    unclaimed = [
        _Row(entry.submitted, entry.why, "not ended, its ledger could not be claimed", ended=False)
        for entry in reapable
        if reachable(entry.submitted)
    ]
    rows = [
        *(_Row(one.entry, one.why, one.done, one.ended) for one in reaped),
        *_elsewhere(reapable, reachable),
        *unclaimed,
    ]
    failed = bool(unclaimed or stuck) or not all(one.ended for one in reaped)
    return _report(rows, len(survey.entries) - len(reapable), "ended", failed=failed)


def reap_drills(state_dir: Path) -> list[str]:
    """End and remove what drills left that were killed; return a line for each."""
    from pytest_mlhpc.provision.reapers import our_reapers, reachable_with

    lines = []
    for folder in left(state_dir):
        reports = [
            _reap(state, our_reapers(os.environ), reachable_with(os.environ)) for state in states(folder)
        ]
        if any(one.code or one.data["left"] for one in reports):
            jobs = "".join(one.text for one in reports)
            lines.append(
                f"{folder}: left by a drill that was killed; it stays until its jobs have ended:\n{jobs}"
            )
            continue
        why = remove(folder)
        lines.append(f"{folder}: left by a drill that was killed; {why or 'removed'}")
    return lines


def _report(rows: Sequence[_Row], left: int | None, done: str, *, failed: bool = False) -> CommandReport:
    """Return what became of allocations; *left* are those that a session watches, None where that is not known."""
    data = {
        "allocations": [
            {
                "id": row.entry.id,
                "name": row.entry.job_name,
                "job_id": row.entry.native_id,
                "partition": row.entry.partition,
                "why": row.why,
                "done": row.done,
                "ended": row.ended,
            }
            for row in rows
        ],
        "left": left,
    }
    text = "".join(f"{row}\n" for row in rows)
    if left is not None:
        watched = f"; {left} left, as a session watches them or their lease is good" if left else ""
        text += f"{sum(row.ended for row in rows)} {done}{watched}\n"
    return CommandReport(text, data, code=1 if failed else 0)


def _with_objects(
    report: CommandReport, objects: Sequence[tuple[str, bool]], *, failed: bool
) -> CommandReport:
    """Return *report* with what becomes of objects that stayed in clusters for inspection: a line, and whether it is done."""
    lines = "".join(f"{clean(line)}\n" for line, _ in objects)
    data = {**report.data, "objects": [{"what": line, "done": done} for line, done in objects]}
    return CommandReport(report.text + lines, data, code=1 if failed else report.code)


def _notes(notes: Sequence[str]) -> None:
    sys.stderr.writelines(f"{clean(note)}\n" for note in notes)
