"""PAYLOAD. Which samples a base model is trained on: each sample n times, n from a Poisson distribution of mean 1.

That is HPC AI500's bootstrap (V3.0, after Oza and Russell's online bagging): sample by sample, so that no list of all draws
has to be made or sent, and with ``1 - 1/e`` = 63.2 % of the samples at least once. Everything follows from the seed, the
number of the base model and the number of samples: ranks need not talk to each other to agree.

Some samples are held out first, the same for all base models: those on which the ensemble is asked in the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from pytest_mlhpc.node.worker.failure import WorkerFailure

#: Share of the samples that a bootstrap sample holds at least once, for many samples.
DISTINCT = 1 - math.exp(-1)

#: Odd and large, so that seeds, base models and training epochs do not meet.
_STRIDE = 1_000_003

_SEEDS = 1 << 63


@dataclass(frozen=True)
class Parted:
    """Indices of the samples that are drawn from, and of those that are held out."""

    drawn_from: Tensor
    held_out: Tensor


def seed_of(seed: int, model: int) -> int:
    """Return the seed of a base model, for weights, dropout and order; that of base model 0 is the run's own."""
    return (seed + model * _STRIDE) % _SEEDS


def part(length: int, held_out: int, seed: int) -> Parted:
    """Hold *held_out* of *length* samples out, chosen by *seed*; both parts are in ascending order.

    Raises:
        WorkerFailure: ``data_exhausted``, that would be more than half of them.
    """
    if 2 * held_out > length:
        text = f"of {length} samples {held_out} cannot be held out to ask the ensemble: use more data or more steps"
        raise WorkerFailure("data_exhausted", text)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed % _SEEDS))
    return Parted(order[held_out:].sort().values, order[:held_out].sort().values)


def multiplicities(samples: int, seed: int, model: int) -> Tensor:
    """Return how often base model *model* has each of *samples* samples: int64 (samples,), Poisson of mean 1."""
    generator = torch.Generator().manual_seed((seed * _STRIDE + 2 * model + 1) % _SEEDS)
    return torch.poisson(torch.ones(samples, dtype=torch.float64), generator=generator).long()


class BootstrapSampler(Sampler[int]):
    """Endless indices of one rank of one base model: its bootstrap sample, shuffled anew each training epoch.

    *drawn_from* holds the indices that samples are drawn from. Rank r of *world* takes places r, r + world, ... of the
    common order, so shares of a training epoch differ by one at most.

    Raises:
        WorkerFailure: ``data_exhausted``, the sample is too small to be shared.
    """

    def __init__(self, drawn_from: Tensor, rank: int, world: int, seed: int, model: int) -> None:
        counts = multiplicities(len(drawn_from), seed, model)
        self.sample = drawn_from.repeat_interleave(counts)
        self.distinct = float((counts > 0).double().mean())
        self.rank, self.world = rank, world
        self.seed = seed_of(seed, model)
        if len(self.sample) < world:
            text = (
                f"the bootstrap sample of base model {model} has {len(self.sample)} samples for {world} ranks"
            )
            raise WorkerFailure("data_exhausted", f"{text}: use more data or more steps")

    def __iter__(self) -> Iterator[int]:
        """Yield indices without end."""
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed((self.seed * _STRIDE + epoch) % _SEEDS)
            order = torch.randperm(len(self.sample), generator=generator)
            yield from self.sample[order[self.rank :: self.world]].tolist()
            epoch += 1


@dataclass(frozen=True)
class Place:
    """Where a rank belongs: its base model, and its number among that one's ranks."""

    model: int
    place: int


def place_of(rank: int, each: int) -> Place:
    """Return where a rank belongs, *each* being the ranks of a base model: neighbours train one."""
    return Place(*divmod(rank, each))
