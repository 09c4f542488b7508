"""Map-style data sets for torch's DataLoader: sample i is (input, target, seconds it took to read)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pytest_mlhpc.node.worker.data.readers import Reader
from pytest_mlhpc.node.worker.data.text import Corpus, windows

Sample = Tuple[Tensor, Tensor, float]


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Return a NumPy array (or number) as a tensor of *dtype*, without a copy where it is writable."""
    if not getattr(array, "shape", ()):
        return torch.tensor(array.item(), dtype=dtype)
    if not array.flags.writeable:
        array = array.copy()  # torch may write into what it is given
    return torch.from_numpy(array).to(dtype)


class FileDataset(Dataset[Sample]):
    """Samples from files. ``chosen`` picks some of the reader's samples; each access reads its file anew."""

    def __init__(
        self, reader: Reader, chosen: Tuple[int, ...], dtypes: Tuple[torch.dtype, torch.dtype]
    ) -> None:
        self.reader = reader
        self.chosen = chosen
        self.dtypes = dtypes

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Sample:
        """Read one sample."""
        start = time.perf_counter()
        x, y = self.reader(self.chosen[index])
        inputs, targets = _tensor(x, self.dtypes[0]), _tensor(y, self.dtypes[1])
        return inputs, targets, time.perf_counter() - start


class MemoryDataset(Dataset[Sample]):
    """Few distinct samples in memory, ``(distinct, *shape)`` each, repeated to *length*. Reading takes no time."""

    def __init__(self, inputs: Tensor, targets: Tensor, length: int) -> None:
        self.inputs = inputs
        self.targets = targets
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        """Return one sample, a view."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        place = index % len(self.inputs)
        return self.inputs[place], self.targets[place], 0.0


class TextDataset(Dataset[Sample]):
    """Windows of text: the input is each window's first bytes, the target what follows each of them.

    ``held`` is the whole text in memory (uint8), or None: every window is read from its files.
    Lengths of input and target are *lengths*; windows start *context* bytes apart.
    """

    def __init__(
        self,
        text: Corpus,
        context: int,
        lengths: Tuple[int, int],
        dtypes: Tuple[torch.dtype, torch.dtype],
        *,
        held: Optional[Tensor] = None,
        limit: Optional[int] = None,
    ) -> None:
        self.text = text
        self.context = context
        self.lengths = lengths
        self.dtypes = dtypes
        self.held = held
        self.length = windows(text, context) if limit is None else min(limit, windows(text, context))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        """Return one window."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        start = time.perf_counter()
        offset, size = index * self.context, self.context + 1
        if self.held is not None:
            window = self.held[offset : offset + size]
        else:
            window = torch.frombuffer(bytearray(self.text.read(offset, size)), dtype=torch.uint8)
        inputs = window[: self.lengths[0]].to(self.dtypes[0])
        targets = window[size - self.lengths[1] :].to(self.dtypes[1])
        read_s = 0.0 if self.held is not None else time.perf_counter() - start
        return inputs, targets, read_s

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The files that the windows of this set lie in."""
        end = self.length * self.context + 1
        return tuple(file for file, start in zip(self.text.files, self.text.starts) if start < end)
