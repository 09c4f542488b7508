"""From a run's plan to the data it trains on: which set, which samples for this rank, and sets in memory."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker.base import Task, TensorSpec
from pytest_mlhpc.node.worker.data import dataset_files
from pytest_mlhpc.node.worker.data.dataset_files import DataError, layout_of, read_error, read_manifest
from pytest_mlhpc.node.worker.data.formats import (
    VOCABULARY,
    Corpus,
    ExpectedSample,
    Reader,
    open_corpus,
    open_files,
    windows,
)
from pytest_mlhpc.node.worker.data.make import make_set

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

    ``whole_text`` is the whole text in memory (uint8), or None: every window is read from its files.
    Lengths of input and target are *lengths*; windows start *context* bytes apart.
    """

    def __init__(
        self,
        text: Corpus,
        context: int,
        lengths: Tuple[int, int],
        dtypes: Tuple[torch.dtype, torch.dtype],
        *,
        whole_text: Optional[Tensor] = None,
        limit: Optional[int] = None,
    ) -> None:
        self.text = text
        self.context = context
        self.lengths = lengths
        self.dtypes = dtypes
        self.whole_text = whole_text
        self.length = windows(text, context) if limit is None else min(limit, windows(text, context))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        """Return one window."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        start = time.perf_counter()
        offset, size = index * self.context, self.context + 1
        if self.whole_text is not None:
            window = self.whole_text[offset : offset + size]
        else:
            window = torch.frombuffer(bytearray(self.text.read(offset, size)), dtype=torch.uint8)
        inputs = window[: self.lengths[0]].to(self.dtypes[0])
        targets = window[size - self.lengths[1] :].to(self.dtypes[1])
        read_s = 0.0 if self.whole_text is not None else time.perf_counter() - start
        return inputs, targets, read_s

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The files that the windows of this set lie in."""
        end = self.length * self.context + 1
        return tuple(file for file, start in zip(self.text.files, self.text.starts) if start < end)


#: Distinct samples, as long as they fit into this many bytes; at least MINIMUM of them.
BUDGET = 256 << 20
MOST, MINIMUM = 64, 4


def _bytes(spec: TensorSpec) -> int:
    """Return the bytes of one sample."""
    return math.prod(spec.shape) * torch.empty((), dtype=spec.dtype).element_size()


def _noise(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Return float32 (count, *input shape) between the task's bounds' first and third quarter."""
    noise = torch.rand((count, *task.input.shape), generator=generator)
    return noise.mul_(0.5 * (task.high - task.low)).add_(task.low + 0.25 * (task.high - task.low))


def _labels(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Return class numbers (count, *target shape). Maps get a horizontal band per class, class 0 around them."""
    if not task.target.shape:
        return torch.randint(task.classes, (count,), generator=generator)
    labels = torch.zeros((count, *task.target.shape), dtype=torch.int64)
    height = task.target.shape[0]
    for sample in range(count):
        for label in range(1, task.classes):
            start = int(torch.randint(max(height, 1), (1,), generator=generator))
            labels[sample, start : start + max(height // 16, 1)] = label
    return labels


def _mark(inputs: Tensor, labels: Tensor, classes: int, span: float) -> None:
    """Shift inputs by what their class says, in place: a level per class, over the whole sample or pixel by pixel."""
    level = (labels.float() / max(classes - 1, 1) - 0.5) * (0.5 * span)
    while level.dim() < inputs.dim():
        level = level.unsqueeze(-1)
    inputs += level


def dataset(task: Task, *, count: int, seed: int) -> MemoryDataset:
    """Return *count* samples for *task*, of which up to 64 are distinct; equal seeds give equal samples.

    With ``task.classes`` targets are classes and shift their inputs' level; without, targets are numbers in 0..1, and
    the first of them scales its input. Their mean is not zero, so that the first steps already have something to learn.
    """
    size = max(1, _bytes(task.input) + _bytes(task.target))
    distinct = min(count, max(MINIMUM, min(MOST, BUDGET // size)))
    generator = torch.Generator().manual_seed(seed)
    inputs = _noise(task, distinct, generator)
    if task.classes:
        targets = _labels(task, distinct, generator)
        _mark(inputs, targets, task.classes, task.high - task.low)
    else:
        targets = torch.rand((distinct, *task.target.shape), generator=generator)
        factor = targets.reshape(distinct, -1)[:, 0] + 0.5
        inputs *= factor.reshape(distinct, *[1] * (inputs.dim() - 1))
    # int types are cut to whole numbers below `high`, which is exclusive there
    top = task.high if task.input.dtype.is_floating_point else math.ceil(task.high) - 1
    inputs.clamp_(task.low, top)
    return MemoryDataset(inputs.to(task.input.dtype), targets.to(task.target.dtype), count)


TEXT_WORKLOAD = "language_model"
SOURCES = ("memory", "device", "files")
#: Text in memory at most; a run of a few hundred steps uses less.
TEXT_BUDGET = 256 << 20
#: Unpacked bytes of a set that is made within a run; one core makes about 10 MB/s. Larger ones are made beforehand.
MADE_BUDGET = 4 << 30
#: Unpacked bytes that are made instead, where samples may be read again: more than last caches hold, less than page caches.
AGAIN_BUDGET = 1 << 30


@dataclass(frozen=True)
class DataSource:
    """A map-style ``dataset`` (sample i is input, target, seconds of reading) and what is true of it.

    ``kind`` is real or synthetic, ``source`` memory, device or files, ``cache`` cold, warm or unknown, as verified.
    ``again``: fewer samples than asked for were made, and are to be read again and again.
    """

    dataset: Any
    kind: str
    source: str
    cache: str
    again: bool = False


def open_source(
    run: RunPlan, task: Task, *, count: int, seed: int, directory: str, again: Optional[int] = None
) -> DataSource:
    """Return the data of *run*: at most *count* samples, the same on all ranks for the same *seed*.

    Files come from ``run.data_path``, or else from a synthetic set made once below *directory*. One sample is read to
    see that the set fits the workload, then the page cache is brought into the asked state: ranks of a node should
    wait for each other after this call, or one would evict what another has begun to read. Where a set of *count* samples is
    too large to be made here, a smaller one is, of at least *again* samples; None: none may be read again.

    Raises:
        DataError: missing, damaged, of another shape, no room to make it, or a library for its format is missing.
    """
    if run.data_source not in SOURCES:
        raise DataError(run.data_source, f"is no source of data, choose one of {', '.join(SOURCES)}")
    if count < 1:
        raise DataError(
            run.data_path or run.data_source, f"{count} samples were asked for, at least one is needed"
        )
    try:
        if run.workload == TEXT_WORKLOAD:
            return _text(run, task, count)
        if run.data_source != "files":
            return DataSource(dataset(task, count=count, seed=seed), "synthetic", run.data_source, "unknown")
        root = Path(run.data_path) if run.data_path else _made(run, count, seed, Path(directory), again)
        return _files(run, task, root, count, seed)
    except ImportError as error:
        text = f"{error.name} is needed for this format, and {sys.executable} does not have it"
        raise DataError(run.data_path or directory, text, "import_failed") from None


def _text(run: RunPlan, task: Task, count: int) -> DataSource:
    """Return windows of text, from files or in memory: real text in both cases."""
    if 0 < task.classes < VOCABULARY:
        raise DataError("vocabulary", f"has {task.classes} tokens, bytes need {VOCABULARY}")
    chosen = run.data_path or str(run.parameters.get("text_path") or "")
    corpus = open_corpus(Path(chosen) if chosen else None)
    context = int(run.parameters["context"])
    lengths = (_length(task.input.shape), _length(task.target.shape))
    dtypes = (task.input.dtype, task.target.dtype)
    kind = kind_of(Path(chosen), run.data_kind) if run.data_path else "real"
    if run.data_source == "files":
        dataset = TextDataset(corpus, context, lengths, dtypes, limit=count)
        dataset[0]
        return DataSource(dataset, kind, "files", dataset_files.prepare(dataset.paths, run.cache))
    size = min(corpus.size, count * context + 1, max(TEXT_BUDGET, context + 1))
    whole_text = torch.frombuffer(bytearray(corpus.read(0, size)), dtype=torch.uint8)
    limit = max((size - 1) // context, 1)
    return DataSource(
        TextDataset(corpus, context, lengths, dtypes, whole_text=whole_text, limit=limit),
        kind,
        run.data_source,
        "unknown",
    )


def _length(shape: Sequence[int]) -> int:
    """Return the tokens in a tensor of this shape."""
    return shape[0] if shape else 1


def _files(run: RunPlan, task: Task, root: Path, count: int, seed: int) -> DataSource:
    """Return samples from the files below *root*."""
    wanted = ExpectedSample(task.input.shape, task.target.shape, task.classes, run.parameters)
    reader = open_files(run.workload, root, wanted, seed)
    chosen = choose(len(reader.paths), count, seed)
    dataset = FileDataset(reader, chosen, (task.input.dtype, task.target.dtype))
    compare(dataset, task, reader.paths[chosen[0]])
    kind = kind_of(root, run.data_kind) if run.data_path else "synthetic"
    state = dataset_files.prepare([reader.paths[index] for index in chosen], run.cache)
    return DataSource(dataset, kind, "files", state, again=not run.data_path and len(chosen) < count)


def _made(run: RunPlan, count: int, seed: int, directory: Path, again: Optional[int]) -> Path:
    """Return the folder of a synthetic set that fits *run*, made by whichever rank comes first.

    What is read again is in the page cache, so that a set that is to be cold is made whole or not at all.
    """
    layout = layout_of(run.workload, run.parameters, samples=count, validation=0, seed=seed)
    if layout.raw_bytes * count > MADE_BUDGET and again is not None and run.cache != "cold":
        layout = dataclasses.replace(layout, samples=max(again, AGAIN_BUDGET // layout.raw_bytes))
    if layout.raw_bytes * layout.samples > MADE_BUDGET:
        raise DataError(
            directory,
            f"{count} samples ({layout.raw_bytes * count / 1e9:.0f} GB unpacked) are too many to make within a run: make "
            f"the set once with `mlhpc data make {run.workload} --samples {count} DIR` and name DIR as data",
        )
    root = directory / "data" / layout.name
    make_set(layout, root)
    return root


def choose(available: int, count: int, seed: int) -> Tuple[int, ...]:
    """Return which samples to use: all, or *count* of them drawn without repetition, in order."""
    if available <= count:
        return tuple(range(available))
    drawn = random.Random(seed).sample(range(available), count)  # noqa: S311 - a choice of samples is no secret
    return tuple(sorted(drawn))


def compare(dataset: FileDataset, task: Task, path: Path) -> None:
    """Read one sample and refuse a set of another shape."""
    inputs, targets, _ = dataset[0]
    pairs = (("input", inputs, task.input), ("target", targets, task.target))
    wrong: List[str] = [
        f"{name} is {tuple(found.shape)}, expected {tuple(spec.shape)}"
        for name, found, spec in pairs
        if tuple(found.shape) != tuple(spec.shape)
    ]
    if wrong:
        raise DataError(path, "; ".join(wrong))


def kind_of(path: Path, claimed: Optional[str]) -> str:
    """Return real or synthetic; a set with our manifest is synthetic whatever is claimed."""
    try:
        manifest = read_manifest(path) or read_manifest(path.parent)
    except OSError as error:
        raise read_error(path, error, "a data set") from None
    return manifest.kind if manifest is not None else (claimed or "synthetic")


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
