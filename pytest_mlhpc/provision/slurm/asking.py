"""Asking Slurm about all jobs of a partition at once: when, and what came back."""

from __future__ import annotations

import os
from collections.abc import Collection

from pytest_mlhpc.provision.slurm.allocation import Allocation
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.causes import hopeless
from pytest_mlhpc.provision.slurm.client import Job, SlurmClient, SlurmError, SlurmUnavailable
from pytest_mlhpc.provision.slurm.rhythm import Situation, due_in
from pytest_mlhpc.provision.slurm.words import Investigator

#: How long a job whose pending reason no waiting ends stays in the queue, in seconds: somebody may raise a limit just then.
HOPELESS_S = 30.0

#: A heartbeat that has not moved for so long (it does every 5 s) is no longer taken for granted, in seconds.
STILL_S = 2.0


class Asker:
    """One for each partition. Times are of the provisioner's monotonic clock, in seconds."""

    def __init__(
        self, client: SlurmClient, backoff: Backoff, investigator: Investigator, pending_limit_s: float
    ) -> None:
        self._client = client
        self._backoff = backoff
        self._investigator = investigator
        self.pending_limit_s = pending_limit_s
        self._last = -1e9
        self._failures = 0

    def soon(self) -> None:
        """Ask as soon as there is a reason: what is known is of an earlier session."""
        self._last = -1e9

    def due(self, allocations: Collection[Allocation], now: float) -> bool:
        """Return whether it is time to ask."""
        if self._backoff.waits():
            return False
        due = due_in(self._situation(allocations, now), now - self._last)
        return due is not None and due <= 0

    def jobs(self, asked: Collection[Allocation], now: float) -> dict[str, Job]:
        """Return id -> job as far as the queue or the accounting knows them.

        Raises:
            SlurmError: no answer; it will be due again after a while.
        """
        self._last = now
        if not asked:
            return {}
        names = {one.name for one in asked}  # ids are used again, names are not
        try:
            found = self._client.jobs(ids=[one.handle.native_id for one in asked], user=str(os.getuid()))
        except SlurmError as error:
            self._failures += 1
            if isinstance(error, SlurmUnavailable):
                self._backoff.failed("ask", error)
            raise
        self._failures = 0
        self._backoff.answered("ask")
        jobs = {job.id: job for job in found if job.name in names}
        unknown = [one.handle.native_id for one in asked if one.handle.native_id not in jobs]
        if unknown:
            forgotten = self._investigator.forgotten(unknown)
            jobs |= {job.id: job for job in forgotten.values() if job.name in names}
        return jobs

    def limit_of(self, allocation: Allocation) -> float:
        """Return how long a pending job may wait, in seconds, for what it waits for as far as known."""
        limit = self.pending_limit_s
        return (
            min(limit, HOPELESS_S)
            if allocation.job and hopeless(allocation.job.state, allocation.job.reason)
            else limit
        )

    def _situation(self, allocations: Collection[Allocation], now: float) -> Situation:
        waiting = [one for one in allocations if one.pending]
        silences = [now - one.beat_seen for one in allocations if one.up and one.beat_seen]
        silence = max(silences, default=0.0)
        return Situation(
            youngest_wait=min((now - one.since for one in waiting if one.job is None), default=None),
            longest_wait=max((now - one.since for one in waiting), default=None),
            silence=silence if silence > STILL_S else None,
            urgent=any(one.urgent for one in allocations),
            failures=self._failures,
            limit_in=min((self.limit_of(one) - (now - one.since) for one in waiting), default=None),
        )
