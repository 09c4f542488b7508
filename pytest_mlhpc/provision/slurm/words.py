"""What Slurm is asked when something went wrong or takes long, and how it is put into words."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.causes import amended, cause_of, unavailable
from pytest_mlhpc.provision.slurm.client import (
    Job,
    Node,
    PartitionLimits,
    QosLimits,
    SlurmClient,
    SlurmError,
    SlurmUnavailable,
    State,
    Step,
)
from pytest_mlhpc.results.lines import Message

T = TypeVar("T")

#: How often the whole queue of a partition is read, for the place of our first waiting job, in seconds.
PLACE_EVERY_S = 300.0
#: And how long a job waits before anybody wants to know.
PLACE_AFTER_S = 30.0
#: An accounting that did not answer (each try may take 10 s and more) is left alone for so long, in seconds.
ACCOUNTING_AGAIN_S = 60.0


@dataclass(frozen=True)
class Findings:
    """What Slurm knows of one job, its steps and its nodes."""

    job: Job | None
    steps: tuple[Step, ...] = ()
    nodes: tuple[Node, ...] = ()

    def cause(self, batch_exit: int | None, words: str) -> MlhpcError:
        """Return why the allocation ended before its runs had."""
        return cause_of(self.job, self.steps, self.nodes, batch_exit, words)

    def amended(self, messages: Sequence[Message]) -> list[Message]:
        """Return *messages* of failed runs, the cause put before what was seen of it, and ends with their energy."""
        told = []
        for message in messages:
            if message.kind == "end" and (steps := self._own_steps(message.run_id)):
                energy = [step.energy_j for step in steps if step.energy_j is not None]
                more = {"step": steps[-1].id, "energy_j": sum(energy) if energy else None}
                told.append(Message(message.run_id, message.nonce, "end", {**message.body, **more}))
                continue
            if message.kind != "failed":
                told.append(message)
                continue
            body = dict(message.body)
            body["outcome"], body["text"], nodes = amended(
                str(body["outcome"]), str(body["text"]), self._steps_of(message.run_id), self.nodes
            )
            if nodes:
                body["nodes"] = list(nodes)
            told.append(Message(message.run_id, message.nonce, message.kind, body))
        return told

    def accounted(self, messages: Sequence[Message]) -> bool:
        """Whether the accounting has the last of every run whose end is among *messages*: it lags a second or so."""
        ends = [message.run_id for message in messages if message.kind == "end"]
        return all(any(step.state.ended for step in self._own_steps(run_id)) for run_id in ends)

    def _own_steps(self, run_id: str) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.name == run_id)

    def _steps_of(self, run_id: str) -> tuple[Step, ...]:
        """Steps bear the id of their run; in a job without such names all count."""
        return self._own_steps(run_id) or tuple(step for step in self.steps if step.id != "extern")


class Investigator:
    """Asks as little as it can, and takes no answer for an answer."""

    def __init__(self, client: SlurmClient, backoff: Backoff) -> None:
        self._client = client
        self._backoff = backoff
        self._place: tuple[float, dict[str, int]] = (-1e9, {})
        self._accounting_again = 0.0  #: when accounting that did not answer is asked again

    def forgotten(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return jobs that the queue no longer knows, from the accounting; none while that does not answer."""
        now = time.monotonic()
        if now < self._accounting_again:
            return {}
        try:
            return {job.id: job for job in self._client.accounting(ids)}
        except SlurmError:
            self._accounting_again = time.monotonic() + ACCOUNTING_AGAIN_S
            return {}

    def findings(self, job: Job | None) -> Findings:
        """Return what Slurm knows of *job*, its steps and nodes."""
        if job is None:
            return Findings(None)
        steps = job.steps
        accounted = self.forgotten([job.id]).get(job.id)
        if accounted is not None:
            steps = accounted.steps
        else:
            steps = self._ask(lambda: self._client.steps([job.id]).get(job.id, ()), ())
        return Findings(job, steps, self._nodes(job.nodes))

    def unavailable(self, job: Job) -> tuple[Node, ...]:
        """Return the nodes that the reason of a pending job names."""
        hosts = unavailable(job.reason)
        try:
            return self._nodes(self._client.expand(hosts)) if hosts else ()
        except SlurmError:
            return ()

    def _nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        return self._ask(lambda: tuple(self._client.nodes(names)), ()) if names else ()

    def limits(self, partition: str, qos: str) -> tuple[PartitionLimits | None, QosLimits | None] | None:
        """Return the limits of partition and QoS; none where Slurm refuses; None where it does not answer.

        In the last case the submission waits and Slurm itself refuses what is too much, in the one before the submission
        will say it in full.
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

    def _ask(self, call: Callable[[], T], unknown: T) -> T:
        """Return the answer of a call, *unknown* if there is none: what is asked here is good to know, no more."""
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

    def ahead(self, job: Job, now: float) -> int | None:
        """Return how many pending jobs of the partition go first, as of some minutes ago; None if unknown."""
        asked, places = self._place
        if now - asked > PLACE_EVERY_S:
            unknown: list[Job] = []
            queue = self._ask(lambda: self._client.queue(job.partition), unknown)
            places = {one.id: place for place, one in enumerate(queue)}
            self._place = (now, places)
        return places.get(job.id)


def waiting_text(job: Job, ahead: int | None) -> str:
    """Return what a pending job waits for, in Slurm's word, when it may start, and how many go first."""
    told = [job.reason or "waiting"]
    if job.state not in {State.PENDING, State.CONFIGURING}:
        told.insert(0, job.state.value)
    if job.start_ns:
        start = dt.datetime.fromtimestamp(job.start_ns / 1e9).astimezone()
        told.append(f"expected to start {start:%a %H:%M}")
    if ahead:
        told.append("1 job goes first" if ahead == 1 else f"{ahead} jobs go first")
    return f"job {job.id}: " + ", ".join(told)
