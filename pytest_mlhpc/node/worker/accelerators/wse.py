"""Cerebras' wafer-scale engine by ``cerebras.pytorch``: written for 2.10, which wants an environment of its own.

One rank drives all systems of a run. The model is traced and compiled as a whole; the cluster's own workers read the data. It
never ran on a cluster: tests train on the package's CPU back-end and lower for the wafer (``docs/accelerators.md``).
Errors of the package go by their classes' names, as their modules cannot be imported where it is not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport, from_json, to_json
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import environment, loop, prepare, reporting
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.base import Task
from pytest_mlhpc.node.worker.data.source import ShardedSampler, open_source
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import PROGRESS_NS, Batch, Trainer, autocast, resolve_losses
from pytest_mlhpc.node.worker.reporting import Progress

#: What a record calls the device, by the value of the field ``cerebras``.
MODELS: Mapping[Optional[str], str] = {None: "Cerebras CSX", "cpu": "CPU back-end of cerebras.pytorch"}


class Wse(Cpu):
    """The systems of one rank. What this process sees of them is the loss of each step, by the host's clock."""

    type = "wse"

    def __init__(self, local_rank: int, version: str) -> None:
        super().__init__(local_rank, MODELS[None])
        self._version = version

    def peak_memory_bytes(self) -> Optional[int]:
        """Return None: what this host holds says nothing of a wafer."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return the version of Cerebras' package."""
        return {"cerebras_pytorch": self._version}


def load() -> Any:
    """Return the module ``cerebras.pytorch``.

    Raises:
        WorkerFailure: ``wrong_device``, it is not in this environment.
    """
    try:
        return importlib.import_module("cerebras.pytorch")
    except (ImportError, OSError) as error:
        text = (
            f"cannot import cerebras.pytorch: {error}. Give the system an environment of its own for it: a venv of Python 3.11 "
            "with cerebras-pytorch==2.10.0, whose python is named in systems.yaml"
        )
        raise WorkerFailure("wrong_device", text) from error


def open_device(local_rank: int) -> Wse:
    """Return this rank's systems. Whether a cluster answers shows when the model is compiled for it.

    Raises:
        WorkerFailure: ``wrong_device``, see :func:`load`.
    """
    return Wse(local_rank, str(getattr(load(), "__version__", "")))


_TAKEN = {torch.uint8: torch.int16, torch.int8: torch.int16, torch.int64: torch.int32}


def stream(run_json: str, directory: str) -> DataLoader[Any]:
    """Return the loader of this process for the run in *run_json*: batches (inputs, targets) as stored.

    Elsewhere than on an input worker, all samples are its share: the back-end takes one batch there, to see its shape.
    """
    distributed = load().distributed
    run = from_json(RunPlan, json.loads(run_json), "the run")
    sizes = prepare.split_batch(run, 1)
    batch = int(distributed.get_streaming_batch_size(sizes.step_samples))
    place, places = (
        (distributed.get_streaming_rank(), distributed.num_streamers())
        if distributed.is_streamer()
        else (0, 1)
    )
    seed = int(run.parameters.get("seed") or 0)
    count = sizes.step_samples * (run.steps + run.warmup_steps)
    task = prepare.load_task(run)
    source = open_source(run, task, count=count, seed=seed, directory=directory, again=sizes.step_samples)
    sampler = ShardedSampler(len(source.dataset), place, places, seed, repeat=True)
    return DataLoader(source.dataset, batch_size=batch, sampler=sampler, collate_fn=_collate, drop_last=True)


def _collate(samples: Sequence[Tuple[Tensor, Tensor, float]]) -> List[Tensor]:
    inputs, targets, _ = zip(*samples)
    return [_taken(torch.stack(list(inputs))), _taken(torch.stack(list(targets)))]


def _taken(batch: Tensor) -> Tensor:
    """Return *batch* in a type that a wafer takes: casts from 8 and to 64 bits do not lower (release 2.10)."""
    return batch.to(_TAKEN.get(batch.dtype, batch.dtype))


#: Errors that say that no cluster takes the job, and the modules that define them (cerebras-pytorch 2.10.0).
UNREACHABLE: Mapping[str, str] = {
    "ClusterConfigError": "cerebras.appliance.cluster.config",
    "ClusterJobScheduleError": "cerebras.appliance.errors",
    "ClusterJobInitError": "cerebras.appliance.errors",
    "ApplianceVersionError": "cerebras.appliance.errors",
    "RpcError": "grpc",
}

#: The base of all that a cluster ends a job by, and the one of them by which its compiler refuses a model.
FROM_CLUSTER: Mapping[str, str] = {"ApplianceClientException": "cerebras.appliance.errors"}
FROM_COMPILER: Mapping[str, str] = {"ApplianceCompilationError": "cerebras.appliance.errors"}


def reason(error: BaseException, most: int = 600) -> str:
    """Return what an error of Cerebras' tools says, in one line of at most *most* characters."""
    text = " ".join(str(error).split())
    found = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return found if len(found) <= most else f"{found[: most - 3]}..."


def before_any_step(error: Exception) -> Tuple[str, str]:
    """Return outcome and text of *error*: no cluster, one that ended the job, or a model that cannot be compiled.

    Only the last is no fault of anything here, and skips the test.
    """
    names = {one.__name__ for one in type(error).__mro__}
    if names & UNREACHABLE.keys():
        text = (
            f"no Cerebras cluster can be used from this host: {reason(error)}. Run on the cluster's user node; without one, "
            "cerebras='cpu' trains on the CPU back-end and the workload `lowering` lowers for the wafer"
        )
        return "wrong_device", text
    if names & FROM_CLUSTER.keys() and not names & FROM_COMPILER.keys():
        return "worker_exit", f"Cerebras' cluster ended the run before its first step: {reason(error)}"
    return "cannot_lower", f"cerebras.pytorch cannot compile this workload: {reason(error)}"


#: What ``cstorch.amp.set_half_dtype`` calls our precisions.
_HALF = {"bf16": "bfloat16", "fp16": "float16"}

#: Optimizers of torch -> what of them Cerebras' own of the same name takes.
_TAKES: Mapping[str, Any] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "Lamb": ("lr", "betas", "eps", "weight_decay"),
}

Step = Callable[[Tensor, Tensor], Tensor]


def open_backend(cstorch: Any, kind: str, folder: Path, precision: str, **options: Any) -> Any:
    """Return the one back-end of this process: ``CPU``, or ``CSX`` with *options*; its files go below *folder*.

    Raises:
        WorkerFailure: ``not_supported``, a precision that the back-end does not compute in.
    """
    if precision not in ("fp32", *_HALF) or (kind == "CPU" and precision == "fp16"):
        raise WorkerFailure(
            "not_supported", f"precision={precision}: Cerebras' {kind} back-end does not compute in it"
        )
    beside = str(Path(sys.executable).parent)  # where torch-cirh-opt lies, which lowers graphs
    os.environ["PATH"] = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    folder.mkdir(parents=True, exist_ok=True)
    backend = cstorch.backend(kind, artifact_dir=str(folder), **options)
    if kind == "CSX":
        cstorch.amp.enable_mixed_precision(precision in _HALF)
        if precision in _HALF:
            cstorch.amp.set_half_dtype(_HALF[precision])
    return backend


def step_of(cstorch: Any, backend: Any, task: Task, network: nn.Module, precision: str) -> Step:
    """Return the traced step: ``step(inputs, targets)`` of stored samples trains once and returns the loss.

    Raises:
        WorkerFailure: ``not_supported``, Cerebras has no such optimizer.
    """
    groups = _groups(task.optimizer(network), network)
    model = cstorch.compile(network, backend)
    optimizer = _optimizer(cstorch, groups, network)
    scaler: Any = None
    if backend.is_csx and precision == "fp16":
        scaler = cstorch.amp.GradScaler(loss_scale="dynamic")
    kind = "cpu" if backend.is_cpu else ""

    @cstorch.trace  # type: ignore[untyped-decorator,unused-ignore]  # Cerebras' package is not there when types are checked
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(kind, precision if kind else "fp32"):
            ready, wanted = task.prepare(inputs, targets)
            loss: Tensor = task.loss(model(ready), wanted)
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]  # torch 2.4 has no types here
            optimizer.step()
            optimizer.zero_grad()
        else:
            cstorch.amp.optimizer_step(loss, optimizer, scaler)
        return loss

    return quietly(step)


def quietly(step: Step) -> Step:
    """Return *step* without what Cerebras' package warns of in its own code and in torch's."""

    def call(inputs: Tensor, targets: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return step(inputs, targets)

    return call


@dataclass(frozen=True)
class _Groups:
    """The class of an optimizer that was made for the model before it was moved; its groups, parameters by name."""

    kind: str
    groups: List[Dict[str, Any]]


def _groups(optimizer: torch.optim.Optimizer, network: nn.Module) -> _Groups:
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return _Groups(type(optimizer).__name__, groups)


def _optimizer(cstorch: Any, made: _Groups, network: nn.Module) -> Any:
    takes = _TAKES.get(made.kind)
    if takes is None:
        text = f"cerebras.pytorch has no optimizer {made.kind}; it has {', '.join(_TAKES)}"
        raise WorkerFailure("not_supported", text)
    parameters = dict(network.named_parameters())
    groups = [
        {
            **{name: group[name] for name in takes if name in group},
            "params": [parameters[name] for name in group["params"]],
        }
        for group in made.groups
    ]
    return getattr(cstorch.optim, made.kind)(groups, lr=groups[0]["lr"])


def shared(csx: Optional[int], samples: int) -> int:
    """Return on how many systems a run trains whose steps take *samples*: each has as many of them.

    The package takes other numbers too, and gives systems unequal shares then (``get_streaming_batch_size``): such a run
    does not say what so many systems reach.

    Raises:
        WorkerFailure: ``worker_exit``, they do not divide.
    """
    systems = csx or 1
    if samples % systems:
        raise WorkerFailure(
            "worker_exit", f"global_batch={samples} does not divide over csx={systems} systems"
        )
    return systems


def backend_options(csx: int, folder: Path, time_limit_s: float, module: Any) -> Dict[str, Any]:
    """Return the options of a CSX back-end that trains on *csx* systems: its cluster's configuration.

    ``num_csx`` is all that several systems need; workers and servers are those of each system, as the cluster has them.

    The cluster's workers read the data: they need what this process imports from, and the folders of plan and data; the
    cluster mounts those by itself if it may (``automount``).
    """
    config = module.ClusterConfig(num_csx=csx, job_time_sec=max(1, int(time_limit_s)))
    config.mount_dirs = [str(folder)]
    config.python_paths = [path for path in sys.path if path and Path(path).exists()]
    return {"cluster_config": config}


_CLUSTER_CONFIG = "cerebras.appliance.cluster_config"


@dataclass
class LossRecorder:
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
    reported_ns: int = 0

    def begin(self) -> None:
        """Note that steps are asked for from now on; without warm-up the window begins here."""
        self.asked_ns = self.reported_ns = time.perf_counter_ns()
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
        if now - self.reported_ns >= PROGRESS_NS:
            self.reported_ns = now
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
    recorder = LossRecorder(run, progress)
    torch.manual_seed(seed)  # of dropout, as on other devices
    started = time.perf_counter()
    trainer = Trainer(task, network, task.optimizer(network), accelerator)
    data = prepare.open_data(run, trainer, group, sizes, directory) if on_cpu else None
    backend = _backend(cstorch, run, directory, None if on_cpu else csx)
    step = step_of(cstorch, backend, task, network, str(run.parameters.get("precision") or "fp32"))
    if data is None:
        loader = cstorch.utils.data.DataLoader(stream, json.dumps(to_json(run)), str(directory))
    else:
        loader = cstorch.utils.data.DataLoader(lambda: _timed(data.batches, recorder))
    built_s = time.perf_counter() - started
    _train(cstorch, loader, step, recorder, sizes.step_samples)
    ended_ns = time.time_ns()
    during = contention.difference(recorder.before, contention.snapshot())
    ends = recorder.window()
    epoch_s = (ends[-1] - ends[0]) / 1e9
    loop.check_wall(recorder.started_ns, ended_ns, epoch_s)
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
    folder = environment.of_run(directory) / f"cerebras-{run.run_id}"
    precision = str(run.parameters.get("precision") or "fp32")
    if csx is None:
        return open_backend(cstorch, "CPU", folder, precision)
    options: Mapping[str, Any] = backend_options(
        csx, directory, run.time_limit_s, importlib.import_module(_CLUSTER_CONFIG)
    )
    return open_backend(cstorch, "CSX", folder, precision, **options)


def _train(cstorch: Any, loader: Any, step: Any, recorder: LossRecorder, samples: int) -> None:
    run = recorder.run

    def report(loss: Tensor) -> None:
        recorder.end_step(float(loss.item()), samples)

    tell = cstorch.step_closure(report)
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


def _timed(batches: Iterator[Batch], recorder: LossRecorder) -> Iterator[Tuple[Tensor, Tensor]]:
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
