"""From a run's fields to poptorch's options, and which part of a model begins on which IPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.workloads.base import Task


@dataclass(frozen=True)
class IpuSettings:
    """What a run's fields say, with defaults filled in; see ``node/worker/workloads/fields/compiled_devices.py``."""

    device_iterations: int = 1
    ipus_per_replica: int = 1
    replicas: int = 1
    accumulate: int = 1
    execution: str = "pipelined"
    partials: Optional[str] = None
    io_tiles: Optional[int] = None
    synthetic: bool = False  #: the IPUs make random input themselves, and the host sends none

    @classmethod
    def of(cls, parameters: Mapping[str, Any], data_source: str) -> IpuSettings:
        """Read a run's parameters. ``data="device"``, the run without input, is synthetic data on IPUs."""
        return cls(
            device_iterations=int(parameters.get("device_iterations") or 1),
            ipus_per_replica=int(parameters.get("ipus_per_replica") or 1),
            replicas=int(parameters.get("ipu_replicas") or 1),
            accumulate=int(parameters.get("gradient_accumulation") or 1),
            execution=str(parameters.get("ipu_execution") or "pipelined"),
            partials=parameters.get("ipu_partials"),
            io_tiles=parameters.get("ipu_io_tiles"),
            synthetic=data_source == "device",
        )

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches one call of the compiled model takes from this rank."""
        return self.device_iterations * self.replicas * self.accumulate


def make(poptorch: Any, settings: IpuSettings, *, seed: int, world: int, cache: Optional[Path]) -> Any:
    """Return a ``poptorch.Options`` for one of *world* ranks.

    Every micro-batch's loss is returned: poptorch's own default for training is the last one's alone. *cache* is where compiled
    programs lie, so that of several ranks one compiles; None: as the environment says (``POPTORCH_CACHE_DIR``).

    Raises:
        WorkerFailure: ``worker_exit``, the launcher gave this rank another number of replicas than it has to drive;
            ``import_failed``, several ranks without popdist.
    """
    options = _own(poptorch, settings) if world == 1 else _of_several(settings)
    options.deviceIterations(settings.device_iterations)
    options.Training.gradientAccumulation(settings.accumulate)
    options.outputMode(poptorch.OutputMode.All)
    options.randomSeed(seed)
    options.showCompilationProgressBar(False)
    if settings.partials is not None:
        options.Precision.setPartialsType({"float": torch.float, "half": torch.half}[settings.partials])
    if settings.io_tiles is not None:
        options.TensorLocations.numIOTiles(settings.io_tiles)
    if settings.ipus_per_replica > 1:
        # Blocks are numbered as they come: a model may come back to an IPU (weights that its ends share).
        stages = poptorch.AutoStage.AutoIncrement
        kind = poptorch.ShardedExecution if settings.execution == "sharded" else poptorch.PipelinedExecution
        options.setExecutionStrategy(kind(stages))
    if cache is not None:
        options.enableExecutableCaching(str(cache))
    if settings.synthetic:
        options.enableSyntheticData(True)
    return options


def _own(poptorch: Any, settings: IpuSettings) -> Any:
    options = poptorch.Options()
    options.replicationFactor(settings.replicas)
    return options


def _of_several(settings: IpuSettings) -> Any:
    """Return the options that PopRun's library makes: it knows how many replicas are this rank's."""
    try:
        popdist: Any = importlib.import_module("popdist")
        module: Any = importlib.import_module("popdist.poptorch")
    except ImportError as error:
        text = f"several ranks on IPUs need popdist, which comes with the Poplar SDK: {error}"
        raise WorkerFailure("import_failed", text) from error
    replicas = int(popdist.getNumLocalReplicas())
    if replicas != settings.replicas:
        text = f"poprun gave this rank {replicas} replicas, ipu_replicas is {settings.replicas}; use launcher poprun"
        raise WorkerFailure("worker_exit", text)
    return module.Options(ipus_per_replica=settings.ipus_per_replica)


#: Workload -> parts of its model in the order in which they run. A block may begin at each module of a sequence or list.
ORDER: Mapping[str, Tuple[str, ...]] = {
    "cosmoflow": ("features", "head"),
    "deepcam": ("entry", "encoder", "pyramid", "upsample", "low_level", "decoder"),
    "resnet50": ("stem", "stages", "head"),
    "language_model": ("embedding", "positions", "blocks", "norm", "head"),
}


@dataclass(frozen=True)
class Begin:
    """From the module *name* on, in the order of running, the model is computed on this IPU of its replica."""

    name: str
    ipu: int


def units(model: nn.Module, workload: str) -> List[str]:
    """Return the names of modules at which a block may begin, in the order in which they run.

    Raises:
        WorkerFailure: ``not_supported``, it is not known in which order this workload's model runs.
    """
    if workload not in ORDER:
        text = f"ipus_per_replica: only {', '.join(ORDER)} can be spread over several IPUs, not {workload}"
        raise WorkerFailure("not_supported", text)
    found: List[str] = []
    for name in ORDER[workload]:
        part = getattr(model, name)
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            found += [f"{name}.{child}" for child, _ in part.named_children()]
        elif part is not None:
            found.append(name)
    return found


def tied(model: nn.Module) -> Tuple[str, str]:
    """Return the names of the two modules that share their weights, first and last of the model, or two empty names."""
    head, embedding = getattr(model, "head", None), getattr(model, "embedding", None)
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return "", ""
    return ("embedding", "head") if head.weight is embedding.weight else ("", "")


def begins(
    names: Sequence[str], operations: Mapping[str, int], ipus: int, shared: Tuple[str, str] = ("", "")
) -> Tuple[Begin, ...]:
    """Return where each IPU but the first begins; what comes before the first of them runs on IPU 0.

    Args:
        names: units in the order of running.
        operations: of layers, by their full names.
        ipus: over which the units are spread, each gets at least one.
        shared: first and last unit, where they have the same weights, which can lie on one IPU only: the last comes back
            to IPU 0.

    Raises:
        WorkerFailure: ``not_supported``, there are fewer units than IPUs.
    """
    costs = [_cost(name, operations) for name in names]
    chosen = list(names)
    if shared[1] and ipus > 1:
        costs[chosen.index(shared[0])] += costs.pop(chosen.index(shared[1]))
        chosen.remove(shared[1])
    if len(chosen) < ipus:
        text = f"ipus_per_replica={ipus}: the model has {len(chosen)} parts that can be on IPUs of their own"
        raise WorkerFailure("not_supported", text)
    found = [Begin(chosen[first], ipu) for ipu, first in enumerate(balance(costs, ipus)) if ipu]
    if found and shared[1]:
        found.append(Begin(shared[1], 0))
    return tuple(found)


def _cost(unit: str, operations: Mapping[str, int]) -> int:
    return sum(done for name, done in operations.items() if name == unit or name.startswith(f"{unit}."))


def balance(costs: Sequence[int], parts: int) -> List[int]:
    """Cut *costs* into consecutive *parts*, none empty, of which the dearest is as cheap as can be; the first index of each.

    Needs at least as many costs as parts. The work is parts x len(costs) ** 2, for at most a hundred costs.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    # best[n] of k parts: the dearest part where the first n costs are shared best, and where the last part begins.
    best: List[Tuple[int, int]] = [(sums[end], 0) for end in range(count + 1)]
    history = [best]
    for part in range(1, parts):
        row: List[Tuple[int, int]] = [(0, 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[start][0], sums[end] - sums[start]), start) for start in range(part, end)
            )
        best = row
        history.append(row)
    firsts: List[int] = []
    end = count
    for row in reversed(history):
        firsts.append(row[end][1])
        end = row[end][1]
    return firsts[::-1]


def apply(poptorch: Any, model: nn.Module, plan: Sequence[Begin]) -> None:
    """Let blocks of *model* begin as *plan* says. poptorch may give back another module, which takes the old one's place."""
    for number, begin in enumerate(plan, 1):
        parent, _, child = begin.name.rpartition(".")
        owner = model.get_submodule(parent)
        block = poptorch.BeginBlock(
            model.get_submodule(begin.name), user_id=f"block{number}", ipu_id=begin.ipu
        )
        setattr(owner, child, block)


def place_blocks(poptorch: Any, model: nn.Module, task: Task, ipus: int) -> None:
    """Spread the blocks of *model* over *ipus*, so that the one with the most operations has as few as can be.

    Raises:
        WorkerFailure: ``not_supported``, the model cannot be spread, or not over so many.
    """
    plan = begins(units(model, task.name), reporting.by_layer(task), ipus, tied(model))
    apply(poptorch, model, plan)
