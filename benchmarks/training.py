"""Our loop against a plain reading of the HPDC'24 method, and against itself with data already on the device.

The method (Rae, Lee, Richings and Weiland, HPDC'24; its code is EPCCed/reframe-mlperf-epcc) reads by four processes,
which also cast and scale, so that samples travel as float32; it copies each batch to the device by a blocking ``.to(device)``
from pinned memory, and synchronises after every step. :func:`method` is that and no more; power is not asked for in
every step, as there. Ours is ``rank.measure`` as a rank of a real run calls it. Both get the same model, files, batch,
threads, seed, warm-up and timed steps, and take turns in one process.

Files lie in the page cache, synthetic sets in the workload's own formats; the share is that of our own throughput with
``data="device"``. Bounds are for a GPU: on a CPU the reading processes take cores from training, and figures are printed alone.
gzip has a row of its own with the cores that unpacking keeps busy. Rows against published figures of one H100 are those of
``training_published.py``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import plain, training_published
from benchmarks.report import Row
from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.worker import rank
from pytest_mlhpc.node.worker.base import Task, open_device
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.data.dataset_files import FORMATS, layout_of
from pytest_mlhpc.node.worker.data.make import make_set
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.workloads.characters import training_of
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

WORKLOADS = ("cosmoflow", "deepcam")
#: Steps of one measurement, and measurements of each side. MLHPC_BENCH_PAIRS overrides the latter on machines that are slow.
STEPS, WARMUP, PAIRS = 16, 4, 5
#: Reading processes of the method's own configuration.
READERS = 4
AGAINST_METHOD, SHARE = 1.3, 0.95


def device_type() -> str:
    """Return cuda where torch finds a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Ready:
    """A data set whose samples are made ready by the process that reads them."""

    dataset: Any
    task: Task

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return what the model takes of sample *index*, without batch dimension."""
        inputs, targets, _ = self.dataset[index]
        ready, wanted = self.task.prepare(inputs[None], targets[None])
        return ready[0], wanted[0]


def method(task: Task, dataset: Any, batch: int, device: str) -> float:
    """Train as the HPDC'24 paper's code does, on one device, and return samples per second of the timed steps."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = task.model().to(device).train()
    optimizer = task.optimizer(model)
    ready = Ready(dataset, task)
    pinned = device == "cuda"
    loader: Any = DataLoader(
        ready, batch_size=batch, shuffle=True, drop_last=True, num_workers=READERS, pin_memory=pinned
    )
    batches = plain.batches(loader)
    start = time.perf_counter()
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            start = time.perf_counter()
        inputs, targets = next(batches)
        inputs, targets = inputs.to(device), targets.to(device)
        loss = task.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves this method without types
        optimizer.step()
        optimizer.zero_grad()
        _synchronise(device)
    return STEPS * batch / (time.perf_counter() - start)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Done:
    """What our loop achieved: samples per second, and cores that its reading processes kept busy."""

    rate: float
    reading_cores: float


class Sides:
    """One workload with its sets of files: ours, the method's, and ours without files."""

    def __init__(self, name: str, folder: Path) -> None:
        cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        torch.set_num_threads(cores)
        self.device, self.folder, self.name = device_type(), folder, name
        self.preset = "reference" if self.device == "cuda" else "smoke"
        self.task, self.batch = plain.task_of(name, self.preset)
        self.parameters = parameters_of(training_of(name), self.preset)
        self.run = RunPlan(
            run_id=name, nonce="", attempt=0, workload=name, parameters=self.parameters, nodes=1, ranks=1,
            cores_per_rank=cores, device_type=self.device, launcher="plain", time_limit_s=600.0, steps=STEPS,
            warmup_steps=WARMUP,
        )  # fmt: skip
        self.accelerator = open_device(self.device, 0)
        self.samples = self.batch * (STEPS + WARMUP)

    def files(self, form: str) -> RunPlan:
        """Return our run from files in *form*, which are made now and read once, so that they are in the page cache."""
        layout = layout_of(self.name, self.parameters, samples=self.samples, validation=0, seed=0, form=form)
        root = self.folder / form
        make_set(layout, root)
        return replace(
            self.run, data_source="files", data_path=str(root), data_kind="synthetic", cache="warm"
        )

    def ours(self, run: RunPlan) -> Done:
        """Train by our loop."""
        report = rank.measure(run, Group(), self.accelerator, self.folder, lambda *_: None)
        return Done(report.samples / report.epoch_s, (report.read_s or 0.0) / report.epoch_s)

    def theirs(self, run: RunPlan) -> float:
        """Train by the method, from the same files."""
        opened = source.open_source(run, self.task, count=self.samples, seed=0, directory=str(self.folder))
        return method(self.task, opened.dataset, self.batch, self.device)


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Return of one workload, for each format: ratios to the method, shares of memory, reading cores, our rates."""
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(name, Path(folder))
        held = replace(sides.run, data_source="device")
        sides.ours(held)  # the first use of every kernel
        found: dict[str, Any] = {"device": sides.device, "preset": sides.preset, "formats": {}}
        for form in FORMATS[name]:
            run = sides.files(form)
            rows: dict[str, list[float]] = {"ratio": [], "share": [], "cores": [], "ours": [], "theirs": []}
            for turn in range(pairs):
                done, memory, theirs = _in_turn(turn, sides, run, held)
                rows["ratio"].append(done.rate / theirs)
                rows["share"].append(done.rate / memory.rate)
                rows["cores"].append(done.reading_cores)
                rows["ours"].append(done.rate)
                rows["theirs"].append(theirs)
            found["formats"][form] = rows
        return found


def _in_turn(turn: int, sides: Sides, run: RunPlan, held: RunPlan) -> tuple[Done, Done, float]:
    """Measure each side once; which is first changes, as the machine may get slower or faster meanwhile."""
    done: dict[str, Any] = {}
    order: list[tuple[str, Callable[[], Any]]] = [
        ("files", lambda: sides.ours(run)),
        ("memory", lambda: sides.ours(held)),
        ("method", lambda: sides.theirs(run)),
    ]
    for name, call in order if turn % 2 else reversed(order):
        done[name] = call()
    return done["files"], done["memory"], done["method"]


def run() -> list[Row]:
    """Measure each workload in a process of its own."""
    pairs = int(os.environ.get("MLHPC_BENCH_PAIRS") or PAIRS)
    rows: list[Row] = []
    for name in WORKLOADS:
        rows += rows_of(name, _in_child(f"measure({name!r}, {pairs})"))
    if device_type() == "cpu":
        return [*rows, *training_published.unmeasured()]
    return [
        *rows,
        *(Row(**_in_child(f"against_published({at})")) for at in range(len(training_published.TARGETS))),
    ]


def against_published(at: int) -> dict[str, Any]:
    """Measure one workload of ``training_published.TARGETS`` on the GPU; returns its row's fields."""
    with tempfile.TemporaryDirectory() as folder:
        target = training_published.TARGETS[at]
        return asdict(training_published.measure(target, open_device(device_type(), 0), Path(folder)))


def _in_child(call: str) -> Any:
    """Return what *call* of a function of this module returns in a process of its own, whose memory ends with it."""
    code = f"import json; from benchmarks import training as t; print(json.dumps(t.{call}))"
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def rows_of(name: str, found: dict[str, Any]) -> list[Row]:
    """Return the rows of one workload; nothing is bound on a CPU, and the share of gzip nowhere."""
    bound = found["device"] == "cuda"
    rows = []
    for form, one in found["formats"].items():
        where = f"{name} {found['preset']} on {found['device']}, {form}"
        rates = (
            f"{statistics.median(one['ours']):.1f} against {statistics.median(one['theirs']):.1f} samples/s"
        )
        rows.append(_row(f"{where}: ours / the HPDC'24 method", AGAINST_METHOD, one["ratio"], bound, rates))
        packed = form.endswith("gzip")
        cores = f"reading takes {statistics.median(one['cores']):.2f} cores"
        rows.append(
            _row(f"{where}: share of data on the device", SHARE, one["share"], bound and not packed, cores)
        )
    return rows


def _row(what: str, reach: float, values: list[float], bound: bool, more: str) -> Row:
    middle = statistics.median(values)
    text = f"{middle:.3f} ({min(values):.3f} to {max(values):.3f} in {len(values)} turns; {more})"
    return Row(
        what, f">= {reach}" if bound else f"- (GPU: >= {reach})", text, middle >= reach if bound else None
    )
