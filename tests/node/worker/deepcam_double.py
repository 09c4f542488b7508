"""DeepCAM in double precision. A rank imports this by MLHPC_WORKLOAD_MODULE.

Its batch normalisation of two samples a rank enlarges rounding with each step: in float32 replicas and shards drift apart by
1e-5 after four steps on some processors and not on others.
"""

from __future__ import annotations

import dataclasses

import torch

from pytest_mlhpc.node.worker.workloads import deepcam


def task(parameters):
    whole = deepcam.task(parameters)

    def prepare(images, labels):
        ready, wanted = whole.prepare(images, labels)
        return ready.to(torch.float64), wanted

    return dataclasses.replace(
        whole, name="deepcam_double", model=lambda: whole.model().double(), prepare=prepare
    )
