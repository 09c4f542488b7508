"""One allocation in memory: its objects, its pods, the state of its creation and end, and its worker lines.

Open it to see what the provisioner knows of an allocation. The reconciler and the event router change it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.lines import Message, encode
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.kubernetes.causes import FailureCause, PatienceTracker, PodView, Stage
from pytest_mlhpc.provision.kubernetes.client import KubernetesClient
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.log_follower import LogFollower
from pytest_mlhpc.provision.kubernetes.log_parser import AgentOutput, ContainerOutput
from pytest_mlhpc.provision.kubernetes.objects import Manifest, ObjectRef, Resource, object_name
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, WorkloadKind, WorkloadStatus

#: Failures that the node or the kernel may have caused. They are reported once the container's end explains them, or after
#: DEFER_S seconds, as the agent may have other runs to do.
DEFERRABLE: Final = frozenset(
    {"worker_exit", "worker_killed", "no_result", "too_few_ranks", "channel_broken", "node_failure"}
)
DEFER_S: Final = 8.0
#: The same after the last run, whose container ends at once: a busy kubelet reports an end late.
DEFER_LAST_S: Final = 60.0


class Phase(enum.Enum):
    """What the reconciler has to do for an allocation."""

    FINDING = "finding"  #: adopted; its objects are not listed yet
    CREATING = "creating"  #: some of its objects are not created yet
    FOLLOWED = "followed"
    ENDING = "ending"  #: its objects are being deleted, then its end is reported


@dataclass(frozen=True)
class WatchSilence:
    """A failing watch. ``since`` is of the provisioner's clock; ``listed``: it has listed objects before."""

    error: KubernetesError
    since: float
    listed: bool


@dataclass
class PodRecord:
    """One pod of an allocation. ``created_at`` is the server's creation time: RFC 3339, sorts as text.

    ``log_ended``: its log was read to the end; ``log_complete``: without a gap; ``log_error``: why it cannot be read.
    """

    ref: ObjectRef
    rank: int | None
    view: PodView
    stream: AgentOutput | ContainerOutput
    created_at: str = ""
    follower: LogFollower | None = None
    log_ended: bool = False
    line_at: float = 0.0  #: when the last line of its log came
    log_complete: bool = True
    log_error: KubernetesError | None = None
    reread: bool = False  #: its log is read again, as lines were missing
    has_leader: bool = False  #: rank 0's address is published on it
    deleted: bool = False
    node_checked: bool = False  #: its node was read
    node_cause: FailureCause | None = None  #: how its node was lost, if it was

    def update(self, view: PodView) -> None:
        """Set the pod's state. A lost node explains more than how the container ended."""
        lost = self.node_cause is not None and view.explains_itself
        self.view = replace(view, cause=self.node_cause) if lost else view


@dataclass
class PodAllocation:
    """The state of one allocation. Times are of the provisioner's monotonic clock, in seconds."""

    handle: Handle
    plan: Plan
    settings: KubernetesSettings
    api: KubernetesClient
    kind: WorkloadKind
    namespace: str
    conversation: Conversation
    patience: PatienceTracker
    since: float
    phase: Phase = Phase.CREATING
    to_create: list[tuple[Resource, Manifest]] = field(default_factory=list)  #: what is still to be created
    created: dict[str, Manifest] = field(default_factory=dict)  #: uid of a workload -> how it was asked for
    waits: dict[str, float] = field(default_factory=dict)  #: patience -> since when a creation needs it
    objects: list[ObjectRef] = field(default_factory=list)  #: created and not known to be deleted
    owned: list[ObjectRef] = field(default_factory=list)  #: owned by its workloads, and deleted with them
    workloads: dict[str, ObjectRef] = field(default_factory=dict)  #: by name
    pods: dict[str, PodRecord] = field(default_factory=dict)  #: by uid
    status: WorkloadStatus | None = None  #: of the workload object
    sources: frozenset[str] = frozenset()  #: its watches
    deleted_object: str = ""  #: object that was deleted by others
    deleted_at: float = 0.0
    replaced: bool = False  #: its controller has replaced a pod, so the first one is lost
    failed_creations: int = 0  #: creations without an answer
    retry_at: float = 0.0
    excluded: tuple[str, ...] = ()  #: nodes that the probe found unfit, in earlier rounds
    round: int = 0
    #: (since when, failure that the container's end may explain)
    deferred: list[tuple[float, Message]] = field(default_factory=list)
    reported: tuple[JobState, str, tuple[str, ...]] | None = None  #: state, reason and nodes
    error: MlhpcError | None = None  #: its error, reported once its objects are deleted
    failed: bool = False  #: a run has failed, or it ends with an error: for `keep: on-failure`
    waiting_text: str = ""  #: why its objects are not created yet
    lines: list[bytes] = field(default_factory=list)  #: all worker lines, saved before its deletion
    unlisted: bool = False  #: its objects were never listed
    leader_retry_at: float = 0.0  #: when rank 0's address is published next
    events_at: float = 0.0  #: when its events are read next
    event_cause: FailureCause | None = None  #: the cause that its events name
    ended_at: float | None = None  #: when rank 0's pod was found to have ended
    began_at: float | None = None  #: without an agent: when its containers were found to run
    crowded_at: float | None = None  #: when a kubelet was found to have no room for a pod
    deleted_workloads: set[str] = field(default_factory=set)

    @property
    def rank0(self) -> PodRecord | None:
        """The pod of rank 0, whose log has the worker lines; None if there is none yet."""
        return next((pod for pod in self.pods.values() if pod.rank in (0, None) and not pod.deleted), None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its pods, in the order of ranks."""
        known = [pod for pod in self.pods.values() if pod.view.node and not pod.deleted]
        return tuple(pod.view.node for pod in sorted(known, key=lambda pod: pod.rank or 0))

    @property
    def running_pods(self) -> list[PodRecord]:
        """Its pods that have not ended, those that wait included."""
        return [pod for pod in self.pods.values() if pod.view.stage is not Stage.ENDED and not pod.deleted]

    @property
    def views(self) -> list[PodView]:
        """The state of each pod."""
        return [pod.view for pod in self.pods.values()]

    @property
    def status_text(self) -> str:
        """Why the workload waits, as its object says."""
        return self.status.text if self.status is not None else ""

    @property
    def suspended(self) -> bool:
        """Whether a queue has not admitted the workload."""
        return self.status is not None and self.status.state == "suspended"

    @property
    def preemption(self) -> str:
        """The text for a workload that was suspended after it had started: queues preempt that way."""
        text = self.event_cause.text if self.event_cause is not None else self.status_text
        return f"it was suspended while it ran, as by a queue that takes its nodes back: {text}"

    def causes(self) -> dict[str, FailureCause]:
        """Return what is wrong: name of the object -> cause.

        Without an agent an exit code is the program's own, which its run reports once its log was read.
        """
        found = {pod.name: pod.cause for pod in self.views if pod.cause is not None}
        if not self.settings.agent:
            found = {name: cause for name, cause in found.items() if cause.outcome != "channel_broken"}
        if self.status is not None and self.status.cause is not None and not self.kind.each_pod:
            found["workload"] = self.status.cause
        if self.event_cause is not None and (not found or self.suspended):
            found["workload"] = self.event_cause
        return found

    def state(self) -> list[Event]:
        """Return the event for a new state, or nothing if the state is unchanged."""
        state, reason = _job_state(self.views, self.plan.nodes), self._reason()
        report = (state, reason, self.nodes)
        if self.reported == report or (
            self.reported and self.reported[0] is JobState.RUNNING and state is not JobState.RUNNING
        ):
            return []
        self.reported = report
        return [StateChanged(self.handle, state, reason, self.nodes, self.handle.native_id)]

    def _reason(self) -> str:
        causes = self.causes()
        if causes:
            name, cause = next(iter(causes.items()))
            return cause.text if name == "workload" else f"{name}: {cause.text}"
        if self.status is not None and self.status.text and not self.pods:
            return self.status.text
        return f"once more, without {', '.join(self.excluded)}" if self.excluded else ""

    def take_lines(self, data: bytes, now: float) -> list[Event]:
        """Return the events of worker lines. A failed run, and all later lines of it, may be deferred."""
        events: list[Event] = []
        self.lines.append(data)
        for message in self.conversation.take(data):
            self.failed = self.failed or message.kind == "failed"
            follows_deferred = any(one.run_id == message.run_id for _, one in self.deferred)
            unexplained = message.kind == "failed" and message.body.get("outcome") in DEFERRABLE
            if follows_deferred or (unexplained and not self.containers_ended):
                self.deferred.append((now, message))
            else:
                events.append(LineArrived(self.handle, self._explained(message)))
        return events

    def take_message(self, message: Message, now: float) -> list[Event]:
        """Return the events of a message that no agent sent."""
        number = sum(data.count(b"\n") for data in self.lines)
        return self.take_lines(b"".join(encode(message, number)), now)

    def release_deferred(self, now: float) -> list[Event]:
        """Return deferred events whose time is over, or which the containers' ends have explained."""
        limit = DEFER_LAST_S if self.conversation.complete else DEFER_S
        if not self.deferred or not (self.containers_ended or now - self.deferred[0][0] >= limit):
            return []
        deferred, self.deferred = self.deferred, []
        return [LineArrived(self.handle, self._explained(message)) for _, message in deferred]

    @property
    def containers_ended(self) -> bool:
        """Whether every pod's container has ended, so that its status says why."""
        return bool(self.pods) and all(
            pod.view.stage is Stage.ENDED or pod.deleted for pod in self.pods.values()
        )

    def _explained(self, message: Message) -> Message:
        """Return a failure with the cluster's explanation: memory ran out, or a pod was deleted."""
        if message.kind != "failed" or message.body.get("outcome") not in DEFERRABLE:
            return message
        out_of_memory = [pod.view for pod in self.pods.values() if pod.view.out_of_memory]
        deleted = [pod.view for pod in self.pods.values() if pod.deleted or pod.view.deleting]
        if out_of_memory:
            names = ", ".join(f"{pod.name} on {pod.node}" for pod in out_of_memory)
            outcome, text = "out_of_memory", f"OOMKilled: memory ran out in {names}"
        elif deleted and not any(pod.node_is_lost for pod in deleted):
            names = ", ".join(f"{pod.name} on {pod.node}" for pod in deleted)
            outcome, text = "cancelled_outside", f"deleted by others: {names}"
            if self.suspended:
                outcome, text = "preempted", self.preemption
        else:
            return message
        text = f"{text}; {message.body.get('text', '')}"
        return replace(message, body={**message.body, "outcome": outcome, "text": text, "nodes": []})

    def add_objects(self, refs: Sequence[ObjectRef]) -> None:
        """Add objects of this allocation that the cluster has."""
        known = {(ref.resource, ref.name) for ref in self.objects}
        self.objects += [ref for ref in refs if (ref.resource, ref.name) not in known]

    def mark_deleted(self, ref: ObjectRef, now: float) -> None:
        """Note that the cluster has no *ref* any more: a workload, a pod, or one that is both."""
        pod = self.pods.get(ref.uid)
        if pod is not None:
            pod.deleted = True
        workload = self.workloads.get(ref.name)
        if pod is not None and self.kind.each_pod and (workload is None or workload.uid != ref.uid):
            del self.pods[ref.uid]  # deleted, as a quota had no room for all, and created again since
            return
        if workload is not None and workload.resource == ref.resource and workload.uid == ref.uid:
            self.deleted_workloads.add(ref.name)
        elif pod is None:
            return
        self.objects = [one for one in self.objects if one.uid != ref.uid]
        if self.phase is Phase.FOLLOWED and not self.deleted_object:
            self.deleted_object, self.deleted_at = f"{ref.resource.kind} {ref.name}", now

    @property
    def all_deleted(self) -> bool:
        """Whether no pod of a deleted allocation can run any more.

        Pods on a lost node count as gone: the cluster deletes them when the node returns or is removed.
        """
        pods = self.pods.values()
        over = all(pod.deleted or pod.view.stage is Stage.ENDED or pod.view.node_is_lost for pod in pods)
        # A workload that is being deleted creates no more pods.
        all_known = len(pods) >= self.plan.nodes + self.plan.spares
        return over and (all_known or self.deleted_workloads >= set(self.workloads))

    def round_of(self, name: str) -> int:
        """Return the round in which the object *name* was created."""
        found = re.match(re.escape(object_name(self.handle.id)) + r"-r(\d{1,3})(?:-|$)", name)
        return int(found.group(1)) if found else 0

    def start_round(self, unfit: Sequence[str], now: float) -> None:
        """Forget the objects of this round and start the next one, which avoids *unfit* nodes too."""
        self.stop_following()
        self.excluded = tuple(dict.fromkeys((*self.excluded, *unfit)))
        self.round += 1
        self.since = now
        self.pods, self.workloads, self.objects, self.owned = {}, {}, [], []
        self.status = self.event_cause = self.reported = self.ended_at = self.crowded_at = None
        self.began_at = None
        self.deleted_object, self.replaced, self.failed_creations = "", False, 0
        self.deleted_workloads, self.deferred, self.lines = set(), [], []
        self.events_at = self.retry_at = 0.0

    def last_lines(self) -> str:
        """Return the last lines that agents printed, rank 0's first."""
        pods = sorted(self.pods.values(), key=lambda pod: pod.rank or 0)
        return next((text for pod in pods if (text := pod.stream.last_lines())), "")

    def log_path(self, pod: PodRecord) -> Path:
        """Return the local file of a pod's log."""
        return self.handle.directory / "pods" / f"{pod.ref.name}.log"

    def stop_following(self) -> None:
        """Stop the threads that read its logs, and close their files."""
        for pod in self.pods.values():
            if pod.follower is not None:
                pod.follower.close()
            pod.stream.close()


def _job_state(pods: Sequence[PodView], nodes: int) -> JobState:
    """Return the state of an allocation: that of the pod that is least far."""
    if len(pods) < nodes or not pods or any(pod.crowded for pod in pods):
        return JobState.QUEUED
    least = min(pod.stage for pod in pods)
    if least <= Stage.PREPARING:
        return JobState.QUEUED
    return JobState.VETTING if least is Stage.VETTING else JobState.RUNNING
