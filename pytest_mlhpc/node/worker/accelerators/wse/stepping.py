"""PAYLOAD. A back-end of ``cerebras.pytorch``, and a training step compiled for it.

By Cerebras' documentation of release 2.10 ("Writing a custom training loop"): back-end, ``compile``, an optimizer of its own
kind, and a traced step whose last part is the update.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import autocast
from pytest_mlhpc.node.worker.workloads.base import Task

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
