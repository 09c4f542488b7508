"""The plainest correct PyTorch loop, as a good user writes it: what our own loop is compared with.

Worker processes read, CUDA gets pinned memory and copies that do not block, nothing waits for the device within the timed
window. It shares model, data and loss with ours, and no line of the loop. ``workers=0`` reads in line.

    python -m benchmarks.plain cosmoflow --preset smoke
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader

from pytest_mlhpc.node.worker.base import Task
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of


@dataclass(frozen=True)
class Plain:
    """What the plain loop achieved.

    ``samples_per_s`` is over the whole timed window; ``step_times_s`` are the host's, one for each step: on CUDA, where
    the host runs ahead, only their sum means something. ``losses`` has one entry for each step.
    """

    samples_per_s: float
    step_times_s: tuple[float, ...]
    losses: tuple[float, ...]


def batches(loader: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the loader's batches, training epoch after training epoch, without what else a sample may carry."""
    while True:
        for inputs, targets, *_ in loader:
            yield inputs, targets


def train(
    task: Task,
    dataset: Any,
    *,
    batch: int,
    steps: int,
    warmup: int = 0,
    workers: int = 2,
    device: str = "cpu",
    precision: str = "fp32",
    seed: int = 0,
) -> Plain:
    """Train *warmup* and then *steps* timed steps of *batch* samples on one device.

    Raises:
        ValueError: the data set does not fill one batch.
    """
    if len(dataset) < batch:
        raise ValueError(f"{len(dataset)} samples do not fill one batch of {batch}")
    torch.manual_seed(seed)
    cuda = device == "cuda"
    model = task.model().to(device).train()
    optimizer = task.optimizer(model)
    loader = DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=cuda,
        persistent_workers=workers > 0,
    )
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=cuda and precision == "fp16")
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    losses: list[torch.Tensor] = []

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device, dtype=half) if half else contextlib.nullcontext():
            ready, wanted = task.prepare(inputs, targets)
            loss = task.loss(model(ready), wanted)
        optimizer.zero_grad(set_to_none=True)
        # torch leaves this method without types
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())

    source = batches(loader)
    for _ in range(warmup):
        step(*next(source))
    losses.clear()
    stamps = [_now(cuda)]
    for _ in range(steps):
        step(*next(source))
        stamps.append(time.perf_counter())
    window = _now(cuda) - stamps[0]
    times = tuple(after - before for before, after in pairwise(stamps))
    return Plain(steps * batch / window, times, tuple(float(loss) for loss in losses))


def _now(cuda: bool) -> float:
    """Return the time once the device has done what it was given."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def task_of(name: str, preset: str, **changes: Any) -> tuple[Task, int]:
    """Return one of our workloads as a task, and the batch of one device."""
    workload = next(workload for workload in WORKLOADS if workload.name == name)
    parameters = parameters_of(workload, preset, **changes)
    return importlib.import_module(workload.module).task(parameters), workload.device_batch


def main() -> None:
    """Train one workload on synthetic data in memory and print what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plain", description=main.__doc__)
    parser.add_argument("workload", choices=["cosmoflow", "deepcam", "resnet50", "language_model"])
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--batch", type=int, help="samples of one step (default: the workload's)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp16"])
    parser.add_argument("--channels-last", action="store_true")
    given = parser.parse_args()
    task, batch = task_of(
        given.workload, given.preset, precision=given.precision, channels_last=given.channels_last
    )
    batch = given.batch or batch
    dataset = source.dataset(task, count=batch * (given.steps + given.warmup), seed=0)
    result = train(
        task, dataset, batch=batch, steps=given.steps, warmup=given.warmup, workers=given.workers,
        device=given.device, precision=given.precision,
    )  # fmt: skip
    ordered = sorted(result.step_times_s)
    print(
        f"{given.workload} {given.preset}: {result.samples_per_s:.2f} samples/s, step median "
        f"{ordered[len(ordered) // 2] * 1e3:.2f} ms, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
