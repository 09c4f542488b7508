"""A poptorch that is not there: recorded signatures, calls that are written down, and training for real on the CPU.

poptorch is in no package registry and runs on nothing but IPUs. Signatures are those of the repository graphcore/poptorch (last
changed 2023-09): ``python/options.py``, ``python/_poplar_executor.py``, ``python/ops.py``, ``python/enums.py`` and
``python/__init__.py``; of popdist, whose sources were never published, what Graphcore's examples use (graphcore/examples).
"""

# Names are poptorch's own.
# ruff: noqa: N802

import enum
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

#: What the adapter may use, as the repository declares it, without annotations.
RECORDED: dict[str, str] = json.loads(Path(__file__).with_name("poptorch_signatures.json").read_text())

#: What the IPU's exchange takes; poptorch narrows int64 by itself, so that it may come as well.
TYPES = {torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool}


class OutputMode(enum.IntEnum):
    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class AutoStage(enum.IntEnum):
    SameAsIpu = 0
    AutoIncrement = 1


class PipelinedExecution:
    def __init__(self, *args):
        assert all(isinstance(one, AutoStage) for one in args)
        self.stages = args


class ShardedExecution(PipelinedExecution):
    def __init__(self, *args):
        super().__init__(*args)


class PrecisionOptions:
    def setPartialsType(self, dtype):
        if dtype not in (torch.float, torch.half):
            raise ValueError("parameter to setPartialsType should be either torch.float or torch.half")
        self.partials = dtype
        return self


class TrainingOptions:
    gradient_accumulation = 1

    def gradientAccumulation(self, gradient_accumulation):
        self.gradient_accumulation = gradient_accumulation
        return self


class TensorLocationOptions:
    io_tiles = None

    def numIOTiles(self, num_tiles):
        assert isinstance(num_tiles, int)
        assert 32 <= num_tiles <= 192
        assert num_tiles % 2 == 0
        self.io_tiles = num_tiles
        return self


class Options:
    device_iterations = replication_factor = 1
    output_mode = OutputMode.Default
    strategy = PipelinedExecution()
    cache = random_seed = offline = None
    synthetic = False

    def __init__(self):
        self.Precision, self.Training = PrecisionOptions(), TrainingOptions()
        self.TensorLocations = TensorLocationOptions()

    def deviceIterations(self, device_iterations):
        self.device_iterations = device_iterations
        return self

    def replicationFactor(self, replication_factor):
        self.replication_factor = replication_factor
        return self

    def setExecutionStrategy(self, strategy):
        assert isinstance(strategy, PipelinedExecution)
        self.strategy = strategy
        return self

    def enableExecutableCaching(self, path):
        self.cache = path
        return self

    def enableSyntheticData(self, enabled):
        self.synthetic = enabled
        return self

    def useOfflineIpuTarget(self, ipu_version=2):
        assert ipu_version in (1, 2)
        self.offline = ipu_version
        return self

    def outputMode(self, output_mode, output_return_period=None):
        assert isinstance(output_mode, OutputMode)
        self.output_mode = output_mode
        return self

    def randomSeed(self, random_seed):
        assert isinstance(random_seed, int)
        torch.manual_seed(random_seed)
        self.random_seed = random_seed
        return self

    def showCompilationProgressBar(self, show=True):
        return self


class BeginBlock(nn.Module):
    """Writes down each time that it is run, in ``ran``."""

    ran: list[tuple[str, int]] = []  # noqa: RUF012 - of the class: what runs where is a matter of the whole model

    def __init__(self, layer_to_call, user_id=None, ipu_id=None):
        super().__init__()
        assert isinstance(layer_to_call, nn.Module)
        self._layer_to_call, self.user_id, self.ipu_id = layer_to_call, user_id, ipu_id

    def forward(self, *args):
        BeginBlock.ran.append((self.user_id, self.ipu_id))
        return self._layer_to_call(*args)


def identity_loss(x, reduction):
    assert reduction in ("sum", "mean", "none")
    return x


class PoplarExecutor:
    """Does what the compiled program would: iterations of micro-batches of replicas, then one update from their mean."""

    def __init__(self, model, options, optimizer):
        self.user_model, self.options, self.optimizer = model, options, optimizer
        self.compiled = self.destroyed = False
        if options.output_mode == OutputMode.Default:
            options.outputMode(OutputMode.Final)

    def _micro_batches(self):
        own = self.options
        return own.device_iterations * own.replication_factor * own.Training.gradient_accumulation

    def compile(self, *args, **kwargs):
        assert not kwargs
        for tensor in args:
            assert tensor.dtype in TYPES, f"{tensor.dtype} does not travel"
            assert len(tensor) % self._micro_batches() == 0, "Invalid batch dimension"
        self.shapes = [tensor.shape for tensor in args]
        self.compiled = True

    def compileAndExport(self, filename, *args, export_model=True, **kwargs):
        self.compile(*args, **kwargs)
        assert not export_model, "the stand-in writes no model"
        with open(filename, "wb") as file:  # noqa: PTH123 - poptorch takes the name as text
            file.write(b"0" * 4096)

    def __call__(self, *args, **kwargs):
        assert self.options.offline is None, "Trying to run a model on an offline device"
        assert self.compiled, "compile() is timed apart, so it comes first"
        assert not kwargs
        assert [tensor.shape for tensor in args] == self.shapes
        if self.options.synthetic:
            return torch.zeros(self._micro_batches())
        parts = list(zip(*(tensor.chunk(self._micro_batches()) for tensor in args), strict=True))
        of_step = len(parts) // self.options.device_iterations
        losses = []
        for first in range(0, len(parts), of_step):
            self.optimizer.zero_grad(set_to_none=True)
            for part in parts[first : first + of_step]:
                loss = self.user_model(*part)
                assert loss.ndim == 0
                (loss / of_step).backward()
                losses.append(loss.detach())
            self.optimizer.step()
        return torch.stack(losses if self.options.output_mode == OutputMode.All else losses[-1:])

    def getLatency(self):
        return 0.008, 0.012, 0.010

    def getHostIpuLatency(self):
        return (0.001, 0.003, 0.002)

    def getComputeLatency(self):
        return (0.006, 0.008, 0.007)

    def getIpuHostLatency(self):
        return (0.001, 0.001, 0.001)

    def destroy(self):
        self.compiled, self.destroyed = False, True


def poptorch(ipus: int = 64) -> Any:
    """Return the module, whose ``executors`` are the models that were made; *ipus* are there."""
    executors: list[PoplarExecutor] = []
    BeginBlock.ran.clear()

    def trainingModel(model, options=None, optimizer=None):
        assert type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
        executors.append(PoplarExecutor(model, options or Options(), optimizer))
        return executors[-1]

    def ipuHardwareVersion():
        assert ipus
        return 2

    kinds = (Options, OutputMode, AutoStage, PipelinedExecution, ShardedExecution, BeginBlock, identity_loss)
    return SimpleNamespace(
        trainingModel=trainingModel, ipuHardwareIsAvailable=lambda num_ipus=1: num_ipus <= ipus,
        ipuHardwareVersion=ipuHardwareVersion, __version__="3.3.0", executors=executors,
        **{kind.__name__: kind for kind in kinds},
    )  # fmt: skip


def popdist(local_replicas: int) -> tuple[Any, Any]:
    """Return the modules popdist and popdist.poptorch of a rank that poprun started with so many replicas."""

    class OfRank(Options):
        def __init__(self, ipus_per_replica=1):
            super().__init__()
            self.ipus_per_replica, self.replication_factor = ipus_per_replica, local_replicas

    return SimpleNamespace(getNumLocalReplicas=lambda: local_replicas), SimpleNamespace(Options=OfRank)


def signatures(module: Any) -> dict[str, str]:
    """Return the signatures that the stand-in really has, in the words of :data:`RECORDED`."""
    found = {}
    for name in RECORDED:
        owner, _, method = name.rpartition(".")
        thing = getattr(globals()[owner], method) if owner else getattr(module, method)
        found[name] = str(inspect.signature(thing))
    return found
