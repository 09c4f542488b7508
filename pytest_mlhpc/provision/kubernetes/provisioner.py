"""Provisioner `kubernetes`: one workload object for each allocation, followed by watches and its pods' logs.

Open it for the protocol that the queue calls; ``reconciler.py`` does the work.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, Handle, MonotonicClock
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.protocol.plan import HELD, Plan
from pytest_mlhpc.node.worker.workloads.fields.compiled_devices import IPU
from pytest_mlhpc.provision.command import Conversation
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation
from pytest_mlhpc.provision.kubernetes.causes import PatienceTracker
from pytest_mlhpc.provision.kubernetes.creation import read_unfit
from pytest_mlhpc.provision.kubernetes.event_router import WAKE
from pytest_mlhpc.provision.kubernetes.log_parser import read_saved_output
from pytest_mlhpc.provision.kubernetes.manifest import render_refusal
from pytest_mlhpc.provision.kubernetes.pod_template import devices_per_rank
from pytest_mlhpc.provision.kubernetes.reap import read_location, settings_at
from pytest_mlhpc.provision.kubernetes.reconciler import Reconciler
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, kind_of, settings_of
from pytest_mlhpc.provision.kubernetes.watch import Clusters
from pytest_mlhpc.provision.payload import payload_path

#: Longest time between two checks of limits without a report, in seconds. They need no request.
RECONCILE_INTERVAL_S: Final = 1.0


class KubernetesProvisioner:
    """Runs plans in pods, which outlive this object: :meth:`cancel` deletes them, :meth:`adopt` takes them over.

    Args:
        partition: of systems.yaml.
        clusters: clients and watches of the API servers.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
    """

    def __init__(
        self,
        partition: Partition,
        clusters: Clusters,
        payload: Callable[[str], Path],
        session_id: str,
        clock: MonotonicClock | None = None,
    ) -> None:
        self._partition = partition
        self._clusters = clusters
        self._clock = clock or MonotonicClock()
        self._reconciler = Reconciler(partition, clusters, payload, session_id, self._now, self._wait)
        self._allocations = self._reconciler.allocations
        self._events = self._reconciler.events
        self._router = self._reconciler.router
        self._closed = False

    def _now(self) -> float:
        return self._clock.monotonic()

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here, or an empty string."""
        if spec.workload == HELD:
            return "the fixture `allocation` needs a folder that nodes and pytest share; pods have none, use Slurm for it"
        node = self._partition.nodes
        if spec.nodes > node.max:
            return f"{spec.nodes} nodes are wanted, {self._partition.id} gives {node.max} (nodes: max)"
        each = -(-spec.ranks // spec.nodes) * devices_per_rank(self._partition, spec.parameters)
        if self._partition.accelerator == IPU and each & (each - 1):
            return f"{each} IPUs are wanted, but a partition of IPUs has a power of 2 of them"
        if node.devices and each > node.devices:
            return f"{each} devices a node are wanted, a node of {self._partition.id} has {node.devices}"
        longest = settings_of(self._partition, spec.scheduler_options).max_time_s  # a test may say its own
        if longest is not None and spec.time_limit_s > longest:
            return f"{spec.time_limit_s:.0f} s are wanted, {self._partition.id} gives {longest:.0f} s (kubernetes: max_time)"
        environment = spec.target.environment
        return render_refusal(self._partition, environment, spec.nodes, spec.ranks, spec.scheduler_options)

    def longest(self) -> float | None:
        """Return the longest allocation of the partition, in seconds; None: any."""
        return settings_of(self._partition).max_time_s

    def submit(self, plan: Plan) -> Handle:
        """Create the objects of *plan*. Without an answer from the server, that is retried later.

        Raises:
            ProvisionError: refused, with the server's message, or ``disk_full``; nothing is left of it.
        """
        allocation = self._allocation(plan, "", settings_of(self._partition, plan.scheduler_options))
        self._reconciler.start(allocation)
        self._allocations[plan.allocation_id] = allocation
        try:
            self._reconciler.create(allocation)
        except ProvisionError as error:
            # The first answer was a refusal, so nothing was created.
            untouched = not allocation.objects and not allocation.failed_creations
            if untouched or self._reconciler.delete_all(allocation) is None:
                self._reconciler.deleting[plan.allocation_id] = self._allocations.pop(plan.allocation_id)
                raise error from None
            self._reconciler.end(allocation, error)  # it ends once the rest is deleted
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over an earlier session's allocation; its logs are read from the beginning."""
        handle = Handle(plan.allocation_id, Path(plan.directory), native_id)
        try:
            location = read_location(handle.directory)
            settings = settings_of(self._partition, plan.scheduler_options)
            allocation = self._allocation(plan, native_id, settings_at(settings, location))
            if location is not None and not location.is_at(allocation.api):
                return self._reject_adoption(handle, location.mismatch_text(allocation.api))
        except (UsageError, OSError, ValueError) as error:
            return self._reject_adoption(handle, str(error))
        allocation.phase = Phase.FINDING
        self._allocations[plan.allocation_id] = allocation
        self._reconciler.watch(allocation)
        self._router.claim(allocation)
        allocation.excluded = tuple(read_unfit(plan))
        self._reconciler.report_unfit(allocation)
        if (saved := read_saved_output(handle.directory)) is not None:
            self._reconciler.replay_output(allocation, saved)
        return allocation.handle

    def _reject_adoption(self, handle: Handle, why: str) -> Handle:
        text = f"an earlier session's allocation cannot be adopted: {why}; it stays in the ledger"
        self._events.append(AllocationEnded(handle, ProvisionError("rejected", text), unsure=True))
        return handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return the events, waiting at most *timeout_s* for one, or until :meth:`wake`."""
        until = self._now() + timeout_s
        while True:
            for allocation in list(self._allocations.values()):
                self._reconciler.reconcile(allocation)
            now = self._now()
            if self._events or now >= until:
                return self._take_events()
            report = self._wait(min(until - now, self._next_deadline(now)))
            if report is not None:
                self._events += self._router.route(report)
                self._reconciler.remove_finished()
            if self._router.woken:
                self._router.woken = False
                return self._take_events()

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._router.queue.put(WAKE)

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Do nothing: pods take no messages. A skipped run runs, and its result is ignored."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """Delete *handles* and wait until their pods are gone; return those of which that is not certain."""
        ids = {handle.id for handle in handles}
        self._events[:] = [event for event in self._events if event.handle.id not in ids]
        ours = [self._allocations.pop(one) for one in ids if one in self._allocations]
        return [one.handle for one in self._reconciler.delete_and_wait(ours)]

    def close(self) -> None:
        """Wait a while for pending deletions, then stop threads and close connections. Other pods continue."""
        if self._closed:
            return
        self._closed = True
        try:
            self._reconciler.close()
        finally:
            self._clusters.close()

    def _allocation(self, plan: Plan, native_id: str, settings: KubernetesSettings) -> PodAllocation:
        api = self._clusters.reach(settings)
        directory = Path(plan.directory)
        return PodAllocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            plan=plan,
            settings=settings,
            api=api,
            kind=kind_of(settings),
            namespace=settings.namespace or api.namespace,
            conversation=Conversation(plan, directory / "pods"),
            patience=PatienceTracker(settings.patience),
            since=self._now(),
        )

    def _wait(self, seconds: float) -> object | None:
        with contextlib.suppress(queue.Empty):
            report: object = self._router.queue.get(timeout=max(0.0, seconds))
            return report
        return None

    def _next_deadline(self, now: float) -> float:
        delays = [RECONCILE_INTERVAL_S]
        for allocation in self._allocations.values():
            delays.append(allocation.retry_at - now)
            due = allocation.patience.next_deadline()
            delays += [due - now] if due is not None else []
        # What is overdue was reconciled: it waits for something else.
        return min(delay for delay in delays if delay > 0)

    def _take_events(self) -> list[Event]:
        found = list(self._events)
        self._events.clear()
        return found


def make_provisioner(partition: Partition, root: Path, session_id: str) -> KubernetesProvisioner:
    """Return the provisioner of *partition*; payloads are below *root*. Nothing is sent to a server yet.

    Raises:
        UsageError: no client, no kubeconfig, or no such context.
    """
    clusters = Clusters(os.environ)
    clusters.reach(settings_of(partition))  # refuse before anything is started
    return KubernetesProvisioner(partition, clusters, lambda sha: payload_path(root, sha), session_id)
