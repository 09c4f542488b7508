"""Going on with what earlier sessions submitted: which of it this session's tests want, and how it becomes theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.batch.plan import PROTOCOL, Plan
from pytest_mlhpc.jobs.allocation import Adopted
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.submitted import Submitted, SubmittedRun, spec_digest
from pytest_mlhpc.results.schema import from_json


@dataclass(frozen=True)
class Recovered:
    """``adopted`` by partition id; ``unusable`` are entries that cannot be gone on with, and why: they are to be ended."""

    adopted: Mapping[str, tuple[Adopted, ...]]
    unusable: Mapping[str, tuple[Submitted, str]]


def wanted_by(jobs: Iterable[Job]) -> Callable[[Submitted], bool]:
    """Return the question whether an entry holds a run of one of *jobs*."""
    known = {_key(job) for job in jobs if not job.spec.held}  # nodes that nobody uses are given back
    return lambda entry: (
        entry.scheduler != "local" and any((run.node_id, run.digest) in known for run in entry.runs)
    )


def recover(entries: Iterable[Submitted], jobs: Iterable[Job]) -> Recovered:
    """Make *entries*, which this session has taken over, attempts of *jobs*; oldest first, each run once."""
    by_key = {_key(job): job for job in jobs}
    adopted: dict[str, list[Adopted]] = {}
    unusable: dict[str, tuple[Submitted, str]] = {}
    for entry in sorted(entries, key=lambda entry: entry.submitted_ns):
        try:
            plan = _plan_of(entry)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            unusable[entry.id] = (entry, f"its plan cannot be read: {error}")
            continue
        runs = {
            run.run_id: (by_key[run.node_id, run.digest], _attempt(plan, run, entry))
            for run in entry.runs
            if (run.node_id, run.digest) in by_key
        }
        adopted.setdefault(entry.partition, []).append(Adopted(plan, entry.native_id, runs))
    return Recovered({name: tuple(found) for name, found in adopted.items()}, unusable)


def _plan_of(entry: Submitted) -> Plan:
    path = Path(entry.directory) / "plan.json"
    plan = from_json(Plan, json.loads(path.read_text(encoding="utf-8")), str(path))
    if plan.protocol != PROTOCOL:
        raise ValueError(f"it speaks protocol {plan.protocol}, this version {PROTOCOL}")
    if plan.allocation_id != entry.id or {run.run_id for run in plan.runs} != {
        run.run_id for run in entry.runs
    }:
        raise ValueError(f"{path} is of another allocation")
    return plan


def _attempt(plan: Plan, submitted: SubmittedRun, entry: Submitted) -> Attempt:
    (run,) = (run for run in plan.runs if run.run_id == submitted.run_id)
    folder = plan.directory if len(plan.runs) == 1 else f"{plan.directory}/{run.run_id}"
    return Attempt(
        run,
        submitted.attempt,
        directory=folder,
        submitted_ns=entry.submitted_ns,
        job_id=entry.native_id,
        adopted=True,
    )


def _key(job: Job) -> tuple[str, str]:
    return job.spec.node_id, spec_digest(job.spec)
