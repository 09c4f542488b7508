"""The worker's loop against the plainest correct PyTorch loop (``plain.py``): from memory, and with reading that waits.

Ours is ``rank.measure`` as a rank of a real run calls it, calibration aside; the other is ``plain.train``. Both get the
same model, data set, batch, threads (``OMP_NUM_THREADS``, else all cores), seed, warm-up and timed steps, and both build
model and loader anew each time. They take turns within one process per workload, first one ahead, then the other: a
process apart for each side would add the differences between processes (where memory lies, which huge pages it got),
which are larger than what is looked for, and turns let what else the machine does hit both sides. Each pair gives one
ratio; their median counts. What our rank tells the C library to do with freed memory, the plain loop gets too that way;
the last row shows what it is worth to a plain loop that does not know of it. Data in memory need no loader processes, which would only take cores from training.

Reading that waits: every sample sleeps so that a batch takes as long to read as a step takes to compute, as the plain
loop has just measured it. The plain loop reads in line, ours in as many loader processes as it chooses by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain
from benchmarks.report import Row
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker import rank
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS as CATALOGUE
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

WORKLOADS = ("cosmoflow", "deepcam", "resnet50", "language_model")
STEPS, WARMUP = 16, 4
PAIRS = 15
THROTTLED_PAIRS = 3
MEMORY, WAITING = 0.98, 1.5


@dataclass(frozen=True)
class Throttled:
    """A data set whose samples come *seconds* late."""

    dataset: Any
    seconds: float

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, float]:
        """Return sample *index*; reading it takes the time that waiting took."""
        begin = time.perf_counter()
        time.sleep(self.seconds)
        inputs, targets, _ = self.dataset[index]
        return inputs, targets, time.perf_counter() - begin


@contextlib.contextmanager
def reading(throttled: Throttled) -> Iterator[None]:
    """Let the worker's ``files`` be *throttled*: the one thing in our loop's way that is not a real run's."""
    original = source.open_source
    source.open_source = lambda *_, **__: source.DataSource(throttled, "synthetic", "files", "unknown")
    try:
        yield
    finally:
        source.open_source = original


class Pair:
    """Both sides of one workload at its smoke preset."""

    def __init__(self, name: str, folder: Path) -> None:
        cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        torch.set_num_threads(cores)
        workload = next(one for one in CATALOGUE if one.name == name)
        self.folder = folder
        self.task, self.batch = plain.task_of(name, "smoke")
        self.run = RunPlan(
            run_id=name, nonce="", attempt=0, workload=name, parameters=parameters_of(workload, "smoke"), nodes=1,
            ranks=1, cores_per_rank=cores, device_type="cpu", launcher="plain", time_limit_s=600.0, steps=STEPS,
            warmup_steps=WARMUP,
        )  # fmt: skip
        self.accelerator = open_device("cpu", 0)
        count = self.batch * (STEPS + WARMUP)
        self.dataset = source.open_source(
            self.run, self.task, count=count, seed=0, directory=str(folder)
        ).dataset

    def ours(self, run: RunPlan) -> float:
        """Return samples per second of our loop."""
        report = rank.measure(run, Group(), self.accelerator, self.folder, lambda *_: None)
        return report.samples / report.epoch_s

    def plain(self, dataset: Any) -> float:
        """Return samples per second of the plain loop without loader processes."""
        done = plain.train(
            self.task, dataset, batch=self.batch, steps=STEPS, warmup=WARMUP, workers=0, seed=0
        )
        return done.samples_per_s

    def from_memory(self, pairs: int) -> tuple[list[float], list[float], list[float]]:
        """Return of *pairs* pairs: ratios ours / plain, the plain loop's seconds per step, our samples per second."""
        ratios, steps, rates = [], [], []
        for turn in range(pairs):
            ours, other = _in_turn(turn, lambda: self.ours(self.run), lambda: self.plain(self.dataset))
            ratios.append(ours / other)
            steps.append(self.batch / other)
            rates.append(ours)
        return ratios, steps, rates

    def waiting(self, pairs: int, step_s: float) -> list[float]:
        """Return the ratios with a data set that takes *step_s* for each batch."""
        throttled = Throttled(self.dataset, step_s / self.batch)
        run = replace(self.run, data_source="files")
        ratios = []
        with reading(throttled):
            for turn in range(pairs):
                ours, other = _in_turn(turn, lambda: self.ours(run), lambda: self.plain(throttled))
                ratios.append(ours / other)
        return ratios


def _in_turn(turn: int, ours: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    if turn % 2:
        first = ours()
        return first, other()
    second = other()
    return ours(), second


def measure(name: str) -> dict[str, list[float]]:
    """Return the ratios of one workload, from memory and waiting, and the plain loop's seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(name, Path(folder))
        pair.from_memory(1)  # the first use of every kernel, on both sides
        ratios, steps, rates = pair.from_memory(PAIRS)
        return {
            "memory": ratios,
            "ours_per_s": rates,
            "step_s": steps,
            "waiting": pair.waiting(THROTTLED_PAIRS, statistics.median(steps)),
        }


def without_our_malloc(name: str, pairs: int) -> float:
    """Return samples per second of the plain loop in a process that our rank has not touched, as a good user's is."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    task, batch = plain.task_of(name, "smoke")
    dataset = source.dataset(task, count=batch * (STEPS + WARMUP), seed=0)
    done = [
        plain.train(task, dataset, batch=batch, steps=STEPS, warmup=WARMUP, workers=0, seed=0).samples_per_s
        for _ in range(pairs)
    ]
    return statistics.median(done)


def _in_its_own_process(call: str) -> Any:
    code = f"import json; from benchmarks import loop_against_plain as l; print(json.dumps(l.{call}))"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def run() -> list[Row]:
    """Measure each workload in a process of its own."""
    found = {name: _in_its_own_process(f"measure({name!r})") for name in WORKLOADS}
    rows = [_row(f"{name} from memory, ours / plain", MEMORY, one["memory"]) for name, one in found.items()]
    rows += [
        _row(
            f"{name}, reading takes a step's {1e3 * statistics.median(one['step_s']):.0f} ms, ours / in line",
            WAITING,
            one["waiting"],
        )
        for name, one in found.items()
    ]
    for name, one in found.items():
        with_it = statistics.median(one["ours_per_s"])
        alone = _in_its_own_process(f"without_our_malloc({name!r}, {PAIRS})")
        text = f"{with_it / alone:.2f} ({with_it:.1f} against {alone:.1f} samples/s)"
        rows.append(Row(f"{name} from memory, ours / plain in a process of its own", "-", text, None))
    return rows


def _row(what: str, reach: float, ratios: list[float]) -> Row:
    middle = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    text = f"{middle:.3f} (median of {len(ratios)} pairs, quartiles {low:.3f} to {high:.3f})"
    return Row(what, f">= {reach}", text, middle >= reach)
