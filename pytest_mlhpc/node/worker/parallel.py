"""PAYLOAD. A model whose weights, gradients and optimizer states are spread over ranks: FSDP2 and its hybrid.

Each rank owns a part of every weight. The weights of one block are gathered when its forward or backward pass needs them,
and let go after it; its gradients are reduced and scattered to their owners. With replicas, gradients of one part are then
averaged over its replicas (torch.distributed.fsdp.fully_shard, public since torch 2.6).
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Iterator, List, Mapping

import torch
from torch import nn

from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields.parallel import POWERSGD_AFTER, Layout, layout


def layout_of(parameters: Mapping[str, Any], world: int) -> Layout:
    """Return how *world* ranks share the training: a replica each unless ``parallel`` says otherwise.

    Raises:
        WorkerFailure: ``worker_exit``, the field makes no sense, or needs another number of ranks.
    """
    try:
        asked = layout(parameters)
    except ValueError as error:
        raise WorkerFailure("worker_exit", f"parallel: {error}") from error
    if asked is None:
        return Layout(world, 1)
    if asked.replicate * asked.shard != world:
        text = f"parallel: replicate={asked.replicate} x shard={asked.shard} are not the {world} ranks of this run"
        raise WorkerFailure("worker_exit", text)
    return asked


def require_fsdp() -> Any:
    """Return torch's ``fully_shard``.

    Raises:
        WorkerFailure: ``not_supported``, this torch has no FSDP2.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except (ImportError, ValueError) as error:  # torch 1.13 has dataclasses that Python 3.11 refuses
        text = (
            f"parallel with shard > 1 needs torch.distributed.fsdp.fully_shard, which torch has since 2.6; this is "
            f"{torch.__version__}"
        )
        raise WorkerFailure("not_supported", text) from error
    return fully_shard


def shard(model: nn.Module, how: Layout, accelerator: Accelerator, precision: str) -> nn.Module:
    """Spread *model*, which lies in host memory, over ranks, block by block; return it.

    A device never holds more than its parts and one block. Ranks of one group of shards are neighbours, and so lie on one
    node where the nodes have as many devices.

    Raises:
        WorkerFailure: ``not_supported``, see :func:`require_fsdp`.
    """
    fully_shard = require_fsdp()
    from torch.distributed.device_mesh import init_device_mesh

    names = ("replicate", "shard")
    if how.replicate == 1:
        mesh = init_device_mesh(accelerator.device.type, (how.shard,), mesh_dim_names=names[1:])
    else:
        mesh = init_device_mesh(accelerator.device.type, (how.replicate, how.shard), mesh_dim_names=names)
    for block in blocks(model):
        _shard_block(block, fully_shard, mesh, precision)
    fully_shard(model, mesh=mesh)
    if how.replicate > 1:
        _skip_replicas_until_last(model)
    return model


def blocks(model: nn.Module) -> List[nn.Module]:
    """Return what is gathered at a time: members of lists and sequences that have layers of their own.

    Outermost ones only. Weights beside them (embeddings, heads) stay gathered together.
    """
    found: List[nn.Module] = []
    for child in model.children():
        inside = isinstance(model, (nn.ModuleList, nn.Sequential))
        if inside and _composite(child) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found.append(child)
        else:
            found += blocks(child)
    return found


def _shard_block(block: nn.Module, fully_shard: Any, mesh: Any, precision: str) -> None:
    """Spread one block. Where training computes in bf16 its weights are gathered in bf16 too, but for normalisation's.

    Autocast alone would gather fp32, and keep its 16-bit copies of whole weights until the backward pass. Normalisation
    keeps its weights in fp32: kernels of CPUs want those, and running statistics, in one type. Gradients are summed in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    keep = MixedPrecisionPolicy()
    cast = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    if precision != "bf16":
        fully_shard(block, mesh=mesh, mp_policy=keep)
        return
    if not _normalises(block):
        fully_shard(block, mesh=mesh, mp_policy=cast)
        return
    for child in block.children():
        if _composite(child) and not _normalises(child):
            fully_shard(child, mesh=mesh, mp_policy=cast)
    fully_shard(block, mesh=mesh, mp_policy=keep)


def _normalises(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)
    return any(isinstance(part, kinds) for part in module.modules())


def _composite(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _skip_replicas_until_last(model: Any) -> None:
    """Give *model* a ``no_sync`` as DDP's: micro-batches before a step's last leave out the exchange between replicas.

    Gradients go to their owners in each micro-batch: kept whole, they would take the memory that sharding saves.
    """

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_all_reduce(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)

    model.no_sync = no_sync


def compress(model: nn.parallel.DistributedDataParallel, how: str) -> None:
    """Let replicas send their gradients compressed: none, bf16, fp16 or powersgd, by torch's own communication hooks.

    PowerSGD has torch's defaults (arXiv 1905.13727: rank 1, error feedback, warm start); tensors of which it would save
    less than half are sent as they are.

    Raises:
        WorkerFailure: ``not_supported``, this torch has no such hook, or not for this backend (bf16 takes NCCL or XCCL).
    """
    if how == "none":
        return
    hooks = "torch.distributed.algorithms.ddp_comm_hooks"
    try:
        if how == "powersgd":
            power = importlib.import_module(f"{hooks}.powerSGD_hook")
            state = power.PowerSGDState(None, start_powerSGD_iter=POWERSGD_AFTER)
            hook = power.powerSGD_hook
        else:
            state, hook = (
                None,
                getattr(importlib.import_module(f"{hooks}.default_hooks"), f"{how}_compress_hook"),
            )
    except (ImportError, AttributeError) as error:
        text = (
            f"gradient_compression={how}: torch {torch.__version__} has no such communication hook: {error}"
        )
        raise WorkerFailure("not_supported", text) from error
    try:
        model.register_comm_hook(state, hook)
    except (TypeError, ValueError, RuntimeError) as error:  # of which kind depends on torch's release
        text = (
            f"gradient_compression={how}: torch {torch.__version__} has it for other backends alone: {error}"
        )
        raise WorkerFailure("not_supported", text) from error
