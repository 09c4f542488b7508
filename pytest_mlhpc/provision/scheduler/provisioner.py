"""The provisioner of a scheduler of jobs: one job for each allocation, followed by files, and one poll for all jobs of a partition."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.ledger_entry import job_name
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, Handle, MonotonicClock, StateChanged
from pytest_mlhpc.jobs.spec import JobSpec, JobState, allocation_time_s
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.payload import cannot_write, make_session_directory
from pytest_mlhpc.provision.scheduler.allocation import (
    READ_INTERVAL_S,
    BatchFiles,
    JobAllocation,
    list_batch_files,
)
from pytest_mlhpc.provision.scheduler.causes import damaged_error
from pytest_mlhpc.provision.scheduler.client import SchedulerClient
from pytest_mlhpc.provision.scheduler.poll import ActiveAllocations, Backoff, Diagnosis, JobQuery, Poller
from pytest_mlhpc.provision.scheduler.script import ScriptRules
from pytest_mlhpc.provision.scheduler.submit import (
    UNANSWERED_LIMIT_S,
    Canceller,
    Submitter,
    cancel_jobs,
    confirm_ended,
    lines_directory,
    write_job,
)
from pytest_mlhpc.provision.ssh import RemoteError

if TYPE_CHECKING:
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns

#: Shortest pause of :meth:`JobProvisioner.events`, in seconds.
ROUND_S = 0.05


def beyond(
    spec: JobSpec,
    partition: Partition,
    most_nodes: Sequence[tuple[int | None, str]],
    most_time: Sequence[tuple[float | None, str]],
) -> str:
    """Return why *spec* can never run in *partition*, or an empty string.

    Limits of nodes and of time (in seconds) come with who sets them; None: there is no limit.
    """
    for nodes, what in [(partition.nodes.max, f"systems.yaml: {partition.id}: nodes.max"), *most_nodes]:
        if nodes is not None and spec.nodes > nodes:
            return f"{spec.nodes} nodes are wanted, but {what} is {nodes}"
    time_s = allocation_time_s([spec])
    for limit, what in most_time:
        if limit is not None and time_s > limit:
            return f"{time_s:.0f} s are needed (time_limit and margin), but {what} is {limit:.0f} s"
    per_node = -(-spec.ranks // spec.nodes)
    units = partition.nodes.devices or partition.nodes.cores
    kind = "devices" if partition.nodes.devices else "cores"
    if spec.workload != "command" and per_node > units:
        return f"{per_node} ranks on each node are wanted, which has {units} {kind}"
    return ""


class JobProvisioner:
    """Runs plans in jobs. Jobs outlive this object: :meth:`cancel` ends them, :meth:`adopt` takes them over.

    Args:
        partition: the partition of systems.yaml.
        client: how the scheduler is reached.
        payload: sha256 -> path of the zip; None where a plan needs none.
        rules: what its job scripts have of their own.
        pending_limit_s: how long a job may wait for its nodes, in seconds.
        energy: the end of each run waits for its energy in the accounting.
        runs: copies the folders of runs to nodes that do not see them; None: they do.
    """

    def __init__(
        self,
        partition: Partition,
        client: SchedulerClient,
        payload: Callable[[str], Path | None],
        *,
        rules: ScriptRules,
        pending_limit_s: float,
        energy: bool = False,
        clock: MonotonicClock | None = None,
        runs: RemoteRuns | None = None,
    ) -> None:
        self._partition = partition
        self._runs = runs
        self._over: set[Path] = set()  #: folders of allocations of which nothing is left
        self._rules, self._energy = rules, energy
        self._client = client
        self._payload = payload
        self._clock = clock or MonotonicClock()
        self._active = ActiveAllocations(self._now)
        self._unsure: dict[str, JobAllocation] = {}  #: cancelled, and perhaps not gone
        self._awake = threading.Event()
        self._backoff = Backoff(self._now)
        self._diagnosis = Diagnosis(client, self._backoff)
        self._canceller = Canceller(client, self._backoff, self._now)
        self._submitter = Submitter(client, self._backoff, self._now)
        query = JobQuery(client, self._backoff, self._diagnosis, pending_limit_s)
        self._poller = Poller(self._active, query, self._diagnosis, self._backoff, self._awake)

    def _now(self) -> float:
        return self._clock.monotonic()

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* is beyond the limits of systems.yaml, or an empty string."""
        return beyond(spec, self._partition, (), [self._max_time()])

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml gives, in seconds; None: any."""
        return self._max_time()[0]

    def _max_time(self) -> tuple[float | None, str]:
        options = self._partition.scheduler_options
        return options.get(
            "max_time"
        ), f"systems.yaml: {self._partition.id}: {self._partition.scheduler}.max_time"

    def submit(self, plan: Plan) -> Handle:
        """Write the job script and submit it; without an answer :meth:`events` tries again.

        Raises:
            ProvisionError: ``rejected`` with the scheduler's own message, or ``disk_full``.
        """
        allocation = self._follow(plan, "")
        self._write(plan)
        self._active.events += self._submitter.submit(allocation)
        self._active.allocations[plan.allocation_id] = allocation
        return allocation.handle

    def _write(self, plan: Plan) -> None:
        payload = self._payload(plan.payload_sha256)
        if payload is not None and self._runs is not None:
            session = Path(plan.directory).parent
            try:
                make_session_directory(session)
                payload = self._runs.copy_payload(payload, session)
            except OSError as error:
                raise cannot_write(error, session) from error
        write_job(plan, self._partition, payload, self._rules, self._runs)

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the job of an earlier session; all lines of its batch are read again."""
        if self._runs is not None:
            self._runs.use(Path(plan.directory))
        allocation = self._follow(plan, native_id)
        if not native_id:  # it is looked for by name before it is submitted
            allocation.submit_tries = 1
            allocation.note_unanswered(self._now())
        self._active.allocations[plan.allocation_id] = allocation
        self._poller.soon()
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = self._now() + timeout_s
        while True:
            woken = self._awake.is_set()
            if woken:
                self._awake.clear()
            self._read_results(every=woken)  # first: a job that has begun needs no submission
            if not woken:
                self._call_scheduler()
            now = self._now()
            if self._active.events or woken or now >= until:
                return self._noted(self._active.take_events())
            next_read = min(
                (one.next_read for one in self._active.allocations.values()), default=now + READ_INTERVAL_S
            )
            pause = min(max(next_read - now, ROUND_S), READ_INTERVAL_S)
            self._clock.wait(self._awake, max(0.0, min(pause, until - now)))

    def _noted(self, events: list[Event]) -> list[Event]:
        """Note which allocations are over, and return *events*."""
        ended = (one for one in events if isinstance(one, AllocationEnded) and not one.unsure)
        self._over |= {one.handle.directory for one in ended}
        return events

    def _call_scheduler(self) -> None:
        """Submit, cancel and poll what is due. After a call without an answer, which may take its time limit, the rest waits."""
        cancel = functools.partial(self._canceller.cancel, self._active.allocations.values())
        for step in (self._submit_waiting, cancel, self._poller.poll_if_due):
            if self._awake.is_set():
                return
            step()

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._awake.set()

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Leave a file that the batch checks before it starts a run."""
        for run_id in run_ids:
            try:
                path = handle.directory / f"{run_id}.skip"
                path.touch()
                if self._runs is not None:
                    self._runs.put(path)
            except (OSError, RemoteError):
                return  # only an optimisation: the run is made in vain

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """Cancel allocations of this provisioner and wait until the scheduler has ended them; return those that may not be gone."""
        known = [
            owned.pop(handle.id)
            for handle in handles
            for owned in (self._active.allocations, self._unsure)
            if handle.id in owned
        ]
        cancelled = {handle.id for handle in handles}
        self._active.events = [event for event in self._active.events if event.handle.id not in cancelled]
        names = [one.name for one in known if one.submit_tries or one.submitted]
        # A scheduler that did not answer just now gets half the time.
        silent_s = UNANSWERED_LIMIT_S / 2 if self._backoff.waits() else UNANSWERED_LIMIT_S
        unsure = cancel_jobs(self._client, names, silent_s)
        left = {one.handle.id: one for one in known if one.name in unsure or self._active.under_way(one)}
        self._unsure |= left
        self._over |= {one.handle.directory for one in known if one.handle.id not in left}
        return [one.handle for one in left.values()]

    def close(self) -> None:
        """Wait until jobs whose batch has ended are gone; the others continue."""
        ended, self._active.ended_jobs = self._active.ended_jobs, []
        confirm_ended(self._client, ended)
        if self._runs is not None:
            self._runs.remove(sorted(self._over))
            self._runs.close()

    def _follow(self, plan: Plan, native_id: str) -> JobAllocation:
        directory, folder = Path(plan.directory), lines_directory(plan)
        return JobAllocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            name=job_name(plan.allocation_id),
            since=self._now(),
            folder=folder,
            output=directory / self._rules.output,
            files=self._runs.files(plan) if self._runs else BatchFiles(folder, plan.allocation_id),
            conversation=Conversation(
                plan, directory / self._rules.output, self._runs.there(directory) if self._runs else ""
            ),
            awaits_energy=self._energy,
        )

    def _submit_waiting(self) -> None:
        for allocation in list(self._active.allocations.values()):
            if self._awake.is_set():
                return
            if allocation.submitted or allocation.started:
                continue
            try:
                self._active.events += self._submitter.submit(allocation)
            except ProvisionError as error:
                self._active.end(allocation, error, unsure=allocation.unanswered_at is not None)
                continue
            if allocation.handle.native_id:
                self._active.events.append(
                    StateChanged(allocation.handle, JobState.QUEUED, native_id=allocation.handle.native_id)
                )

    def _read_results(self, *, every: bool) -> None:
        now = self._now()
        due = [one for one in self._active.allocations.values() if every or now >= one.next_read]
        names = self._runs.names if self._runs is not None else list_batch_files
        written = {folder: names(folder) for folder in {one.folder for one in due}}
        for allocation in due:
            found = written[allocation.folder].get(allocation.handle.id, set())
            if not (found or allocation.started):
                allocation.next_read = now + READ_INTERVAL_S
                continue
            self._active.events += allocation.read(now, over_exists="over" in found)
            if allocation.conversation.mismatch:
                allocation.cancelling = True  # its results could not be used
            if allocation.exit is not None and allocation.conversation.complete and not allocation.doubtful:
                self._active.end(allocation, None)
            elif allocation.damage:
                self._active.give_up(allocation, damaged_error(allocation.damage))
        if due and self._runs is not None:
            for allocation in self._active.allocations.values():
                self._active.events += allocation.silence_events(self._runs.trouble)
