"""The end of an allocation's objects: deleted, or kept for a look without holding a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.labels import KEEP_UNTIL
from pytest_mlhpc.provision.kubernetes.resources import JOB, POD

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
        KubernetesError: not taken; what is left is in ``allocation.objects``.
    """
    order = sorted(allocation.objects, key=lambda ref: ref.name not in allocation.workloads)
    pods = [pod.ref for pod in allocation.pods.values() if not pod.gone]
    for ref in [*order, *[pod for pod in pods if pod not in order]]:
        if ref.resource == POD and ref not in order and allocation.workloads:
            continue  # its owner's end takes it along
        # A workload that is deleted in the foreground is there until its pods are gone: its end tells theirs.
        mine = ref.name in allocation.workloads
        allocation.api.delete(ref, grace_s=grace_s, propagation="Foreground" if mine else "Background")
        if ref in allocation.objects:
            allocation.objects.remove(ref)


def keep(allocation: Allocation, now_s: Callable[[], float] = time.time) -> None:
    """Leave what has ended for a look, until ``keep_for`` has passed; nothing that is kept holds a device.

    Raises:
        KubernetesError: the server did not take it; delete it instead.
    """
    until = str(int(now_s() + allocation.settings.keep_for_s))
    for ref in list(allocation.objects):
        body: dict[str, Any] = {"metadata": {"annotations": {KEEP_UNTIL: until}}}
        if ref.resource == JOB:
            body["spec"] = {"parallelism": 0}
        allocation.api.patch(ref, body)
    for pod in allocation.pods.values():
        if pod.view.stage is not Stage.ENDED and not pod.gone:  # a controller may leave it
            allocation.api.delete(pod.ref)
    allocation.objects.clear()


def try_to_end(allocation: Allocation) -> KubernetesError | None:
    """Delete or keep what *allocation* has; return why that did not work, None if it did."""
    try:
        if keeps(allocation):
            keep(allocation)
        else:
            delete(allocation)
    except KubernetesError as error:
        return error
    return None
