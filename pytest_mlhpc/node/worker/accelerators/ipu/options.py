"""PAYLOAD. From a run's fields to poptorch's options. Names are those of graphcore/poptorch, ``python/options.py``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

import torch

from pytest_mlhpc.node.worker.failure import WorkerFailure


@dataclass(frozen=True)
class Settings:
    """What a run's fields say, with defaults filled in; see ``node/worker/workloads/fields/ipu.py``."""

    device_iterations: int = 1
    ipus_per_replica: int = 1
    replicas: int = 1
    accumulate: int = 1
    execution: str = "pipelined"
    partials: Optional[str] = None
    io_tiles: Optional[int] = None
    synthetic: bool = False  #: the IPUs make random input themselves, and the host sends none

    @classmethod
    def of(cls, parameters: Mapping[str, Any], data_source: str) -> Settings:
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


def make(poptorch: Any, settings: Settings, *, seed: int, world: int, cache: Optional[Path]) -> Any:
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


def _own(poptorch: Any, settings: Settings) -> Any:
    options = poptorch.Options()
    options.replicationFactor(settings.replicas)
    return options


def _of_several(settings: Settings) -> Any:
    """Return the options that PopRun's library makes: it knows how many replicas are this rank's."""
    try:
        popdist: Any = importlib.import_module("popdist")
        module: Any = importlib.import_module("popdist.poptorch")
    except ImportError as error:
        text = f"several ranks on IPUs need popdist, which comes with the Poplar SDK: {error}"
        raise WorkerFailure("import_failed", text) from error
    told = int(popdist.getNumLocalReplicas())
    if told != settings.replicas:
        text = (
            f"poprun gave this rank {told} replicas, ipu_replicas is {settings.replicas}; use launcher poprun"
        )
        raise WorkerFailure("worker_exit", text)
    return module.Options(ipus_per_replica=settings.ipus_per_replica)
