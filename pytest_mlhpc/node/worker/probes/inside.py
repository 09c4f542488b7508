"""PAYLOAD. A training within a probe: what is built of it, and one batch that stays on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.data import memory
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.loop import Trainer
from pytest_mlhpc.node.worker.probes.base import Place
from pytest_mlhpc.node.worker.workloads.base import Task
from pytest_mlhpc.node.worker.workloads.characterising import inner_batch, inner_parameters

#: Seed of weights and samples: characterisation looks at speed, and the same numbers each time are one cause less.
SEED = 0


@dataclass(frozen=True)
class Inside:
    """A training as one rank of its own would build it. ``inputs`` and ``targets`` are a batch as stored, on the device."""

    run: RunPlan
    task: Task
    trainer: Trainer
    batch: int
    inputs: Tensor
    targets: Tensor

    def gradients(self) -> None:
        """Compute gradients, forward and backward, of the batch."""
        self.trainer.forget()
        self.trainer.backward(self.trainer.loss(self.inputs, self.targets))

    def step(self) -> None:
        """Do one training step."""
        self.gradients()
        self.trainer.update()


def run_of(place: Place) -> RunPlan:
    """Return the plan of the training that the probe's fields name."""
    values = place.run.parameters
    return replace(
        place.run,
        workload=str(values["of"]),
        parameters={**inner_parameters(values), "global_batch": None},
        variables={**place.run.variables, "MLHPC_WORKLOAD_MODULE": ""},
    )


def sample_batch(task: Task, batch: int, device: torch.device) -> Tuple[Tensor, Tensor]:
    """Return *batch* synthetic samples, as they are stored, on *device*.

    Room for all is asked for first, so that a batch beyond all memory ends at once, as ``out_of_memory``.
    """
    samples = memory.dataset(task, count=batch, seed=SEED)
    parts = [torch.empty((batch, *one.shape), dtype=one.dtype) for one in samples[0][:2]]
    for index in range(batch):
        for part, one in zip(parts, samples[index][:2]):
            part[index] = one
    return parts[0].to(device), parts[1].to(device)


def build(place: Place) -> Inside:
    """Build the training for this rank alone: gradients are not exchanged."""
    run, batch = run_of(place), inner_batch(place.run.parameters)
    torch.manual_seed(SEED)
    task = prepare.load_task(run)
    trainer = prepare.build(run, task, Group(), place.accelerator, 1)
    return Inside(run, task, trainer, batch, *sample_batch(task, batch, place.accelerator.device))
