"""PAYLOAD. Batches from a source: loader processes for files, none for memory, none at all for the no-I/O twin."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.loop import Batch

#: Batches that each loader process prepares ahead. Two is torch's own default: one being taken, one being made.
PREFETCH = 2

#: Distinct batches that the no-I/O twin holds on the device: enough that caches see different addresses.
DEVICE_BATCHES = 2


@dataclass(frozen=True)
class Shape:
    """How one rank reads: samples of a micro-batch, loader processes, whether pinned memory is of use."""

    batch: int
    workers: int
    pin: bool


def choose_workers(asked: Optional[int], data_source: str, cores: int, device_type: str) -> int:
    """Return how many loader processes one rank gets.

    Memory and device data need none. For files: beside an accelerator all cores but one, at most eight; where the cores
    compute as well, a quarter of them, at least two (readers mostly wait), at most eight; one if there is but one core.
    """
    if asked is not None:
        return asked
    if data_source != "files":
        return 0
    if cores <= 1:
        return 1
    return max(1, min(8, cores - 1)) if device_type != "cpu" else max(2, min(8, cores // 4))


def batches(dataset: Dataset[Any], sampler: Sampler[int], shape: Shape) -> Iterator[Batch]:
    """Return an iterator over host batches. It ends when the sampler does; an incomplete last batch is dropped."""
    return iter(loader_of(dataset, sampler, shape))


def loader_of(
    dataset: Dataset[Any], sampler: Sampler[int], shape: Shape, *, whole: bool = True
) -> DataLoader[Any]:
    """Return what gives host batches, once for each iteration; not only *whole* ones, if an incomplete last one counts too.

    Its processes last from the first iteration to its end.
    """
    options: Any = {}
    if shape.workers:
        options = {
            "prefetch_factor": PREFETCH,
            "persistent_workers": True,
            "worker_init_fn": functools.partial(_end_with_rank, os.getpid()),
        }
    in_place = shape.pin and not shape.workers
    return DataLoader(
        dataset,
        batch_size=shape.batch,
        sampler=sampler,
        num_workers=shape.workers,
        collate_fn=functools.partial(collate_in_place, pin=True) if in_place else collate,
        pin_memory=shape.pin and not in_place,
        drop_last=whole,
        **options,
    )


def device_batches(
    dataset: Any, sampler: Sampler[int], batch: int, accelerator: Accelerator
) -> Iterator[Batch]:
    """Return an endless iterator over batches that lie on the device already."""
    indices = list(itertools.islice(iter(sampler), batch * DEVICE_BATCHES))
    held: List[Batch] = []
    for start in range(0, len(indices) - batch + 1, batch):
        inputs, targets, _ = collate([dataset[index] for index in indices[start : start + batch]])
        held.append((inputs.to(accelerator.device), targets.to(accelerator.device), 0.0))
    accelerator.synchronize()
    return itertools.cycle(held)


def collate(samples: Sequence[Tuple[Tensor, Tensor, float]]) -> Batch:
    """Make one batch of samples; seconds of reading add up.

    torch's own function writes straight into shared memory when it runs in a loader process.
    """
    inputs, targets, read_s = zip(*samples)
    stack = torch.utils.data.default_collate
    return stack(list(inputs)), stack(list(targets)), float(sum(read_s))


def collate_in_place(samples: Sequence[Tuple[Tensor, Tensor, float]], *, pin: bool) -> Batch:
    """Make one batch in this process, written once: torch would make it first and then copy it to pinned memory.

    For samples of tens of megabytes those two passes take longer than the training step that they should hide behind.
    torch keeps pinned memory until copies from it are done, and hands it out again then.
    """
    inputs, targets, read_s = zip(*samples)
    return _stacked(inputs, pin), _stacked(targets, pin), float(sum(read_s))


def _stacked(tensors: Sequence[Tensor], pin: bool) -> Tensor:
    first = tensors[0]
    whole = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=pin)
    return torch.stack(list(tensors), out=whole)


def _end_with_rank(rank: int, _worker: int) -> None:
    die_with_parent(rank)
