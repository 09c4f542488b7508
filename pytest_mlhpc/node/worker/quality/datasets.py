"""The data of a run to a quality target: where they come from, in no cache, and which rank stages which files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from torch.utils.data import Dataset, Subset

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker.base import Task
from pytest_mlhpc.node.worker.data import dataset_files, source
from pytest_mlhpc.node.worker.data.dataset_files import (
    DataError,
    layout_of,
    list_files,
    read_manifest,
    total_bytes,
)
from pytest_mlhpc.node.worker.data.formats import Corpus, ExpectedSample, open_corpus, open_files, windows
from pytest_mlhpc.node.worker.data.make import make_set
from pytest_mlhpc.node.worker.data.source import FileDataset, TextDataset
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.quality import staging
from pytest_mlhpc.node.worker.quality.rules import Logbook, QualitySettings, Staging
from pytest_mlhpc.node.worker.quality.staging import RankNode, gathered

#: Names of the folder with evaluation samples.
EVALUATION = ("validation", "val", "valid", "evaluation", "eval")
#: Of a text without a number of evaluation samples, the last so many-th part is for evaluation.
TEXT_SHARE = 10
#: A set of which more than this is in the page cache, though it was asked to leave, is warm.
WARM = 0.5


@dataclass(frozen=True)
class DataOrigin:
    """Where the data lie when the clock starts. ``root`` None: the interpreter's own sources."""

    root: Optional[Path]
    kind: str
    files: Tuple[Path, ...]

    @property
    def base(self) -> Path:
        """The folder that all ``files`` lie in."""
        if self.root is None:
            return Path(sysconfig.get_path("stdlib"))
        return self.root.parent if self.root.is_file() else self.root


@dataclass(frozen=True)
class FilePart:
    """Samples that are files: the ``chosen`` ones of a reader's."""

    reader: Any
    chosen: Tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The files to read."""
        return tuple(self.reader.paths[index] for index in self.chosen)

    def share(self, node: RankNode) -> FilePart:
        """Return every so many-th sample: those of *node*."""
        return FilePart(self.reader, self.chosen[node.number :: node.count])

    def moved(self, move: Callable[[Path], Path]) -> FilePart:
        """Return the same samples elsewhere."""
        paths = tuple(map(move, self.reader.paths))
        return FilePart(dataclasses.replace(self.reader, paths=paths), self.chosen)

    def dataset(self, task: Task) -> Dataset[Any]:
        """Return what torch reads."""
        return FileDataset(self.reader, self.chosen, (task.input.dtype, task.target.dtype))


@dataclass(frozen=True)
class TextPart:
    """``count`` windows of a text, from window ``first``."""

    corpus: Corpus
    context: int
    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def paths(self) -> Tuple[Path, ...]:
        """The files that its windows lie in."""
        begin, end = self.first * self.context, (self.first + self.count) * self.context + 1
        starts = self.corpus.starts
        return tuple(
            file
            for file, low, high in zip(self.corpus.files, starts, starts[1:])
            if low < end and high > begin
        )

    def share(self, _node: RankNode) -> TextPart:
        """Return all: nodes have no shares of a text."""
        return self

    def moved(self, move: Callable[[Path], Path]) -> TextPart:
        """Return the same windows elsewhere."""
        corpus = dataclasses.replace(self.corpus, files=tuple(map(move, self.corpus.files)))
        return dataclasses.replace(self, corpus=corpus)

    def dataset(self, task: Task) -> Dataset[Any]:
        """Return what torch reads."""
        lengths = (task.input.shape[0], task.target.shape[0])
        whole = TextDataset(self.corpus, self.context, lengths, (task.input.dtype, task.target.dtype))
        return Subset(whole, range(self.first, self.first + self.count))


Part = Union[FilePart, TextPart]


def origin_of(run: RunPlan, settings: QualitySettings, directory: Path, seed: int) -> DataOrigin:
    """Return where the run's data lie. A synthetic set that fits is made first where none is named, by whoever comes first.

    Raises:
        DataError: missing, incomplete, no archives where those were asked for, or no room to make a set.
    """
    packed = settings.staging is not None and settings.staging.how == "archives"
    if run.workload == source.TEXT_WORKLOAD and not run.data_path:
        return _own_text(run, packed=packed)
    if run.data_path:
        root, kind = Path(run.data_path), source.kind_of(Path(run.data_path), run.data_kind)
    else:
        root, kind = _made(run, settings, directory, seed), "synthetic"
        if packed:
            root = staging.pack(root, root.with_name(f"{root.name}.archives"))
    files = [root] if root.is_file() else list_files(root)
    if packed:
        if not any(map(staging.is_archive, files)):
            raise DataError(
                root, f"holds no archives ({', '.join(staging.SUFFIXES)}), as staging='archives' needs"
            )
    else:
        _complete(root, files)
    return DataOrigin(root, kind, tuple(files))


def _own_text(run: RunPlan, *, packed: bool) -> DataOrigin:
    chosen = str(run.parameters.get("text_path") or "")
    if packed:
        raise DataError(
            chosen or "text", "is not packed: name a folder with archives as data, or use staging='files'"
        )
    root = Path(chosen) if chosen else None
    return DataOrigin(root, "real", open_corpus(root).files)


def _complete(root: Path, files: Sequence[Path]) -> None:
    """Refuse a set of ours of which something is missing; of others nobody says what belongs to it. Nothing is read."""
    manifest = read_manifest(root)
    if manifest is None:
        return
    size = total_bytes(files)
    if (len(files), size) != (manifest.files, manifest.bytes):
        text = f"{len(files)} files of {size} bytes, its manifest says {manifest.files} of {manifest.bytes}"
        raise DataError(root, f"is damaged: {text}; make or copy it again")


def _made(run: RunPlan, settings: QualitySettings, directory: Path, seed: int) -> Path:
    train, evaluated = settings.train_samples or 0, settings.eval_samples or 0
    layout = layout_of(run.workload, run.parameters, samples=train, validation=evaluated, seed=seed)
    layout = dataclasses.replace(layout, sizes={**layout.sizes, "learnable": 1})
    if layout.raw_bytes * (train + evaluated) > source.MADE_BUDGET:
        raise DataError(
            directory,
            f"{train} + {evaluated} samples are too many to make within a run: make a set once with `mlhpc data make "
            f"{run.workload} --samples {train} --validation {evaluated} DIR` and name DIR as data, or use fewer",
        )
    root = directory / "data" / layout.name
    make_set(layout, root)
    return root


def cool(paths: Sequence[Path]) -> str:
    """Drop *paths* from this node's page cache and return what came of it: cold, unknown or warm.

    Unknown where the kernel does not tell, as of files that we neither own nor may write, see ``data/dataset_files.py``.
    """
    try:
        dataset_files.evict(paths)
        if not all(os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid() for path in paths):
            return "unknown"
        resident = dataset_files.residency(paths)
    except OSError:
        return "unknown"
    if resident <= dataset_files.TOLERANCE:
        return "cold"
    return "warm" if resident > WARM else "unknown"


def splits_of(
    run: RunPlan, task: Task, settings: QualitySettings, root: Optional[Path], seed: int
) -> Tuple[Part, Part]:
    """Return the samples for training and those for evaluation of the set at *root*, which is listed and not read.

    Raises:
        DataError: a part is missing, or too small for what was asked.
    """
    if run.workload == source.TEXT_WORKLOAD:
        return _text_splits(int(run.parameters["context"]), settings, root)
    if root is None:
        raise DataError("data", "names no set")
    folder = next((root / name for name in EVALUATION if (root / name).is_dir()), None)
    if folder is None:
        raise DataError(
            root, f"has no samples for evaluation: expected a folder {' or '.join(EVALUATION[:2])}"
        )
    found: List[Part] = []
    for place, wanted, crop in (
        (root, settings.train_samples, {}),
        (folder, settings.eval_samples, {"crop": "center"}),
    ):
        fields = {**run.parameters, **crop}
        reader: Any = open_files(
            run.workload,
            place,
            ExpectedSample(task.input.shape, task.target.shape, task.classes, fields),
            seed,
        )
        available = len(reader.paths)
        _enough(place, available, wanted if settings.whole else None)
        found.append(FilePart(reader, source.choose(available, wanted or available, seed)))
    return found[0], found[1]


def _enough(place: Path, available: int, wanted: Optional[int]) -> None:
    if wanted is not None and wanted > available:
        raise DataError(place, f"holds {available} samples, {wanted} were asked for", "data_exhausted")


def _text_splits(context: int, settings: QualitySettings, root: Optional[Path]) -> Tuple[Part, Part]:
    corpus = open_corpus(root)
    available = windows(corpus, context)
    evaluated = settings.eval_samples or max(1, available // TEXT_SHARE)
    train = settings.train_samples or max(1, available - evaluated)
    _enough(root or Path(sysconfig.get_path("stdlib")), available, train + evaluated)
    return TextPart(corpus, context, 0, train), TextPart(corpus, context, available - evaluated, evaluated)


def check_first(part: Part, task: Task) -> None:
    """Read one sample and refuse a set of another shape.

    Raises:
        DataError: it cannot be read, or does not fit.
    """
    dataset: Any = part.dataset(task)
    if isinstance(dataset, FileDataset):
        source.compare(dataset, task, part.paths[0])
    else:
        dataset[0]


#: Lists the training and the evaluation part of the set at a place, which holds the share of one of so many nodes.
Finder = Callable[[Optional[Path], int], Tuple[Part, Part]]


@dataclass(frozen=True)
class StagedSplits:
    """The two parts where training reads them, and what this rank did to bring them there (zero: nothing was staged)."""

    training: Part
    evaluation: Part
    seconds: float = 0.0
    bytes: int = 0


def folder(
    settings: QualitySettings, run: RunPlan, node: RankNode, group: Group, stack: contextlib.ExitStack
) -> Optional[Path]:
    """Return the run's folder on this node, which goes with *stack*, or None where nothing is staged.

    Raises:
        DataError: it cannot be made.
    """
    if settings.staging is None:
        return None
    place = staging.folder_of(staging.base_of(settings.staging.path, os.environ), run.run_id, node)
    if node.leads:
        stack.enter_context(staging.staging_folder(place))
    gathered(group, None)  # it is there for all
    return place


def move(
    origin: DataOrigin,
    settings: QualitySettings,
    node: RankNode,
    log: Logbook,
    *,
    group: Group,
    place: Optional[Path],
    find: Finder,
) -> StagedSplits:
    """Find the two parts, after bringing them to *place* if that is asked for. All ranks leave it together.

    Raises:
        DataError: a file is missing, damaged or changes, or there is no room for it.
    """
    if settings.staging is None or place is None:
        return StagedSplits(*find(origin.root, 1))
    start = time.perf_counter()
    log.note("staging_start")
    if settings.staging.how == "archives":
        copied = _unpacked(origin, settings.staging, node, place)
        gathered(group, None)
        found = find(place, node.count if settings.by_node else 1)
    else:
        found, copied = _copied(origin, settings, node, place, find)
        gathered(group, None)
    log.note("staging_stop")
    return StagedSplits(*found, time.perf_counter() - start, copied)


def _unpacked(origin: DataOrigin, asked: Staging, node: RankNode, place: Path) -> int:
    chosen = staging.of_node(origin.files, node.number, node.count, share=asked.share == "node")
    loose = [
        (file, place / file.relative_to(origin.base)) for file in origin.files if not staging.is_archive(file)
    ]
    done = staging.each(
        lambda one: staging.unpack(one, place), chosen[node.place :: node.ranks], asked.workers
    )
    return done + staging.each(staging.copy, loose if node.leads else [], asked.workers)


def _copied(
    origin: DataOrigin, settings: QualitySettings, node: RankNode, place: Path, find: Finder
) -> Tuple[Tuple[Part, Part], int]:
    asked = settings.staging
    if asked is None:
        raise ValueError("nothing is staged")
    training, evaluation = find(origin.root, 1)
    if asked.share == "node":
        training, evaluation = training.share(node), evaluation.share(node)
    base = origin.base
    wanted: Dict[Path, None] = dict.fromkeys((*training.paths, *evaluation.paths))
    pairs = [(path, place / path.relative_to(base)) for path in wanted]
    done = staging.each(staging.copy, pairs[node.place :: node.ranks], asked.workers)

    def there(path: Path) -> Path:
        return place / path.relative_to(base)

    return (training.moved(there), evaluation.moved(there)), done
