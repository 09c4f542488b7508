"""PAYLOAD, no torch. The sampler beside a benchmark (field ``telemetry``): on each node one process, started by the node's first rank.

It is a process of its own, as a thread would take turns with the training for Python's lock. It looks at all that the rank's
parent has started (the batch, torchrun, Slurm's step: all ranks of the node), writes lines into a file of the rank's, and ends with
the rank, however that ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Callable, List

from pytest_mlhpc.results.schema import RankReport, SchemaError, from_json
from pytest_mlhpc.screen.node.samples import Sample
from pytest_mlhpc.screen.node.summary import figures, window

if TYPE_CHECKING:
    from pytest_mlhpc.batch.plan import RunPlan
    from pytest_mlhpc.worker.accelerators.base import Accelerator
    from pytest_mlhpc.worker.distributed import Group

#: Seconds that the sampler may take to its first look, or to another one; and to end after SIGTERM.
LOOK_S, END_S = 60.0, 10.0

Measure = Callable[["RunPlan", "Group", "Accelerator", Path, Callable[[int, int, float], None]], RankReport]


def watched(measure: Measure) -> Measure:
    """Return *measure* with the sampler beside it; its figures are those of the timed window."""

    def measured(
        run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Callable[..., None]
    ) -> RankReport:
        if group.local_rank != 0:
            return measure(run, group, accelerator, directory, progress)
        with tempfile.TemporaryFile() as file:
            watcher = start(file)
            try:
                await_look(file, watcher)
                report = measure(run, group, accelerator, directory, progress)
                await_look(file, watcher)  # short runs have a look before and one after
            finally:
                end(watcher)
            file.seek(0)
            samples = read(file)
        behind_s = (time.time_ns() - time.monotonic_ns()) / 1e9
        found = window(samples, report.started_ns / 1e9 - behind_s, report.ended_ns / 1e9 - behind_s)
        return dataclasses.replace(report, figures=(*report.figures, *figures(found)))

    return measured


def start(file: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the sampler; it writes a line for each look to *file*."""
    words = [
        "-m",
        "pytest_mlhpc.screen.node.watch",
        "--seconds",
        "1e9",
        "--root",
        str(os.getppid()),
        "--for",  # told, as who is killed at once has left an orphan before it could ask for its parent
        str(os.getpid()),
        "--lines",
    ]
    return subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL
    )


def await_look(file: IO[bytes], watcher: subprocess.Popen[Any]) -> None:
    """Wait until one more look is written, the sampler has ended, or it takes too long: then the record lacks its figures.

    The place in *file*, which the sampler writes on, stays; what was written before is not read, as it may be hours of looks.
    """
    deadline = time.monotonic() + LOOK_S
    begin = os.fstat(file.fileno()).st_size
    while watcher.poll() is None and time.monotonic() < deadline:
        if b"\n" in os.pread(file.fileno(), os.fstat(file.fileno()).st_size - begin, begin):
            return
        time.sleep(0.02)


def end(watcher: subprocess.Popen[Any]) -> None:
    """End the sampler."""
    watcher.terminate()
    try:
        watcher.wait(END_S)
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.wait()


def read(file: IO[bytes]) -> List[Sample]:
    """Return the samples that were written; the last line may be cut short."""
    found = []
    try:
        for line in file:
            found.append(from_json(Sample, json.loads(line)))  # noqa: PERF401 - what came before a broken line counts
    except (ValueError, SchemaError):
        pass
    return found
