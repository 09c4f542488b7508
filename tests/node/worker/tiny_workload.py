"""A workload of one small layer, which fails on request; a rank imports it by MLHPC_WORKLOAD_MODULE."""

import time

import torch
from torch import nn

from pytest_mlhpc.node.worker.base import Task, TensorSpec


def task_like(name, **changes):
    """Return a task of vectors, with these changes."""
    usual = {
        "model": torch.nn.Identity, "prepare": lambda inputs, targets: (inputs, targets), "loss": nn.functional.mse_loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        "input": TensorSpec((4,), torch.float32), "target": TensorSpec((2,), torch.float32),
    }  # fmt: skip
    return Task(name=name, **{**usual, **changes})


def task(parameters):
    torch.manual_seed(int(parameters.get("seed") or 0))

    def loss(output, target):
        value = nn.functional.mse_loss(output, target)
        if parameters.get("nan"):
            value = value * float("nan")
        return value

    def prepare(inputs, targets):
        if parameters.get("explode"):
            raise RuntimeError("the device caught fire")
        time.sleep(float(parameters.get("slow_s") or 0.0))
        return inputs.float(), targets.float()

    return task_like("tiny", model=lambda: nn.Linear(4, 2), prepare=prepare, loss=loss)
