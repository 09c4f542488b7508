"""ResNet-50 in double precision, with five of its sixteen bottlenecks, so that four replicas of it need little memory.

At two samples a rank its batch normalisation can enlarge rounding hundreds of times with each step. In float32 that hides what
goes wrong; in float64 it does not, for a few steps. A rank imports this by MLHPC_WORKLOAD_MODULE.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from pytest_mlhpc.node.worker.workloads import resnet50

#: The first bottlenecks of three stages, which have a shortcut of their own, and two that have none.
KEPT = (0, 1, 3, 4, 7)


def task(parameters):
    whole = resnet50.task(parameters)

    def model():
        network = resnet50.ResNet50(stem=str(parameters["stem"]), classes=int(parameters["classes"]))
        network.stages = nn.Sequential(*(network.stages[place] for place in KEPT))
        network.head[2] = nn.Linear(1024, int(parameters["classes"]))
        return network.double()

    def prepare(images, labels):
        ready, wanted = whole.prepare(images, labels)
        return ready.to(torch.float64), wanted

    return dataclasses.replace(whole, name="resnet50_double", model=model, prepare=prepare)
