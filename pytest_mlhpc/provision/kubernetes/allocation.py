"""One allocation as the provisioner follows it: objects that were created, pods as last seen, and what its agent said."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.causes import Cause, PodView, Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.kinds import Kind, WorkloadStatus
from pytest_mlhpc.provision.kubernetes.labels import object_name
from pytest_mlhpc.provision.kubernetes.logs import LogFollower
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.patience import Patience
from pytest_mlhpc.provision.kubernetes.podstream import PodStream
from pytest_mlhpc.provision.kubernetes.resources import ObjectRef
from pytest_mlhpc.results.lines import Message

#: Failures of a run that the node or the kernel may have caused: told once the container has ended and said why, or after
#: HOLD_S seconds, as the agent may have other runs to do.
DOUBTFUL: Final = frozenset(
    {"worker_exit", "worker_killed", "no_result", "too_few_ranks", "channel_broken", "node_failure"}
)
HOLD_S: Final = 8.0


class Phase(enum.Enum):
    """What the provisioner has to do for an allocation."""

    FINDING = "finding"  #: adopted; whether the cluster still has it is not known yet
    CREATING = "creating"  #: not all of its objects have been taken by the server
    FOLLOWED = "followed"
    ENDING = "ending"  #: its objects are to be deleted, then its end is told


@dataclass
class PodRecord:
    """One pod of an allocation. ``born`` is when the server made it, as its clock says: RFC 3339, sorts as text.

    ``log_ended``: its log was read to the end; ``whole``: without a hole; ``log_error``: why it cannot be read.
    """

    ref: ObjectRef
    rank: int | None
    view: PodView
    stream: PodStream
    born: str = ""
    follower: LogFollower | None = None
    log_ended: bool = False
    whole: bool = True
    log_error: KubernetesError | None = None
    read_again: bool = False  #: its log had lost something
    led: bool = False  #: it has been told where rank 0 is
    gone: bool = False
    node_asked: bool = False  #: whether its node is still there was asked
    lost: Cause | None = None  #: what became of its node, if that was asked and is known

    def see(self, view: PodView) -> None:
        """Note how it is now. What is known of its node says more than how its container ended."""
        vague = view.cause is None or view.cause.outcome == "channel_broken"
        self.view = replace(view, cause=self.lost) if self.lost is not None and vague else view


@dataclass
class Allocation:
    """Times are of the provisioner's monotonic clock, in seconds."""

    handle: Handle
    plan: Plan
    settings: KubernetesSettings
    api: KubernetesApi
    kind: Kind
    namespace: str
    conversation: Conversation
    patience: Patience
    since: float
    phase: Phase = Phase.CREATING
    unborn: list[tuple[str, Mapping[str, Any]]] = field(
        default_factory=list
    )  #: (role, manifest) still to be created
    objects: list[ObjectRef] = field(default_factory=list)  #: created and not known to be deleted
    given: list[ObjectRef] = field(
        default_factory=list
    )  #: of those, what its workloads own: their end takes them along
    workloads: dict[str, ObjectRef] = field(default_factory=dict)  #: name -> what the pods belong to
    pods: dict[str, PodRecord] = field(default_factory=dict)  #: by uid
    status: WorkloadStatus | None = None  #: of the workload object
    sources: frozenset[str] = frozenset()  #: which watches tell of it
    vanished: str = ""  #: what was deleted, though not by us
    vanished_at: float = 0.0
    replaced: bool = False  #: its controller has made a pod anew, which tells that the first one is lost
    tries: int = 0  #: creations that got no answer
    try_at: float = 0.0
    excluded: tuple[str, ...] = ()  #: nodes that the probe found unfit, in earlier rounds
    round: int = 0
    held: list[tuple[float, Message]] = field(
        default_factory=list
    )  #: failed runs that the container may explain
    told: tuple[JobState, str, tuple[str, ...]] | None = None
    error: MlhpcError | None = None  #: how it ends, once its objects are deleted
    failed: bool = False  #: a run has failed, or it ends with an error: for `keep: on-failure`
    waits_for: str = ""  #: why its objects are not there yet
    lines: list[bytes] = field(
        default_factory=list
    )  #: all worker lines, to be written down before it is deleted
    unlisted: bool = False  #: its objects were never asked for
    lead_at: float = 0.0  #: when its pods are to be told of rank 0 next
    ask_at: float = 0.0  #: when its events are to be asked for next
    said: Cause | None = None  #: what its events told
    ended_at: float | None = None  #: when rank 0's pod was first seen to have ended
    crowded_at: float | None = None  #: when it was first seen that a kubelet had no room for a pod
    gone_workloads: set[str] = field(default_factory=set)

    @property
    def first(self) -> PodRecord | None:
        """The pod of rank 0, the one that speaks; None as long as there is none."""
        return next((pod for pod in self.pods.values() if pod.rank in (0, None) and not pod.gone), None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its pods, in the order of ranks."""
        known = [pod for pod in self.pods.values() if pod.view.node and not pod.gone]
        return tuple(pod.view.node for pod in sorted(known, key=lambda pod: pod.rank or 0))

    @property
    def views(self) -> list[PodView]:
        """What is known of each pod."""
        return [pod.view for pod in self.pods.values()]

    @property
    def status_words(self) -> str:
        """What the workload object itself says of why it waits."""
        return self.status.words if self.status is not None else ""

    @property
    def suspended(self) -> bool:
        """Whether a queue has not let it begin."""
        return self.status is not None and self.status.state == "suspended"

    @property
    def preemption(self) -> str:
        """That it was suspended after it had begun, in the cluster's words: queues take nodes back that way."""
        text = self.said.text if self.said is not None else self.status_words
        return f"it was suspended while it ran, as by a queue that takes its nodes back: {text}"

    def causes(self) -> dict[str, Cause]:
        """Return what is wrong: name of the object -> cause."""
        found = {pod.name: pod.cause for pod in self.views if pod.cause is not None}
        if self.status is not None and self.status.cause is not None and not self.kind.each_pod:
            found["workload"] = self.status.cause
        if self.said is not None and (not found or self.suspended):
            found["workload"] = self.said
        return found

    def state(self) -> list[Event]:
        """Return the event that tells a new state, if it is new."""
        state, reason = _state_of(self.views, self.plan.nodes), self._reason()
        told = (state, reason, self.nodes)
        if self.told == told or (
            self.told and self.told[0] is JobState.RUNNING and state is not JobState.RUNNING
        ):
            return []
        self.told = told
        return [StateChanged(self.handle, state, reason, self.nodes, self.handle.native_id)]

    def _reason(self) -> str:
        causes = self.causes()
        if causes:
            name, cause = next(iter(causes.items()))
            return cause.text if name == "workload" else f"{name}: {cause.text}"
        if self.status is not None and self.status.words and not self.pods:
            return self.status.words
        return f"once more, without {', '.join(self.excluded)}" if self.excluded else ""

    def hear(self, data: bytes, now: float) -> list[Event]:
        """Return the events of worker lines; a failed run, and all of it after that, may be held back."""
        events: list[Event] = []
        self.lines.append(data)
        for message in self.conversation.take(data):
            self.failed = self.failed or message.kind == "failed"
            held = any(one.run_id == message.run_id for _, one in self.held)
            doubtful = message.kind == "failed" and message.body.get("outcome") in DOUBTFUL
            if held or (doubtful and not self.container_over):
                self.held.append((now + HOLD_S, message))
            else:
                events.append(LineArrived(self.handle, self._explained(message)))
        return events

    def release(self, now: float) -> list[Event]:
        """Return what was held back long enough, or what the containers' ends have explained."""
        if not self.held or not (self.container_over or now >= self.held[0][0]):
            return []
        held, self.held = self.held, []
        return [LineArrived(self.handle, self._explained(message)) for _, message in held]

    @property
    def container_over(self) -> bool:
        """Whether every pod's container has ended, so that it says why."""
        return bool(self.pods) and all(
            pod.view.stage is Stage.ENDED or pod.gone for pod in self.pods.values()
        )

    def _explained(self, message: Message) -> Message:
        """Say of a run that failed what the cluster says of its pods: that memory ran out, or that somebody deleted one."""
        if message.kind != "failed" or message.body.get("outcome") not in DOUBTFUL:
            return message
        starved = [pod.view for pod in self.pods.values() if pod.view.out_of_memory]
        taken = [pod.view for pod in self.pods.values() if pod.gone or pod.view.deleting]
        if starved:
            names = ", ".join(f"{pod.name} on {pod.node}" for pod in starved)
            outcome, text = "out_of_memory", f"OOMKilled: memory ran out in {names}"
        elif taken and not any(_is_lost(pod) for pod in taken):
            names = ", ".join(f"{pod.name} on {pod.node}" for pod in taken)
            outcome, text = "cancelled_outside", f"somebody deleted {names}"
            if self.suspended:
                outcome, text = "preempted", self.preemption
        else:
            return message
        text = f"{text}; {message.body.get('text', '')}"
        return replace(message, body={**message.body, "outcome": outcome, "text": text, "nodes": []})

    def note(self, refs: Sequence[ObjectRef]) -> None:
        """Note objects of this allocation that the cluster has."""
        known = {(ref.resource, ref.name) for ref in self.objects}
        self.objects += [ref for ref in refs if (ref.resource, ref.name) not in known]

    def lose(self, ref: ObjectRef, now: float) -> None:
        """Note that the cluster has no *ref* any more. Where each pod is a workload of its own, it is both."""
        pod = self.pods.get(ref.uid)
        if pod is not None:
            pod.gone = True
        workload = self.workloads.get(ref.name)
        if pod is not None and self.kind.each_pod and (workload is None or workload.uid != ref.uid):
            del self.pods[ref.uid]  # given back, as there was no room for all, and created again since
            return
        if workload is not None and workload.resource == ref.resource and workload.uid == ref.uid:
            self.gone_workloads.add(ref.name)
        elif pod is None:
            return
        self.objects = [one for one in self.objects if one.uid != ref.uid]
        if self.phase is Phase.FOLLOWED and not self.vanished:
            self.vanished, self.vanished_at = f"{ref.resource.kind} {ref.name}", now

    @property
    def all_gone(self) -> bool:
        """Whether the cluster, which was asked to delete it, has told that nothing of it can run any more.

        A node that is lost never tells; what is on it is deleted once it comes back, or is taken out of the cluster.
        """
        pods = self.pods.values()
        over = all(pod.gone or pod.view.stage is Stage.ENDED or _is_lost(pod.view) for pod in pods)
        all_known = (
            len(pods) >= self.plan.nodes + self.plan.spares
        )  # a workload that is being deleted makes no more
        return over and (all_known or self.gone_workloads >= set(self.workloads))

    @property
    def logs_over(self) -> bool:
        """Whether all logs that were followed were read to their ends."""
        return all(pod.follower is None or pod.log_ended for pod in self.pods.values())

    def round_of(self, name: str) -> int:
        """Return the round in which the object called *name* was made."""
        found = re.match(re.escape(object_name(self.handle.id)) + r"-r(\d{1,3})(?:-|$)", name)
        return int(found.group(1)) if found else 0

    def begin_again(self, unfit: Sequence[str], now: float) -> None:
        """Forget the pods of this round; the next one is to go round *unfit* too."""
        self.stop_following()
        self.excluded = tuple(dict.fromkeys((*self.excluded, *unfit)))
        self.round += 1
        self.since = now
        self.pods, self.workloads, self.objects, self.given = {}, {}, [], []
        self.status, self.said, self.told, self.vanished, self.ended_at = None, None, None, "", None
        self.gone_workloads, self.held, self.ask_at = set(), [], 0.0
        self.lines = []
        self.tries, self.try_at, self.replaced, self.crowded_at = 0, 0.0, False, None

    def last_words(self) -> str:
        """Return the last lines that agents printed, rank 0's first."""
        pods = sorted(self.pods.values(), key=lambda pod: pod.rank or 0)
        return next((words for pod in pods if (words := pod.stream.last_words())), "")

    def log_of(self, pod: PodRecord) -> Path:
        """Return where the log of *pod* is kept."""
        return self.handle.directory / "pods" / f"{pod.ref.name}.log"

    def stop_following(self) -> None:
        """Give back the threads and files of its logs."""
        for pod in self.pods.values():
            if pod.follower is not None:
                pod.follower.close()
            pod.stream.close()


def _is_lost(view: PodView) -> bool:
    """Whether the node of a pod is lost, so that nobody may tell of the pod's end."""
    return view.cause is not None and view.cause.outcome == "node_failure"


def _state_of(pods: Sequence[PodView], wanted: int) -> JobState:
    """Return where an allocation stands: it is as far as the pod that is least far."""
    if len(pods) < wanted or not pods or any(pod.crowded for pod in pods):
        return JobState.QUEUED
    least = min(pod.stage for pod in pods)
    if least <= Stage.PREPARING:
        return JobState.QUEUED
    return JobState.VETTING if least is Stage.VETTING else JobState.RUNNING
