"""Pods of one allocation find rank 0 by its address, which is written on them: that needs neither DNS nor Services."""

from __future__ import annotations

from typing import Final

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, NotFound, Unavailable
from pytest_mlhpc.provision.kubernetes.labels import LEADER
from pytest_mlhpc.provision.kubernetes.refusals import refused

#: Time between two tries where the server does not answer, in seconds.
PAUSE_S: Final = 5.0


def tell_leader(allocation: Allocation, now: float) -> None:
    """Write rank 0's address on the pods that do not have it yet; where the server does not answer, a little later.

    Raises:
        ProvisionError: that is not allowed.
    """
    first = allocation.first
    if now < allocation.lead_at:
        return
    if allocation.plan.nodes < 2 or allocation.settings.service or first is None or not first.view.address:
        return
    for pod in allocation.pods.values():
        if pod is first or pod.led or pod.gone or pod.view.stage is Stage.ENDED:
            continue
        body = {"metadata": {"annotations": {LEADER: first.view.address}}}
        try:
            allocation.api.patch(pod.ref, body)
        except NotFound:
            continue  # its end is told by the watch
        except Unavailable:
            allocation.lead_at = now + PAUSE_S
            return
        except KubernetesError as error:
            raise refused(error) from error
        pod.led = True
