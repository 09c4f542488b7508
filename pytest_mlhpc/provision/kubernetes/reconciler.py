"""What is due for one allocation: create, follow, provision again, delete. Results are events.

Open it to follow an allocation from its plan to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, LineArrived, StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import PROTOCOL
from pytest_mlhpc.provision.conversation import run_message
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation, PodRecord
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.creation import (
    ManifestMaker,
    ObjectCreator,
    note_unfit,
    unfit_messages,
)
from pytest_mlhpc.provision.kubernetes.deletion import (
    DELETE_LIMIT_S,
    DELETE_RETRY_S,
    PendingDeletions,
    delete_objects,
    delete_or_retain,
    is_retained,
)
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, NotFound, Unavailable, provision_error
from pytest_mlhpc.provision.kubernetes.event_router import EventRouter
from pytest_mlhpc.provision.kubernetes.objects import LEADER
from pytest_mlhpc.provision.kubernetes.pod_output import (
    ContainerOutput,
    SavedOutput,
    join_outputs,
    save_output,
)
from pytest_mlhpc.provision.kubernetes.verdict import (
    LOG_LIMIT_S,
    EventInquiry,
    check_nodes,
    end_verdict,
    watch_error,
)
from pytest_mlhpc.provision.kubernetes.watch import Clusters

#: How long after a watch has recovered no cause is overdue, in seconds: missed changes are still being reported.
RECOVERY_S: Final = 5.0
#: First and longest delay before a pod without room is provisioned again, in seconds. A kubelet reports its node's state every
#: 10 s (nodeStatusUpdateFrequency).
NO_ROOM_RETRY_S: Final = 10.0
LONGEST_NO_ROOM_RETRY_S: Final = 60.0
#: Delay before the address is published again if the server does not answer, in seconds.
LEADER_RETRY_S: Final = 5.0


@dataclass(frozen=True)
class Reconciler:
    """Reconciles the allocations of one provisioner, in its thread.

    Args:
        allocations: by id; those that have ended are removed.
        events: receives the events.
        now: the provisioner's clock, in seconds.
    """

    allocations: dict[str, PodAllocation]
    deletions: PendingDeletions
    clusters: Clusters
    router: EventRouter
    manifest_maker: ManifestMaker
    creator: ObjectCreator
    inquiry: EventInquiry
    events: list[Event]
    now: Callable[[], float]

    def reconcile(self, allocation: PodAllocation) -> None:
        """Do what is due for one allocation."""
        try:
            if allocation.phase is Phase.FINDING:
                self._find_adopted(allocation)
            if allocation.phase is Phase.CREATING:
                self.create(allocation)
            if allocation.phase is Phase.FOLLOWED:
                self._follow(allocation)
        except ProvisionError as error:
            self.end(allocation, error)
        except KubernetesError as error:
            self.end(allocation, provision_error(error))
        if allocation.phase is Phase.ENDING:
            self._delete_and_report(allocation, self.now())

    def _follow(self, allocation: PodAllocation) -> None:
        """Report the state of a created allocation, and end it on a verdict.

        Raises:
            ProvisionError: it cannot be provisioned again, or its pods' annotations are refused.
        """
        now = self.now()
        silence = self.router.silence(allocation)
        self.events.extend(allocation.release_deferred(now))
        if not allocation.settings.agent:
            for message in container_messages(allocation, now):
                self.events.extend(allocation.take_message(message, now))
        if silence is None:
            publish_leader_address(allocation, now)
            self.inquiry.ask(allocation)
            check_nodes(allocation)
        self.events.extend(allocation.state())
        allocation.patience.update(allocation.causes(), now)
        recovering = silence is None and now - self.router.recovered_at < RECOVERY_S
        if recovering and not allocation.conversation.complete:
            return
        verdict = end_verdict(allocation, now, silence)
        if verdict.unfit_nodes:
            if self._provision_again(allocation, verdict.unfit_nodes):
                return
            note_unfit(allocation)
            self.report_unfit(allocation)
        if verdict.crowded and self._provision_when_room(allocation):
            return
        if verdict.ended:
            self.end(allocation, verdict.error)

    def _find_adopted(self, allocation: PodAllocation) -> None:
        """Continue an adopted allocation once the cluster has listed its objects.

        Raises:
            ProvisionError: it is gone.
            KubernetesError: the list was refused.
        """
        now = self.now()
        silence = self.router.silence(allocation)
        if silence is not None and (error := watch_error(allocation, now, silence)) is not None:
            raise error
        if now < allocation.retry_at or not allocation.sources <= self.router.synced:
            return
        try:
            self.deletions.list_objects(allocation)
        except Unavailable:
            allocation.retry_at = now + DELETE_RETRY_S
            return
        expected = allocation.plan.nodes + allocation.plan.spares if allocation.kind.each_pod else 1
        if len(allocation.workloads) >= expected:
            allocation.phase = Phase.CREATING  # all were created, but their owners may not be set
        elif allocation.handle.native_id:
            where = f"{allocation.api.server} has no {allocation.handle.native_id} any more"
            raise ProvisionError("cancelled_outside", f"{where}: it was deleted, or its time was over")
        elif allocation.workloads:  # some of its pods, which do nothing without the others
            self._provision_again(allocation, ())
        else:
            self.start(allocation)

    def _provision_again(self, allocation: PodAllocation, unfit: Sequence[str]) -> bool:
        """Provision again without *unfit*, unless that was done too often; return whether it is under way.

        Raises:
            ProvisionError: it is refused.
        """
        if unfit and allocation.round >= allocation.settings.reprovision:
            return False
        if self.now() < allocation.retry_at:
            return True
        try:
            delete_objects(allocation, grace_s=0)
        except KubernetesError:
            allocation.retry_at = self.now() + DELETE_RETRY_S
            return True
        note_unfit(allocation)
        self.report_unfit(allocation)
        self.router.forget(allocation)
        allocation.start_round(unfit, self.now())
        self.start(allocation)
        return True

    def _provision_when_room(self, allocation: PodAllocation) -> bool:
        """Provision again after a kubelet had no room, unless that was done too often; return whether it is under way.

        Raises:
            ProvisionError: it is refused.
        """
        if allocation.round >= allocation.settings.reprovision:
            return False
        if allocation.crowded_at is None:
            allocation.crowded_at = self.now()
        if self.now() - allocation.crowded_at < min(
            LONGEST_NO_ROOM_RETRY_S, NO_ROOM_RETRY_S * 3**allocation.round
        ):
            return True
        return self._provision_again(allocation, ())

    def report_unfit(self, allocation: PodAllocation) -> None:
        """Report to each run the nodes that probes found unfit; their records name them."""
        for message in unfit_messages(allocation.plan):
            self.events.append(LineArrived(allocation.handle, message))

    def replay_output(self, allocation: PodAllocation, saved: SavedOutput) -> None:
        """Report the saved output of an ended allocation, and delete the rest of its objects."""
        running = StateChanged(allocation.handle, JobState.RUNNING, nodes=saved.nodes)
        self.events.append(running)
        self.events.extend(allocation.take_lines(saved.lines, self.now()))
        self.events.extend(allocation.release_deferred(float("inf")))
        allocation.unlisted = True
        self.end(allocation, None)

    def end(self, allocation: PodAllocation, error: MlhpcError | None) -> None:
        """Start the end with *error*; None: all runs are reported."""
        for message in allocation.conversation.finish() if error is None else []:
            self.events.append(LineArrived(allocation.handle, message))
        if error is None and not allocation.unlisted:
            save_output(allocation.handle.directory, allocation.nodes, b"".join(allocation.lines))
        allocation.error = error
        allocation.phase, allocation.since, allocation.retry_at = Phase.ENDING, self.now(), 0.0
        allocation.stop_following()

    def _delete_and_report(self, allocation: PodAllocation, now: float) -> None:
        """Delete or retain the objects, then report the end; after that the ledger forgets the allocation."""
        if now < allocation.retry_at:
            return
        failure: MlhpcError | None = None
        try:
            if allocation.to_create or allocation.unlisted:  # an answer may have been lost
                self.deletions.list_objects(allocation)
        except KubernetesError as error:
            failure = error
        retained = is_retained(allocation)
        failure = failure or delete_or_retain(allocation, now)
        if failure is not None and now - allocation.since < DELETE_LIMIT_S:
            allocation.retry_at = now + DELETE_RETRY_S
            return
        self.events.append(AllocationEnded(allocation.handle, allocation.error, failure is not None))
        del self.allocations[allocation.handle.id]
        self.deletions.add(allocation)
        if retained or failure is not None:
            self.deletions.forget(allocation)

    def start(self, allocation: PodAllocation) -> None:
        """Render the manifests, and watch the cluster.

        Raises:
            ProvisionError: they cannot be rendered.
        """
        made = self.manifest_maker.make(allocation)
        allocation.kind = made.kind
        allocation.to_create = list(made.manifests)
        allocation.phase = Phase.CREATING
        self.watch(allocation)

    def watch(self, allocation: PodAllocation) -> None:
        """Watch the allocation's kinds."""
        allocation.sources = self.clusters.watch(allocation.settings, allocation.kind, self.router.queue.put)

    def create(self, allocation: PodAllocation) -> None:
        """Create the missing objects, unless it is too early for a retry.

        Raises:
            ProvisionError: refused.
        """
        if self.now() < allocation.retry_at:
            return
        try:
            self.creator.create(allocation)
        except KubernetesError as error:
            raise provision_error(error) from error
        if allocation.phase is Phase.FOLLOWED:
            first = next(iter(allocation.workloads.values()))
            native = f"{first.namespace}/{first.resource.plural}/{first.name}"
            allocation.handle = replace(allocation.handle, native_id=native)
            self.router.claim(allocation)
            self.events.append(StateChanged(allocation.handle, JobState.QUEUED, native_id=native))
        elif allocation.waiting_text:
            self.events.append(StateChanged(allocation.handle, JobState.QUEUED, allocation.waiting_text))


def publish_leader_address(allocation: PodAllocation, now: float) -> None:
    """Write rank 0's address on the other pods as an annotation, which needs neither DNS nor a Service.

    Without an answer it is retried later.

    Raises:
        ProvisionError: the server refuses.
    """
    first = allocation.rank0
    if now < allocation.leader_retry_at:
        return
    if not allocation.settings.agent:
        return
    if allocation.plan.nodes < 2 or allocation.settings.service or first is None or not first.view.address:
        return
    for pod in allocation.pods.values():
        if pod is first or pod.has_leader or pod.deleted or pod.view.stage is Stage.ENDED:
            continue
        body = {"metadata": {"annotations": {LEADER: first.view.address}}}
        try:
            allocation.api.patch(pod.ref, body)
        except NotFound:
            continue  # the watch reports its end
        except Unavailable:
            allocation.leader_retry_at = now + LEADER_RETRY_S
            return
        except KubernetesError as error:
            raise provision_error(error) from error
        pod.has_leader = True


def container_messages(allocation: PodAllocation, now: float) -> list[Message]:
    """Return what an agent would say of a program that is its container's command: that it has started, and how it ended.

    The cluster's status says both, and the log has the output. An end with another cause than the program's own is left to
    the verdict on the allocation.
    """
    run, pods = allocation.plan.runs[0], sorted(allocation.pods.values(), key=lambda pod: pod.rank or 0)
    if allocation.conversation.complete or len(pods) < allocation.plan.nodes:
        return []
    messages = []
    if allocation.began_at is None:
        if not all(pod.view.started for pod in pods):
            return []
        allocation.began_at = now
        body = {"protocol": PROTOCOL, "payload_sha256": allocation.plan.payload_sha256}
        messages.append(run_message(run, "started", body))
    ended = [pod for pod in pods if pod.view.exit is not None]
    failed = any(pod.view.exit for pod in ended)
    late = now - allocation.began_at >= run.time_limit_s and len(ended) < len(pods)
    if late:
        text = f"the program did not end within {run.time_limit_s:g} s"
        messages.append(run_message(run, "failed", {"outcome": "time_limit", "text": text, "log": ""}))
    elif (len(ended) < len(pods) and not failed) or not all(_explains_itself(pod) for pod in ended):
        return messages
    elif allocation.ended_at is None:
        allocation.ended_at = now
    read = all(pod.log_ended for pod in ended) or now - (allocation.ended_at or now) >= LOG_LIMIT_S
    if not read and not late:
        return messages
    problem = "" if late else _lacking_output(ended)
    if problem:
        body = {"outcome": "truncated_result", "text": problem, "log": ""}
        messages.append(run_message(run, "failed", body))
    times = [one for one in (_nanoseconds(pod.view.times) for pod in ended) if one is not None]
    end: dict[str, object] = {
        "exit": [exit_code(pod.view.exit or 0) for pod in ended],
        "host": pods[0].view.node,
    }
    if times:
        end |= {"started_ns": min(first for first, _ in times), "ended_ns": max(last for _, last in times)}
    return [*messages, run_message(run, "end", end)]


def _explains_itself(pod: PodRecord) -> bool:
    """Return whether the exit code says all of the end of a container: no memory limit, deadline or lost node did it."""
    return pod.view.cause is None or pod.view.cause.outcome == "channel_broken"


def _lacking_output(ended: Sequence[PodRecord]) -> str:
    """Join the outputs of all pods; return what is missing of them, or an empty string."""
    outputs = [pod.stream for pod in ended if isinstance(pod.stream, ContainerOutput)]
    try:
        join_outputs(outputs)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    for pod, output in zip(ended, outputs, strict=True):
        if output.problem:
            return output.problem
        if not pod.log_ended or not pod.log_complete:
            why = str(pod.log_error or "it was rotated, or may have been")
            return f"the log of pod {pod.ref.name} is incomplete: {why}; see containerLogMaxSize of the kubelet, or print less"
    return ""


def exit_code(code: int) -> int:
    """Return a container's exit code as a process has it: minus the signal's number where one killed it."""
    return 128 - code if 128 < code < 160 else code


def _nanoseconds(times: tuple[str, str]) -> tuple[int, int] | None:
    """Return a container's times in ns UTC; None: the cluster did not tell."""
    try:
        began, ended = (datetime.fromisoformat(text).timestamp() for text in times)
    except ValueError:
        return None
    return round(began * 1e9), round(ended * 1e9)
