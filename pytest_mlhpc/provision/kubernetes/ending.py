"""The end of an allocation's objects: deleted, or kept for a look without holding a device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, PodRecord
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.keeping import note
from pytest_mlhpc.provision.kubernetes.kinds import Kind
from pytest_mlhpc.provision.kubernetes.labels import KEEP_UNTIL
from pytest_mlhpc.provision.kubernetes.resources import JOB, POD, ObjectRef

#: Where the server does not answer, a deletion is tried again for so long before the allocation ends unsure, in seconds.
DELETE_LIMIT_S: Final = 90.0
PAUSE_S: Final = 3.0


def keeps(allocation: Allocation) -> bool:
    """Whether the objects of *allocation* stay for somebody to look at."""
    keep = allocation.settings.keep
    return keep == "always" or (keep == "on-failure" and (allocation.failed or allocation.error is not None))


def delete(allocation: Allocation, grace_s: int | None = None) -> None:
    """Ask for the end of everything of *allocation*; the cluster has taken it when this returns.

    The workload goes first: its controller would make deleted pods anew.

    Raises:
        KubernetesError: something was not taken; what is left is in ``allocation.objects``.
    """
    order = sorted(allocation.objects, key=lambda ref: ref.name not in allocation.workloads)
    pods = [pod.ref for pod in allocation.pods.values() if not pod.gone]
    if not allocation.workloads:  # else their owner's end takes them along
        order += [pod for pod in pods if pod not in order]
    trouble: KubernetesError | None = None
    for ref in order:
        # A workload that is deleted in the foreground is there until its pods are gone: its end tells theirs.
        mine = ref.name in allocation.workloads
        try:
            allocation.api.delete(ref, grace_s=grace_s, propagation="Foreground" if mine else "Background")
        except KubernetesError as error:  # a right that is missing for one is no reason to leave the others
            trouble = trouble or error
        else:
            allocation.objects = [one for one in allocation.objects if one != ref]
    if trouble is not None:
        raise trouble
    _take_back(allocation)
    _hasten(allocation)
    _stop(allocation, grace_s)


def _take_back(allocation: Allocation) -> None:
    """Delete what workloads own, too: their end takes it along, but only when the garbage collector comes to it (see below)."""
    for ref in allocation.given:
        with contextlib.suppress(KubernetesError):  # then later, by their owners' end
            allocation.api.delete(ref)
    allocation.given = []


def _stop(allocation: Allocation, grace_s: int | None) -> None:
    """Delete pods of a Job that have not ended: its end takes them along, but only when the garbage collector comes to it.

    That one stands still for a minute and more after kinds of objects were added or removed. A Job that is being deleted makes
    no pod anew (Kubernetes, job controller); of other kinds nobody knows.
    """
    if allocation.kind.resource != JOB:
        return
    for pod in _running(allocation):
        with contextlib.suppress(KubernetesError):  # as above: later
            allocation.api.delete(pod.ref, grace_s=grace_s)


def _hasten(allocation: Allocation) -> None:
    """Delete at once the pods of a workload in which nothing has begun yet: there is nothing that a grace could be for.

    A kubelet that waits for a volume would else keep them for minutes.
    """
    for pod in allocation.pods.values():
        stuck = pod.view.cause is not None or allocation.said is not None
        waits = pod.view.stage is Stage.PREPARING and not pod.gone
        if stuck and waits and pod.ref.name not in allocation.workloads:
            with contextlib.suppress(KubernetesError):  # their owner's end takes them along, later
                allocation.api.delete(pod.ref, grace_s=0)


def keep(allocation: Allocation, now_s: Callable[[], float] = time.time) -> None:
    """Leave what has ended for a look, until ``keep_for`` has passed; nothing that is kept holds a device.

    Raises:
        KubernetesError: the server did not take it.
        OSError: it cannot be noted.
    """
    until = int(now_s() + allocation.settings.keep_for_s)
    note(allocation.handle.directory, until)
    running = _running(allocation)
    over = bool(allocation.pods) and not running
    for ref in list(allocation.objects):
        body: dict[str, Any] = {"metadata": {"annotations": {KEEP_UNTIL: str(until)}}}
        if not over and ref.name in allocation.workloads and ref.resource != POD:
            quiet = _without_pods(allocation.kind)
            if quiet is None:  # it would make a pod for each one that is deleted
                allocation.api.delete(ref)
                continue
            body.update(quiet)
        allocation.api.patch(ref, body)
    for pod in running:
        allocation.api.delete(pod.ref)
    allocation.objects = []


def _running(allocation: Allocation) -> list[PodRecord]:
    return [pod for pod in allocation.pods.values() if pod.view.stage is not Stage.ENDED and not pod.gone]


def _without_pods(kind: Kind) -> dict[str, Any] | None:
    """Return the patch after which a workload has no pods that run; None: its kind knows of no such thing."""
    if kind.resource == JOB:
        return {"spec": {"parallelism": 0}}
    body: Any = True
    for part in reversed(kind.suspend):
        body = {part: body}
    return body if kind.suspend else None


def try_to_end(allocation: Allocation, now: float) -> MlhpcError | None:
    """Delete or keep what *allocation* has; return why that did not work (yet), None if it did.

    What is kept after all its runs have ended is given its grace to end by itself: then there is more to look at.
    """
    try:
        if not keeps(allocation):
            delete(allocation)
            return None
        ends = allocation.conversation.complete and now - allocation.since < allocation.settings.grace_s
        if ends and (running := _running(allocation)):
            return MlhpcError(f"{', '.join(_names([pod.ref for pod in running]))} will end by itself")
        keep(allocation)
    except (KubernetesError, OSError) as error:
        return error if isinstance(error, KubernetesError) else _unkept(allocation, error)
    return None


def _unkept(allocation: Allocation, error: OSError) -> MlhpcError | None:
    """Delete what cannot be noted, as nobody would ever do so."""
    try:
        delete(allocation)
    except KubernetesError as trouble:
        return trouble
    del error
    return None


def _names(refs: list[ObjectRef]) -> list[str]:
    return [ref.name for ref in refs]
