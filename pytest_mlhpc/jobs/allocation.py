"""An allocation as the queue sees it: its handle, and whose attempt each of its runs is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.provision.base import Handle


@dataclass(frozen=True)
class Allocation:
    """An allocation that was submitted."""

    handle: Handle
    runs: Mapping[str, tuple[Job, Attempt]]  #: run id -> whose
    shared: bool = False  #: its plan has several runs, so that the end of one is not the end of all
    others: frozenset[str] = (
        frozenset()
    )  #: runs that no test of this session waits for, and nobody has recorded

    @property
    def unfinished(self) -> list[tuple[Job, Attempt]]:
        """Attempts of which more will come."""
        return [(job, attempt) for job, attempt in self.runs.values() if not attempt.over]


@dataclass(frozen=True)
class Adopted:
    """An allocation that an earlier session submitted, with those of its runs that somebody still waits for."""

    plan: Plan
    native_id: str
    runs: Mapping[str, tuple[Job, Attempt]]
    others: frozenset[str] = frozenset()
