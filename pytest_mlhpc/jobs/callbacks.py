"""What a queue needs of its session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.results.outcome import Outcome


@dataclass(frozen=True)
class Callbacks:
    """What a driver needs of the session; all are called from the driver's thread.

    ``plan`` makes the plan of attempts (spec, number) without the nodes that it names; ``submitted``, ``accepted`` (with
    the scheduler's own id) and ``ended`` (with all jobs that had a run in it concluded) write the ledger, ``concluded`` that runs are recorded; ``judge`` gets a
    job whose attempts have all ended and returns its outcome, or how many more attempts it wants; ``unjudged`` gets a job
    that was given an outcome without ``judge``; ``beat`` is called every few seconds while there is work, and says whether
    all is still ours.
    """

    plan: Callable[[Sequence[tuple[JobSpec, int]], Sequence[str]], Plan]
    submitted: Callable[[Sequence[JobSpec], Plan], None]
    accepted: Callable[[str, str], None]
    ended: Callable[[str], None]
    concluded: Callable[[Sequence[str]], None]
    judge: Callable[[Job], Outcome | int]
    beat: Callable[[], bool] = lambda: True
    unjudged: Callable[[Job], None] = lambda _: None
