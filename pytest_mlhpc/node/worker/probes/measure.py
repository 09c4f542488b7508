"""How a probe is measured: what it is given, its warm-up and its window."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Protocol, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, TimedOperation
from pytest_mlhpc.node.worker import distributed, loop, prepare, reporting
from pytest_mlhpc.node.worker.base import Accelerator, Task
from pytest_mlhpc.node.worker.data import source
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.loop import Trainer
from pytest_mlhpc.node.worker.reporting import Progress
from pytest_mlhpc.node.worker.workloads.characters import inner_batch, inner_parameters


@dataclass(frozen=True)
class ProbePlace:
    """Where a probe runs: one rank of a run, its device, and the directory of the plan."""

    run: RunPlan
    group: Group
    accelerator: Accelerator
    directory: Path

    def barrier(self) -> None:
        """Wait for the device, then for all ranks."""
        distributed.barrier(self.group, self.accelerator)

    def timed(self, repetitions: int, operation: Callable[[], object]) -> float:
        """Return the seconds that one *operation* takes, of several that are done one behind the other.

        All ranks start together.
        """
        accelerator = self.accelerator
        self.barrier()
        start = accelerator.mark()
        for _ in range(repetitions):
            operation()
        end = accelerator.mark()
        accelerator.wait(end)
        return accelerator.seconds(start, end) / repetitions


class Probe(Protocol):
    """One rank's part of a probe; the module of its workload makes it by ``probe(place: Place) -> Probe``.

    One that has ``figures() -> Tuple[Figure, ...]`` too is asked behind the window for what is no time of an operation, and
    may do there what would slow the window.

    ``operations`` are those that this rank times, each without its seconds. ``kernel_works`` says that much of the work is
    done by the kernel for this rank, so that its processor time cannot be separated from other programs'.
    """

    operations: Tuple[TimedOperation, ...]
    kernel_works: bool

    def verify(self) -> None:
        """Check, outside the timed window, that what is measured does what it should.

        Raises:
            WorkerFailure: ``wrong_result``, it does not.
        """

    def repeat(self) -> Mapping[str, float]:
        """Do everything once and return the seconds of each of ``operations`` by name."""

    def cache(self) -> str:
        """Return the verified state of the page cache in which everything was read: cold, warm, or unknown."""

    def environment(self) -> Mapping[str, str]:
        """Return what belongs in a record: which file system, which library."""

    def close(self) -> None:
        """Leave nothing behind. Called whatever happened."""


#: Figures of other programs' processor time, see :class:`pytest_mlhpc.node.worker.probes.measure.Probe`.
_OF_PROCESSORS = ("busy_cores", "own_cores")


@dataclasses.dataclass(frozen=True)
class ProbeWindow:
    """The timed window of a probe. ``seconds`` are those of each operation, ``repetitions`` those of all together."""

    started_ns: int
    ended_ns: int
    epoch_s: float
    seconds: Mapping[str, List[float]]
    repetitions: List[float]
    meanwhile: reporting.WindowUsage


def measure(
    run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Progress
) -> RankReport:
    """Do the run's repetitions on this rank and return what was measured.

    Raises:
        WorkerFailure: the run is broken; the name says how.
    """
    place = ProbePlace(run, group, accelerator, directory)
    before = reporting.calibrated(run, group, accelerator)
    probe: Probe = prepare.load_module(run).probe(place)
    try:
        warm_s = _warm_up(place, probe)
        window = _window(place, probe, progress)
        probe.verify()
        place.barrier()
        figures = probe.figures() if hasattr(probe, "figures") else ()
        place.barrier()
    finally:
        probe.close()
    after = reporting.calibrated(run, group, accelerator)
    loop.check_wall(window.started_ns, window.ended_ns, window.epoch_s)
    return RankReport(
        **reporting.who(run, group, accelerator),
        **window.meanwhile,
        environment=reporting.surroundings(run, group, accelerator, probe.environment()),
        steps=len(window.repetitions),
        samples=len(window.repetitions),
        started_ns=window.started_ns,
        ended_ns=window.ended_ns,
        epoch_s=window.epoch_s,
        wait_s=0.0,
        copy_s=0.0,
        warmup_s=warm_s,
        step_times_s=tuple(window.repetitions),
        losses=(),
        calibration_before=before,
        calibration_after=after,
        data_kind=run.data_kind,
        cache=probe.cache(),
        timed=tuple(
            dataclasses.replace(one, seconds=tuple(window.seconds[one.name])) for one in probe.operations
        ),
        figures=figures,
    )


def _warm_up(place: ProbePlace, probe: Probe) -> float:
    start = time.perf_counter()
    probe.verify()
    for _ in range(place.run.warmup_steps):
        probe.repeat()
    return time.perf_counter() - start


def _window(place: ProbePlace, probe: Probe, progress: Progress) -> ProbeWindow:
    steps = place.run.steps
    seconds: Dict[str, List[float]] = {one.name: [] for one in probe.operations}
    repetitions: List[float] = []
    watch = reporting.RunWatch(place.accelerator)
    place.barrier()
    started_ns, start = time.time_ns(), time.perf_counter()
    then = start
    for step in range(1, steps + 1):
        for name, value in probe.repeat().items():
            seconds[name].append(value)
        now = time.perf_counter()
        repetitions.append(now - then)
        then = now
        progress(step, steps, step / (now - start))
    ended_ns, epoch_s = time.time_ns(), then - start
    meanwhile = watch.over()
    if probe.kernel_works:
        during = meanwhile["contention"]
        meanwhile["contention"] = {name: during[name] for name in during if name not in _OF_PROCESSORS}
    return ProbeWindow(started_ns, ended_ns, epoch_s, seconds, repetitions, meanwhile)


#: Seed of weights and samples: characterisation measures speed, and the same numbers each time are one cause less.
SEED = 0


@dataclass(frozen=True)
class Inside:
    """A training as one rank of its own would build it. ``inputs`` and ``targets`` are a batch as stored, on the device."""

    run: RunPlan
    task: Task
    trainer: Trainer
    batch: int
    inputs: Tensor
    targets: Tensor

    def gradients(self) -> None:
        """Compute gradients, forward and backward, of the batch."""
        self.trainer.forget()
        self.trainer.backward(self.trainer.loss(self.inputs, self.targets))

    def step(self) -> None:
        """Do one training step."""
        self.gradients()
        self.trainer.update()


def run_of(place: ProbePlace) -> RunPlan:
    """Return the plan of the training that the probe's fields name."""
    values = place.run.parameters
    return replace(
        place.run,
        workload=str(values["of"]),
        parameters={**inner_parameters(values), "global_batch": None},
        variables={**place.run.variables, "MLHPC_WORKLOAD_MODULE": ""},
    )


def sample_batch(task: Task, batch: int, device: torch.device) -> Tuple[Tensor, Tensor]:
    """Return *batch* synthetic samples, as they are stored, on *device*.

    Room for all is asked for first, so that a batch beyond all memory ends at once, as ``out_of_memory``.
    """
    samples = source.dataset(task, count=batch, seed=SEED)
    parts = [torch.empty((batch, *one.shape), dtype=one.dtype) for one in samples[0][:2]]
    for index in range(batch):
        for part, one in zip(parts, samples[index][:2]):
            part[index] = one
    return parts[0].to(device), parts[1].to(device)


def build(place: ProbePlace) -> Inside:
    """Build the training for this rank alone: gradients are not exchanged."""
    run, batch = run_of(place), inner_batch(place.run.parameters)
    torch.manual_seed(SEED)
    task = prepare.load_task(run)
    trainer = prepare.build(run, task, Group(), place.accelerator, 1)
    return Inside(run, task, trainer, batch, *sample_batch(task, batch, place.accelerator.device))
