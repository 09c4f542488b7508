"""Resuming: which allocations of earlier sessions this session needs, and how those that it has claimed become attempts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.jobs.job import AdoptedAllocation, Attempt, Job
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, spec_digest
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import from_json


@dataclass(frozen=True)
class Resumed:
    """``adopted`` by partition id; ``unusable`` are entries that cannot be gone on with, and why: they are to be ended.

    ``unseen`` are entries whose plan cannot be read now: they stay as they are.
    """

    adopted: Mapping[str, tuple[AdoptedAllocation, ...]]
    unusable: Mapping[str, tuple[LedgerEntry, str]]
    unseen: Mapping[str, str]


def is_needed_by(jobs: Iterable[Job]) -> Callable[[LedgerEntry], bool]:
    """Return the question whether an entry holds a run of one of *jobs*."""
    # nodes that nobody uses are given back
    known = {_job_key(job) for job in jobs if not job.spec.holds_nodes}
    return lambda entry: (
        entry.scheduler != "local" and any((run.node_id, run.digest) in known for run in entry.runs)
    )


def resume_entries(
    entries: Iterable[LedgerEntry], jobs: Iterable[Job], recorded: Callable[[str], bool]
) -> Resumed:
    """Make *entries*, which this session has taken over, attempts of *jobs*; oldest first, each run once.

    A run that is *recorded* was judged by an earlier session: its test runs anew. Of several runs of the same attempt (a
    node took the first, or two sessions submitted at once) the newest counts. Runs that no job wants and nobody has
    recorded keep their allocation in the ledger.
    """
    by_key = {_job_key(job): job for job in jobs}
    adopted: dict[str, list[AdoptedAllocation]] = {}
    unusable: dict[str, tuple[LedgerEntry, str]] = {}
    unseen: dict[str, str] = {}
    ordered = sorted(entries, key=lambda entry: entry.submitted_ns)
    newest = {(run.node_id, run.digest, run.attempt): run.run_id for entry in ordered for run in entry.runs}
    for entry in ordered:
        try:
            plan = _read_plan(entry)
        except OSError as error:
            unseen[entry.id] = f"its plan cannot be read now: {error}"
            continue
        except (ValueError, TypeError, RecursionError) as error:
            unusable[entry.id] = (entry, f"its plan cannot be used: {error}")
            continue
        open_runs = [
            run
            for run in entry.runs
            if newest[run.node_id, run.digest, run.attempt] == run.run_id and not recorded(run.run_id)
        ]
        if not open_runs:
            unusable[entry.id] = (entry, "no test waits for its results")
            continue
        planned = {run.run_id: run for run in plan.runs}
        runs, others = {}, set()
        for run in open_runs:
            if job := by_key.get((run.node_id, run.digest)):
                _remove_skip_file(plan, run.run_id)
                runs[run.run_id] = (job, _attempt(plan, planned[run.run_id], run.attempt, entry))
            else:
                others.add(run.run_id)
        adopted.setdefault(entry.partition, []).append(
            AdoptedAllocation(plan, entry.native_id, runs, frozenset(others))
        )
    return Resumed({name: tuple(found) for name, found in adopted.items()}, unusable, unseen)


def without_user(jobs: Sequence[Job], going_on: Collection[int]) -> list[Job]:
    """Return those of *jobs*, in test order, that only runs need which are *going_on* (ids of jobs) since an earlier session."""
    users: dict[int, list[Job]] = {}
    for job in jobs:
        for one in job.needs.values():
            users.setdefault(id(one), []).append(job)
    found: list[Job] = []
    for job in reversed(jobs):
        mine = users.get(id(job), [])
        if mine and id(job) not in going_on and all(id(one) in going_on or one in found for one in mine):
            found.append(job)
    return found


def _remove_skip_file(plan: Plan, run_id: str) -> None:
    """Take back the note by which an earlier session has left a run out; its batch may not have come to it yet."""
    with contextlib.suppress(OSError):  # then it is run again
        Path(f"{plan.directory}/{run_id}.skip").unlink()


def _read_plan(entry: LedgerEntry) -> Plan:
    path = Path(entry.directory) / "plan.json"
    try:
        content = read_private(path)
    except FileNotFoundError:
        if not entry.native_id and path.parent.parent.is_dir():
            raise ValueError("its session ended before anything was submitted") from None
        raise
    plan = from_json(Plan, read_json(content), str(path))
    if plan.protocol != PROTOCOL:
        raise ValueError(f"it speaks protocol {plan.protocol}, this version {PROTOCOL}")
    if plan.allocation_id != entry.id or {run.run_id for run in plan.runs} != {
        run.run_id for run in entry.runs
    }:
        raise ValueError(f"{path} is of another allocation")
    return plan


def _attempt(plan: Plan, run: RunPlan, number: int, entry: LedgerEntry) -> Attempt:
    shared = len(plan.runs) > 1
    return Attempt(
        run,
        number,
        directory=f"{plan.directory}/{run.run_id}" if shared else plan.directory,
        submitted_ns=entry.submitted_ns,
        job_id=entry.native_id,
        adopted=True,
        shared=shared,
        made_from=(entry.purpose, entry.branch, entry.commit),
    )


def _job_key(job: Job) -> tuple[str, str]:
    return job.spec.node_id, spec_digest(job.spec)
