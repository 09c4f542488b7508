"""PAYLOAD. What the one rank on Cerebras' systems does: compile, warm up, measure steps by when their losses come, report.

Forward, backward and update are one program, and have no times of their own. On a cluster the data go from its workers to the
wafer past this host, which sees no waiting for them: the record's environment says so (``data_waits``).
"""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, to_json
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import prepare, reporting, scratch, timing
from pytest_mlhpc.node.worker.accelerators.wse import MODELS, Wse, inputs, load
from pytest_mlhpc.node.worker.accelerators.wse.failing import before_any_step
from pytest_mlhpc.node.worker.accelerators.wse.stepping import backend_options, open_backend, shared, step_of
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import PROGRESS_NS, Batch, Trainer, resolve_losses
from pytest_mlhpc.node.worker.reporting import Progress

_CLUSTER_CONFIG = "cerebras.appliance.cluster_config"


@dataclass
class Recorder:
    """What steps leave behind: when their losses came, and how long this host waited for each batch and read it."""

    run: RunPlan
    progress: Progress
    asked_ns: int = 0
    ends_ns: List[int] = field(default_factory=list)
    losses: List[float] = field(default_factory=list)
    waits_s: List[float] = field(default_factory=list)
    reads_s: List[float] = field(default_factory=list)
    started_ns: int = 0
    before: Any = None
    told_ns: int = 0

    def begin(self) -> None:
        """Note that steps are asked for from now on; without warm-up the window begins here."""
        self.asked_ns = self.told_ns = time.perf_counter_ns()
        if self.run.warmup_steps == 0:
            self._open()

    def end_step(self, loss: float, samples: int) -> None:
        """Note that a step's loss is here."""
        now = time.perf_counter_ns()
        self.ends_ns.append(now)
        self.losses.append(loss)
        done = len(self.ends_ns) - self.run.warmup_steps
        if done == 0:
            self._open()
        if now - self.told_ns >= PROGRESS_NS:
            self.told_ns = now
            self.progress(max(done, 0), self.run.steps, self._rate(done, now, samples))

    def _open(self) -> None:
        self.before = contention.snapshot()
        self.started_ns = time.time_ns()

    def _rate(self, done: int, now: int, samples: int) -> float:
        return samples * done / ((now - self.window()[0]) / 1e9) if done > 0 else 0.0

    def window(self) -> List[int]:
        """Return the window's start and the ends of its steps, in nanoseconds of the clock for durations."""
        return [self.asked_ns, *self.ends_ns][self.run.warmup_steps :]


def measure(run: RunPlan, group: Group, accelerator: Wse, directory: Path, progress: Progress) -> RankReport:
    """Train the run's steps and return what was measured.

    Raises:
        WorkerFailure: ``cannot_lower``, Cerebras' compiler cannot take the model; ``wrong_device``, no cluster answers; or
            the run is broken otherwise, the name says how.
    """
    if group.world != 1:
        raise WorkerFailure(
            "worker_exit", f"one rank drives all Cerebras systems, not {group.world}; say csx="
        )
    cstorch = load()
    on_cpu = run.parameters.get("cerebras") == "cpu"
    accelerator.model = MODELS["cpu" if on_cpu else None]
    sizes = prepare.split_batch(run, 1)
    csx = shared(run.parameters.get("csx"), sizes.step_samples)
    seed = int(run.parameters.get("seed") or 0)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    cost = reporting.cost(run, task, accelerator)
    network = task.model().train()
    recorder = Recorder(run, progress)
    torch.manual_seed(seed)  # of dropout, as on other devices
    started = time.perf_counter()
    trainer = Trainer(task, network, task.optimizer(network), accelerator)
    data = prepare.open_data(run, trainer, group, sizes, directory) if on_cpu else None
    backend = _backend(cstorch, run, directory, None if on_cpu else csx)
    step = step_of(cstorch, backend, task, network, str(run.parameters.get("precision") or "fp32"))
    if data is None:
        loader = cstorch.utils.data.DataLoader(inputs.stream, json.dumps(to_json(run)), str(directory))
    else:
        loader = cstorch.utils.data.DataLoader(lambda: _timed(data.batches, recorder))
    built_s = time.perf_counter() - started
    _train(cstorch, loader, step, recorder, sizes.step_samples)
    ended_ns = time.time_ns()
    during = contention.difference(recorder.before, contention.snapshot())
    ends = recorder.window()
    epoch_s = (ends[-1] - ends[0]) / 1e9
    timing.check_wall(recorder.started_ns, ended_ns, epoch_s)
    first = run.warmup_steps
    own = {} if on_cpu else {"data_waits": "not seen: the cluster's workers stream to the device"}
    return RankReport(
        **reporting.who(run, group, accelerator),
        **cost,
        environment=reporting.surroundings(run, group, accelerator, own),
        steps=len(ends) - 1,
        samples=(len(ends) - 1) * sizes.step_samples,
        started_ns=recorder.started_ns,
        ended_ns=ended_ns,
        epoch_s=epoch_s,
        wait_s=sum(recorder.waits_s[first : first + run.steps]),
        copy_s=0.0,
        warmup_s=built_s + (ends[0] - recorder.asked_ns) / 1e9,
        step_times_s=tuple((end - start) / 1e9 for start, end in zip(ends, ends[1:])),
        losses=resolve_losses([torch.tensor(loss) for loss in recorder.losses]),
        read_s=sum(recorder.reads_s[first : first + run.steps]) if recorder.reads_s else None,
        data_kind=run.data_kind if data is None else data.source.kind,
        cache="unknown" if data is None else data.source.cache,
        contention=during,
        loader_start_s=None if data is None else data.start_s + (recorder.waits_s or [0.0])[0],
    )


def _backend(cstorch: Any, run: RunPlan, directory: Path, csx: Optional[int]) -> Any:
    """Return the back-end for *csx* systems, the package's own on the CPU for None."""
    folder = scratch.of_run(directory) / f"cerebras-{run.run_id}"
    precision = str(run.parameters.get("precision") or "fp32")
    if csx is None:
        return open_backend(cstorch, "CPU", folder, precision)
    options: Mapping[str, Any] = backend_options(
        csx, directory, run.time_limit_s, importlib.import_module(_CLUSTER_CONFIG)
    )
    return open_backend(cstorch, "CSX", folder, precision, **options)


def _train(cstorch: Any, loader: Any, step: Any, recorder: Recorder, samples: int) -> None:
    run = recorder.run

    def told(loss: Tensor) -> None:
        recorder.end_step(float(loss.item()), samples)

    tell = cstorch.step_closure(told)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=run.warmup_steps + run.steps)
    recorder.begin()
    try:
        for batch_inputs, batch_targets in executor:
            tell(step(batch_inputs, batch_targets))
    except WorkerFailure:
        raise
    except Exception as error:
        if recorder.ends_ns:
            raise
        raise WorkerFailure(*before_any_step(error)) from error
    if len(recorder.ends_ns) < run.warmup_steps + run.steps:
        text = (
            f"the losses of {len(recorder.ends_ns)} steps came, of {run.warmup_steps} and {run.steps} asked"
        )
        raise WorkerFailure("too_few_steps", text)


def _timed(batches: Iterator[Batch], recorder: Recorder) -> Iterator[Tuple[Tensor, Tensor]]:
    """Pass batches on, and note how long each was waited for and read."""
    while True:
        asked = time.perf_counter_ns()
        batch: Optional[Batch] = next(batches, None)
        if batch is None:
            text = f"the loader ended after {len(recorder.waits_s)} steps; use more data, fewer steps or a smaller batch"
            raise WorkerFailure("data_exhausted", text)
        recorder.waits_s.append((time.perf_counter_ns() - asked) / 1e9)
        recorder.reads_s.append(batch[2])
        yield batch[0], batch[1]
