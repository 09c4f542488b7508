"""PAYLOAD. Which samples a rank reads, in which order."""

from __future__ import annotations

from typing import Iterator

import torch
from torch.utils.data import Sampler

#: Odd and large, so that seed and training epoch do not meet: (0, 1) and (1, 0) are different orders.
_STRIDE = 1_000_003


class ShardedSampler(Sampler[int]):
    """Indices of one rank: shuffled anew each training epoch, every sample on exactly one rank, deterministic.

    All ranks must give the same *length*, *world* and *seed*. Rank r takes places r, r + world, ... of the common order,
    so shares differ by one at most. Each iteration is the next training epoch; ``repeat=True`` never ends.
    """

    def __init__(self, length: int, rank: int, world: int, seed: int, repeat: bool = False) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: a rank is 0 or more and less than the number of ranks")
        if length < world:
            raise ValueError(f"{length} samples cannot be shared by {world} ranks: every rank needs one")
        self.length = length
        self.rank = rank
        self.world = world
        self.seed = seed
        self.repeat = repeat
        self.training_epoch = 0

    def __len__(self) -> int:
        """Return the number of indices of one training epoch; for ``repeat=True`` there is no length."""
        if self.repeat:
            raise TypeError("a repeating sampler has no length")
        return len(range(self.rank, self.length, self.world))

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the next training epoch, or of all that follow."""
        while True:
            generator = torch.Generator()
            generator.manual_seed((self.seed * _STRIDE + self.training_epoch) % (1 << 63))
            self.training_epoch += 1
            order = torch.randperm(self.length, generator=generator)
            yield from order[self.rank :: self.world].tolist()
            if not self.repeat:
                return
