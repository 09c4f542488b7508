"""Provisioner `kubernetes`: one workload object for each allocation, followed by watches and by the logs of its pods."""

from __future__ import annotations

import contextlib
import queue
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pytest_mlhpc.batch.plan import HELD, Plan
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.base import AllocationEnded, Event, Handle
from pytest_mlhpc.provision.clock import Clock
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.kubernetes import told
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.attending import Attendant
from pytest_mlhpc.provision.kubernetes.clusters import Clusters
from pytest_mlhpc.provision.kubernetes.creating import Creator
from pytest_mlhpc.provision.kubernetes.inquiry import Inquirer
from pytest_mlhpc.provision.kubernetes.intake import WAKE, Intake
from pytest_mlhpc.provision.kubernetes.kinds import kind_of
from pytest_mlhpc.provision.kubernetes.leaving import Leaving
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings, settings_of
from pytest_mlhpc.provision.kubernetes.patience import Patience
from pytest_mlhpc.provision.kubernetes.placing import Placer, noted_unfit
from pytest_mlhpc.provision.kubernetes.preview import refusal
from pytest_mlhpc.provision.kubernetes.template import devices_of_rank
from pytest_mlhpc.provision.kubernetes.where import read, settings_at
from pytest_mlhpc.system.model import Partition
from pytest_mlhpc.worker.workloads.fields.ipu import IPU

#: Longest time between two looks at limits while nothing is heard, in seconds. Nothing is asked of the server then.
LOOK_S: Final = 1.0


class KubernetesProvisioner:
    """Runs plans in pods. They outlive this object: :meth:`cancel` ends them, :meth:`adopt` takes them over.

    Args:
        partition: what systems.yaml says of it.
        clusters: how the API servers are reached.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
    """

    def __init__(
        self,
        partition: Partition,
        clusters: Clusters,
        payload: Callable[[str], Path],
        session_id: str,
        clock: Clock | None = None,
    ) -> None:
        self._partition = partition
        self._clusters = clusters
        self._clock = clock or Clock()
        self._allocations: dict[str, Allocation] = {}
        self._found: list[Event] = []
        leaving: dict[str, Allocation] = {}  #: their end was told, the cluster is deleting them
        self._intake = Intake(ChainMap(self._allocations, leaving), self._now)
        self._leaving = Leaving(leaving, clusters, self._intake, self._now, self._wait)
        self._attendant = Attendant(
            self._allocations,
            self._leaving,
            clusters,
            self._intake,
            Placer(partition, payload, session_id),
            Creator(self._now),
            Inquirer(self._now),
            self._found,
            self._now,
        )
        self._closed = False

    def _now(self) -> float:
        return self._clock.monotonic()

    # The protocol.

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here, or an empty string."""
        if spec.workload == HELD:
            return "the fixture `allocation` needs a folder that nodes and pytest share; pods have none, use Slurm for it"
        node = self._partition.nodes
        if spec.nodes > node.max:
            return f"{spec.nodes} nodes are wanted, {self._partition.id} gives {node.max} (nodes: max)"
        each = -(-spec.ranks // spec.nodes) * devices_of_rank(self._partition, spec.parameters)
        if self._partition.accelerator == IPU and each & (each - 1):
            return f"{each} IPUs are wanted, but a partition of IPUs has a power of 2 of them"
        if node.devices and each > node.devices:
            return f"{each} devices a node are wanted, a node of {self._partition.id} has {node.devices}"
        longest = settings_of(self._partition, spec.scheduler_options).max_time_s  # a test may say its own
        if longest is not None and spec.time_limit_s > longest:
            return f"{spec.time_limit_s:.0f} s are wanted, {self._partition.id} gives {longest:.0f} s (kubernetes: max_time)"
        environment = spec.target.environment
        return refusal(self._partition, environment, spec.nodes, spec.ranks, spec.scheduler_options)

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml gives, in seconds; None: any."""
        return settings_of(self._partition).max_time_s

    def submit(self, plan: Plan) -> Handle:
        """Create the objects of *plan*; where the server does not answer, that is tried again later.

        Raises:
            ProvisionError: refused in the server's own words, or ``disk_full``; nothing is left of it.
        """
        allocation = self._allocation(plan, "", settings_of(self._partition, plan.scheduler_options))
        self._attendant.start(allocation)
        self._allocations[plan.allocation_id] = allocation
        try:
            self._attendant.create(allocation)
        except ProvisionError as error:
            untouched = (
                not allocation.objects and not allocation.tries
            )  # the very first answer was a clear no
            if untouched or self._leaving.undo(allocation) is None:
                del self._allocations[plan.allocation_id]
                self._leaving.add(allocation)
                raise error from None
            self._attendant.end(allocation, error)  # something may be left: it ends once that is deleted
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the pods of an earlier session; their logs are read again from the beginning."""
        handle = Handle(plan.allocation_id, Path(plan.directory), native_id)
        try:
            where = read(handle.directory)
            settings = settings_of(self._partition, plan.scheduler_options)
            allocation = self._allocation(plan, native_id, settings_at(settings, where))
            if where is not None and not where.is_at(allocation.api):
                return self._lost(handle, where.elsewhere(allocation.api))
        except (UsageError, OSError, ValueError) as error:
            return self._lost(handle, str(error))
        allocation.phase = Phase.FINDING
        self._allocations[plan.allocation_id] = allocation
        self._attendant.watch(allocation)
        self._intake.claim(allocation)
        allocation.excluded = tuple(noted_unfit(plan))
        self._attendant.tell_unfit(allocation)
        if (known := told.read(handle.directory)) is not None:
            self._attendant.replay(allocation, known)
        return allocation.handle

    def _lost(self, handle: Handle, why: str) -> Handle:
        text = f"an earlier session's allocation cannot be gone on with: {why}; it stays in the ledger"
        self._found.append(AllocationEnded(handle, ProvisionError("rejected", text), unsure=True))
        return handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = self._now() + timeout_s
        while True:
            for allocation in list(self._allocations.values()):
                self._attendant.attend(allocation)
            now = self._now()
            if self._found or now >= until:
                return self._take()
            report = self._wait(min(until - now, self._next_look(now)))
            if report is not None:
                self._found += self._intake.take(report)
                self._leaving.look()
            if self._intake.woken:
                self._intake.woken = False
                return self._take()

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._intake.queue.put(WAKE)

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Nothing can be told to pods; a run that nobody wants is made for nothing, and its result is not looked at."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """Delete everything of *handles* and wait until their pods are gone; return those of which that is not sure."""
        wanted = {handle.id for handle in handles}
        self._found[:] = [event for event in self._found if event.handle.id not in wanted]
        ours = [self._allocations.pop(one) for one in wanted if one in self._allocations]
        for one in ours:
            self._leaving.add(one)
        return [one.handle for one in self._leaving.end(ours, self._found)]

    def close(self) -> None:
        """Wait a while until what was deleted is gone, and give back threads and connections; the rest goes on."""
        if self._closed:
            return
        self._closed = True
        try:
            self._leaving.close(self._found)
        finally:
            for allocation in self._allocations.values():
                allocation.stop_following()
            self._clusters.close()

    # Beginning.

    def _allocation(self, plan: Plan, native_id: str, settings: KubernetesSettings) -> Allocation:
        api = self._clusters.reach(settings)
        directory = Path(plan.directory)
        return Allocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            plan=plan,
            settings=settings,
            api=api,
            kind=kind_of(settings),
            namespace=settings.namespace or api.namespace,
            conversation=Conversation(plan, directory / "pods"),
            patience=Patience(settings.patience),
            since=self._now(),
        )

    # Attending.

    def _wait(self, seconds: float) -> object | None:
        with contextlib.suppress(queue.Empty):
            report: object = self._intake.queue.get(timeout=max(0.0, seconds))
            return report
        return None

    def _next_look(self, now: float) -> float:
        looks = [LOOK_S]
        for allocation in self._allocations.values():
            looks.append(allocation.try_at - now)
            due = allocation.patience.next_look()
            looks += [due - now] if due is not None else []
        # What is due already was looked at: it waits for something else.
        return min(look for look in looks if look > 0)

    def _take(self) -> list[Event]:
        found = list(self._found)
        self._found.clear()
        return found
