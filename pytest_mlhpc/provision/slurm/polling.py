"""Asking Slurm about all jobs of a partition, and what its answers mean for each of them."""

from __future__ import annotations

import threading

from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import LineArrived
from pytest_mlhpc.provision.slurm.allocation import Allocation
from pytest_mlhpc.provision.slurm.asking import Asker
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.cancelling import GONE_S
from pytest_mlhpc.provision.slurm.causes import never_scheduled, requeued
from pytest_mlhpc.provision.slurm.client import Job, SlurmError
from pytest_mlhpc.provision.slurm.followed import Followed
from pytest_mlhpc.provision.slurm.words import PLACE_AFTER_S, Investigator, waiting_text

#: How often the accounting is asked for the energy of a run before its record is made without.
ASK_ENERGY = 6


class Poller:
    """One for each partition.

    Args:
        followed: the allocations that are out; what is found goes there.
        asker: asks about all jobs by one query.
        investigator: for what the queue alone does not tell.
        backoff: while it waits, nothing is asked.
        awake: set when somebody wants to go on: then the rest waits for the next time.
    """

    def __init__(
        self,
        followed: Followed,
        asker: Asker,
        investigator: Investigator,
        backoff: Backoff,
        awake: threading.Event,
    ) -> None:
        self._followed = followed
        self._asker = asker
        self._investigator = investigator
        self._backoff = backoff
        self._awake = awake
        self._trouble = ""  #: why Slurm did not answer

    def soon(self) -> None:
        """Ask as soon as there is a reason: what is known is of an earlier session."""
        self._asker.soon()

    def poll_if_due(self) -> None:
        """Ask about all jobs by one query if it is time, and take the answers in."""
        now = self._followed.now()
        if not self._asker.due(self._followed.allocations.values(), now):
            return
        asked = [one for one in self._followed.allocations.values() if one.submitted]
        try:
            jobs = self._asker.jobs(asked, now)
        except SlurmError as error:
            self._tell_trouble(str(error))
            return
        self._trouble = ""
        for allocation in asked:
            self._update(allocation, jobs.get(allocation.handle.native_id))
        for allocation in asked:
            if self._awake.is_set() or self._backoff.waits():
                self._asker.soon()  # somebody wants to go on, or Slurm has stopped answering
                return
            self._clear_up(allocation, jobs.get(allocation.handle.native_id))

    def _update(self, allocation: Allocation, job: Job | None) -> None:
        now = self._followed.now()
        if job is None:
            allocation.unknown_since = now if allocation.unknown_since is None else allocation.unknown_since
        else:
            allocation.job, allocation.unknown_since = job, None
        if allocation.given_up is not None:
            self._confirm(allocation, job)
        elif job is None:
            return
        elif job.state.pending and allocation.up:
            # One answer may be older than what the batch has said.
            allocation.strange += 1
            if job.restarts or allocation.strange > 1:
                self._followed.give_up(allocation, requeued(job))
        elif job.state.running:
            allocation.strange = 0
            self._followed.found += allocation.state(JobState.RUNNING, "", job.nodes)
        elif not job.state.ended and not allocation.up:
            self._waits(allocation, job, now)  # a state that we do not know is not running either

    def _waits(self, allocation: Allocation, job: Job, now: float) -> None:
        waited = now - allocation.since
        if waited >= self._asker.limit_of(allocation):
            error = never_scheduled(
                job, waited, self._asker.pending_limit_s, self._investigator.unavailable(job)
            )
            self._followed.give_up(allocation, error)
            return
        ahead = self._investigator.ahead(job, now) if waited > PLACE_AFTER_S else None
        self._followed.found += allocation.state(JobState.QUEUED, waiting_text(job, ahead))

    def _clear_up(self, allocation: Allocation, job: Job | None) -> None:
        """Let out what waited for Slurm's words, and end the allocation if it has ended."""
        if allocation.handle.id not in self._followed.allocations or allocation.given_up is not None:
            return
        over = self._over(allocation, job)
        if over is None or not (over or (job is not None and allocation.doubtful)):
            return
        findings = self._investigator.findings(job)
        if self._backoff.waits():
            return  # it stopped answering midway: half of the words may blame the wrong one
        if allocation.accounted and not findings.accounted(allocation.doubtful):
            allocation.asked += 1
            if allocation.asked < ASK_ENERGY:
                return
        allocation.asked = 0
        for message in findings.amended(allocation.release()):
            self._followed.found.append(LineArrived(allocation.handle, message))
        if not over:
            return
        if allocation.conversation.complete:
            self._followed.end(allocation, None)
        else:
            self._followed.end(allocation, findings.cause(allocation.exit, allocation.last_words()))

    def _over(self, allocation: Allocation, job: Job | None) -> bool | None:
        """Return whether nothing more will come of an allocation; None: wait for what comes in a moment."""
        now = self._followed.now()
        gone = allocation.unknown(now) if job is None else job.state.ended
        if not gone and allocation.exit is None:
            return False
        self._followed.found += allocation.look(now)  # the last lines may have come while Slurm was asked
        if allocation.conversation.complete:
            return True
        if job is not None and not job.state.ended:
            return None  # the batch has gone, the job goes in a moment: its state tells why
        return None if allocation.lags(job, now) else True

    def _confirm(self, allocation: Allocation, job: Job | None) -> None:
        """End an allocation that was given up if its job is gone, or does not go although Slurm was told."""
        assert allocation.given_up is not None  # noqa: S101 - for the type checker
        now = self._followed.now()
        if allocation.unknown(now) if job is None else job.state.ended:
            self._followed.end(allocation, allocation.given_up, unsure=self._followed.under_way(allocation))
        elif allocation.cancelled_at is not None and now - allocation.cancelled_at > GONE_S:
            self._followed.end(allocation, allocation.given_up, unsure=True)

    def _tell_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            for allocation in self._followed.allocations.values():
                if allocation.pending:
                    self._followed.found += allocation.state(
                        JobState.QUEUED, f"Slurm does not answer: {text}"
                    )
