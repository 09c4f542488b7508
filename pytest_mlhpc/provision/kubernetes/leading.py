"""Pods of one allocation find rank 0 by its address, which is written on them: that needs neither DNS nor Services."""

from __future__ import annotations

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.labels import LEADER


def tell_leader(allocation: Allocation) -> None:
    """Write rank 0's address on the pods that do not have it yet; one that cannot be reached now is told at the next look."""
    first = allocation.first
    if allocation.plan.nodes < 2 or allocation.settings.service or first is None or not first.view.address:
        return
    for pod in allocation.pods.values():
        if pod is first or pod.led or pod.gone or pod.view.stage is Stage.ENDED:
            continue
        body = {"metadata": {"annotations": {LEADER: first.view.address}}}
        try:
            allocation.api.patch(pod.ref, body)
        except KubernetesError as error:
            allocation.waits_for = f"pod {pod.ref.name} cannot be told where rank 0 is: {error}"
            return
        pod.led = True
