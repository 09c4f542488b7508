"""How fast a training's samples are read and unpacked, by each rank and each of its reading processes.

Nothing is trained meanwhile. Reading processes are started before the first repetition and stay; in each repetition they
read each sample of their rank once, through the format's reader, the page cache being in the asked state.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from torch.utils.data import SequentialSampler, Subset

from pytest_mlhpc.node.protocol.schema import Figure, Rate, TimedOperation
from pytest_mlhpc.node.worker import distributed, prepare
from pytest_mlhpc.node.worker.data import dataset_files
from pytest_mlhpc.node.worker.data.dataset_files import DataError, layout_of
from pytest_mlhpc.node.worker.data.make import make_set
from pytest_mlhpc.node.worker.data.source import MADE_BUDGET, open_source
from pytest_mlhpc.node.worker.environment import WorkerFailure, filled
from pytest_mlhpc.node.worker.probes import measure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.characters import inner_batch

#: How far equal runs differ: file systems are shared.
TOLERANCE = 0.30


class ReadingProbe:
    """This rank's share of the samples, and the processes that read it."""

    kernel_works = True  # files

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        group, parameters = place.group, place.run.parameters
        dataset = self._open(int(parameters["samples"]))
        share = range(group.rank, len(dataset), group.world)
        if not share:
            text = f"{len(dataset)} samples cannot be shared by {group.world} ranks"
            raise WorkerFailure("data_exhausted", text)
        self._paths: List[Path] = [dataset.reader.paths[dataset.chosen[index]] for index in share]
        self._samples = len(share)
        self._processes = prepare.choose_workers(
            parameters["loader_workers"], "files", place.run.cores_per_rank, place.accelerator.type
        )
        own: Subset[Any] = Subset(dataset, list(share))
        shape = prepare.Shape(inner_batch(parameters), self._processes, pin=False)
        self._loader: Any = prepare.loader_of(own, SequentialSampler(own), shape, whole=False)
        self._states = {place.run.cache}
        inputs, targets, _ = dataset[share[0]]
        self._unpacked = inputs.numel() * inputs.element_size() + targets.numel() * targets.element_size()
        self._file_bytes = sum(path.stat().st_size for path in self._paths)
        self.operations: Tuple[TimedOperation, ...] = (TimedOperation("read", (), self._rates()),)

    def _open(self, count: int) -> Any:
        """Return the set, made first where no path is given; the first rank of a disk goes first."""
        place = self._place
        run = replace(measure.run_of(place), data_source="files", data_kind="synthetic", cache="unknown")
        path = str(place.run.parameters["path"])
        try:
            given = filled(path, os.environ) if path else None
        except ValueError as error:
            raise DataError(path, str(error)) from None
        first = prepare.goes_first(place.group, os.environ)
        if not first:
            distributed.barrier(place.group, place.accelerator)
        root = given or self._made(run.workload, run.parameters, count)
        run = replace(run, data_path=str(root))
        task = prepare.load_task(run)
        source = open_source(run, task, count=count, seed=measure.SEED, directory=str(place.directory))
        if first:
            distributed.barrier(place.group, place.accelerator)
        return source.dataset

    def _made(self, workload: str, parameters: Mapping[str, Any], count: int) -> Path:
        form = str(self._place.run.parameters["format"])
        layout = layout_of(workload, parameters, samples=count, validation=0, seed=measure.SEED, form=form)
        root = self._place.directory / "data" / layout.name
        if layout.raw_bytes * count > MADE_BUDGET:
            size = f"{layout.raw_bytes * count / 1e9:.0f} GB unpacked"
            how = f"`mlhpc data make {workload} --samples {count} DIR` and path=DIR"
            raise DataError(root, f"{count} samples ({size}) are too many to make within a run: use {how}")
        make_set(layout, root)
        return root

    def _rates(self) -> Tuple[Rate, ...]:
        each = self._file_bytes / (max(1, self._processes) * self._place.group.world)
        amounts = (
            ("read_bandwidth", "B/s", float(self._file_bytes)),
            ("sample_bandwidth", "B/s", float(self._samples * self._unpacked)),
            ("sample_rate", "samples/s", float(self._samples)),
            ("read_bandwidth_per_process", "B/s", each),
        )
        return tuple(Rate(name, unit, amount, tolerance=TOLERANCE) for name, unit, amount in amounts)

    def verify(self) -> None:
        """Read all once, and compare their number and size.

        Raises:
            WorkerFailure: ``wrong_result``, not all samples came.
        """
        self._all()

    def _all(self) -> None:
        samples = size = 0
        for inputs, targets, _ in self._loader:
            samples += len(inputs)
            size += inputs.numel() * inputs.element_size() + targets.numel() * targets.element_size()
        if (samples, size) != (self._samples, self._samples * self._unpacked):
            text = (
                f"rank {self._place.group.rank} was to read {self._samples} samples of {self._unpacked} bytes, and got "
                f"{samples} of {size} bytes together"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Bring the page cache into the asked state, then read."""
        wanted = self._place.run.cache
        self._states.add(dataset_files.prepare(self._paths, wanted))
        self._place.barrier()
        start = time.perf_counter()
        self._all()
        return {"read": time.perf_counter() - start}

    def figures(self) -> Tuple[Figure, ...]:
        """Return how much was read by how many."""
        return (
            Figure("file_bytes", float(self._file_bytes), "B", "none", "sum"),
            Figure("reading_processes", float(max(1, self._processes)), "1", "none", "sum"),
        )

    def cache(self) -> str:
        """Return the state in which every repetition found the page cache, or unknown."""
        return next(iter(self._states)) if len(self._states) == 1 else "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return which files."""
        return {"suffix": "".join(self._paths[0].suffixes[-2:]), "reading_processes": str(self._processes)}

    def close(self) -> None:
        """End the reading processes."""
        self._loader = None


#: A rank's part, by its ProbePlace.
probe = ReadingProbe
