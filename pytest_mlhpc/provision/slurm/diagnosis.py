"""Queries that explain one job: why it waits, ended or is lost, and which limits its partition has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pytest_mlhpc.provision.slurm.causes import JobEvidence, unavailable_hosts
from pytest_mlhpc.provision.slurm.client import (
    PartitionLimits,
    QosLimits,
    SlurmClient,
    SlurmError,
    SlurmJob,
    SlurmNode,
    SlurmUnavailable,
)
from pytest_mlhpc.provision.slurm.pacing import Backoff

T = TypeVar("T")

#: Interval between reads of a partition's whole queue, for the position of waiting jobs, in seconds.
QUEUE_INTERVAL_S = 300.0
#: A job waits this long before its position is reported, in seconds.
QUEUE_AFTER_S = 30.0
#: Pause after an accounting that did not answer, in seconds: each try may take 10 s and more.
ACCOUNTING_RETRY_S = 60.0


class Diagnosis:
    """Queries about single jobs, nodes and limits. An unanswered one yields less evidence, never an error."""

    def __init__(self, client: SlurmClient, backoff: Backoff) -> None:
        self._client = client
        self._backoff = backoff
        self._positions: tuple[float, dict[str, int]] = (-1e9, {})
        self._accounting_again = 0.0  #: when an accounting that did not answer is queried again

    def from_accounting(self, ids: Sequence[str]) -> dict[str, SlurmJob]:
        """Return jobs that left the queue, from the accounting; none while it does not answer."""
        now = time.monotonic()
        if now < self._accounting_again:
            return {}
        try:
            return {job.id: job for job in self._client.accounting(ids)}
        except SlurmError:
            self._accounting_again = time.monotonic() + ACCOUNTING_RETRY_S
            return {}

    def evidence(self, job: SlurmJob | None) -> JobEvidence:
        """Return what Slurm knows of *job*, its steps and nodes."""
        if job is None:
            return JobEvidence(None)
        steps = job.steps
        accounted = self.from_accounting([job.id]).get(job.id)
        if accounted is not None:
            steps = accounted.steps
        else:
            steps = self._query(lambda: self._client.steps([job.id]).get(job.id, ()), ())
        return JobEvidence(job, steps, self._nodes(job.nodes))

    def unavailable_nodes(self, job: SlurmJob) -> tuple[SlurmNode, ...]:
        """Return the nodes that the reason of a pending job names."""
        hosts = unavailable_hosts(job.reason)
        try:
            return self._nodes(self._client.expand(hosts)) if hosts else ()
        except SlurmError:
            return ()

    def _nodes(self, names: Sequence[str]) -> tuple[SlurmNode, ...]:
        return self._query(lambda: tuple(self._client.nodes(names)), ()) if names else ()

    def limits(self, partition: str, qos: str) -> tuple[PartitionLimits | None, QosLimits | None] | None:
        """Return the limits of partition and QoS; none where Slurm refuses; None where it does not answer.

        In both cases the submission itself is refused by Slurm where it is beyond a limit.
        """
        if self._backoff.waits():
            return None
        try:
            limits = self._client.partition(partition) if partition else None
            return limits, self._client.qos(qos) if qos else None
        except SlurmUnavailable as error:
            self._backoff.failed("investigate", error)
            return None
        except SlurmError:
            return None, None

    def _query(self, call: Callable[[], T], unknown: T) -> T:
        """Return the answer of a call, *unknown* without one: no answer here is indispensable."""
        if self._backoff.waits():
            return unknown
        try:
            answer = call()
        except SlurmUnavailable as error:
            self._backoff.failed("investigate", error)
            return unknown
        except SlurmError:
            return unknown
        self._backoff.answered("investigate")
        return answer

    def jobs_ahead(self, job: SlurmJob, now: float) -> int | None:
        """Return how many pending jobs of the partition go first, some minutes old at most; None if unknown."""
        queried, positions = self._positions
        if now - queried > QUEUE_INTERVAL_S:
            unknown: list[SlurmJob] = []
            queue = self._query(lambda: self._client.queue(job.partition), unknown)
            positions = {one.id: position for position, one in enumerate(queue)}
            self._positions = (now, positions)
        return positions.get(job.id)
