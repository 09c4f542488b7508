"""The ranks of one run: process group, barriers, the model spread over ranks, and what ranks exchange in a step."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import functools
import importlib
import os
import statistics
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Iterator, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_mlhpc.node.protocol.channel import PORT_TAKEN
from pytest_mlhpc.node.protocol.schema import Figure
from pytest_mlhpc.node.worker.accelerators.cpu import GroupBatchNorm
from pytest_mlhpc.node.worker.base import Accelerator
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Batch, Clock, Trainer
from pytest_mlhpc.node.worker.workloads.fields.parallel import (
    POWERSGD_AFTER,
    MeshLayout,
    batch_norm_ranks,
    layout,
)

#: torch's layers of batch normalisation, of any number of dimensions.
_BATCH_NORM = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - torch has no other name of what they have in common


def layout_of(parameters: Mapping[str, Any], world: int) -> MeshLayout:
    """Return how *world* ranks share the training: a replica each unless ``parallel`` says otherwise.

    Raises:
        WorkerFailure: ``worker_exit``, the field makes no sense, or needs another number of ranks.
    """
    try:
        asked = layout(parameters)
    except ValueError as error:
        raise WorkerFailure("worker_exit", f"parallel: {error}") from error
    if asked is None:
        return MeshLayout(world, 1)
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


def shard(model: nn.Module, how: MeshLayout, accelerator: Accelerator, precision: str) -> nn.Module:
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


#: torch's operators (c10d, and the functional ones behind DTensor) -> name in a record.
_COLLECTIVES: Tuple[Tuple[str, str], ...] = (
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"),
    ("_allgather_base", "all_gather"), ("allgather", "all_gather"), ("all_gather", "all_gather"),
    ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
)  # fmt: skip

#: Functions by which FSDP2 exchanges, under the names that they had since torch 2.6.
_SHARDED = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves this class without types
    """Notes each collective of the thread in which it is active, and of threads to which autograd takes it along."""

    def __init__(self, found: List[Tuple[str, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self._found = found

    # The signature is torch's.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        space, _, name = str(func._schema.name).partition("::")  # noqa: SLF001 - torch has no other name of an operator
        if space in ("c10d", "_c10d_functional"):
            kind = next((word for start, word in _COLLECTIVES if name.startswith(start)), None)
            if kind is not None:
                parts = [*args, *given.values(), result if isinstance(result, Tensor) else None]
                self._found.append((kind, max(map(_bytes, parts))))
        return result


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


@contextlib.contextmanager
def noted() -> Iterator[List[Tuple[str, int]]]:
    """Yield kind and bytes of each collective that this process begins meanwhile.

    PowerSGD begins its second all-reduce when the first has ended, in a thread of the backend if that took a while: no mode
    of torch reaches there, so that the function that it calls brings one along.
    """
    # Not in every torch that can train.
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    found: List[Tuple[str, int]] = []
    all_reduce = dist.all_reduce

    def noted_everywhere(*arguments: Any, **options: Any) -> Any:
        if any(isinstance(mode, Collectives) for mode in _get_current_dispatch_mode_stack()):
            return all_reduce(*arguments, **options)
        with Collectives(found):
            return all_reduce(*arguments, **options)

    dist.all_reduce = noted_everywhere
    try:
        with Collectives(found):
            yield found
    finally:
        dist.all_reduce = all_reduce


def figures(collectives: List[Tuple[str, int]]) -> Tuple[Figure, ...]:
    """Return what was noted in one step: how many collectives of each kind, and their bytes together."""
    found: List[Figure] = []
    for kind in sorted({kind for kind, _ in collectives}):
        sizes = [size for one, size in collectives if one == kind]
        found.append(Figure(f"{kind}_count", float(len(sizes)), "1", "none"))
        found.append(Figure(f"{kind}_bytes", float(sum(sizes)), "B", "lower"))
    return tuple(found)


def countable(version: str) -> bool:
    """Return whether collectives of this torch can be counted: 2.5 is the first that has this way of its own (CommDebugMode)."""
    release = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    return release >= [2, 5]


def is_sharded(model: nn.Module) -> bool:
    """Return whether *model* is spread over ranks by FSDP2."""
    return hasattr(model, "set_requires_gradient_sync")


@contextlib.contextmanager
def silent(model: nn.Module) -> Iterator[List[str]]:
    """Let passes of *model* compute as ever and exchange nothing; yield the names of what is left out, as it is.

    DDP has a switch for that. Shards gather into memory that keeps what lay there: what is computed is worth nothing, and
    the weights, which each rank owns apart, stay as they are.
    """
    left_out: List[str] = []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        # Whether a pass sends buffers (statistics of batch normalisation) was decided by the pass before it, which here is
        # always of the other kind: without this, what is to be measured would be left out and then subtracted.
        model.require_forward_param_sync = False
        with model.no_sync(), _own_statistics(model):
            yield left_out
        model.require_forward_param_sync = True
        return

    def leave_out(name: str) -> Any:
        return lambda *_arguments, **_options: left_out.append(name)

    functions = {name: getattr(dist, name) for name in _SHARDED if hasattr(dist, name)}
    try:
        for name in functions:
            setattr(dist, name, leave_out(name))
        yield left_out
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)


@contextlib.contextmanager
def _own_statistics(model: nn.Module) -> Iterator[None]:
    """Let each rank normalise by statistics of its own samples for a while."""
    norms = [part for part in model.modules() if isinstance(part, (GroupBatchNorm, nn.SyncBatchNorm))]
    for norm in norms:
        norm.forward = functools.partial(_BATCH_NORM.forward, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


#: Pairs of steps in the communication pass: enough for a median, few enough to cost little.
PAIRS = 5


@dataclass(frozen=True)
class Group:
    """This rank's place. ``world`` is 1 without launcher variables."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1


def from_environment(environ: Mapping[str, str]) -> Group:
    """Return the place that RANK, LOCAL_RANK and WORLD_SIZE tell (torchrun's names).

    Raises:
        WorkerFailure: ``worker_exit``, the variables contradict each other or are no numbers.
    """
    try:
        rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        local_rank = int(environ.get("LOCAL_RANK", str(rank)))
    except ValueError as error:
        raise WorkerFailure(
            "worker_exit", f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers: {error}"
        ) from error
    if not 0 <= rank < world or local_rank < 0:
        text = f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world} contradict each other"
        raise WorkerFailure("worker_exit", text)
    return Group(rank, local_rank, world)


def join(
    group: Group,
    accelerator: Accelerator,
    timeout_s: float,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Join the process group; nothing to do for a single rank. Waits at most *timeout_s* for the others.

    Raises:
        WorkerFailure: there is no place to meet, or another process has it (``PORT_TAKEN``, which the batch understands);
            or the run's parameter ``backend`` is ``mpi`` and MPI is not there.
    """
    if group.world == 1:
        return
    if parameters.get("backend") == "mpi":
        _join_by_mpi(group)
        return
    if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        raise WorkerFailure("worker_exit", "WORLD_SIZE is set, but MASTER_ADDR or MASTER_PORT is not")
    try:
        _initialise(group, accelerator, timeout_s)
    except (RuntimeError, OSError) as error:
        problem = port_taken(error, os.environ) if group.rank == 0 else ""
        if problem:
            raise WorkerFailure(PORT_TAKEN, problem) from error
        raise


def _initialise(group: Group, accelerator: Accelerator, timeout_s: float) -> None:
    """Make the process group; where torch was built without libuv, which it asks for by default since 2.4, without that.

    Debian's torch 2.6 is. It says so before it connects to anything.
    """
    options: Any = {
        "rank": group.rank,
        "world_size": group.world,
        "timeout": dt.timedelta(seconds=timeout_s),
    }
    try:
        dist.init_process_group(accelerator.backend, **options)
    except RuntimeError as error:
        if "libuv" not in str(error) or os.environ.get("USE_LIBUV") == "0":
            raise
        os.environ["USE_LIBUV"] = "0"
        dist.init_process_group(accelerator.backend, **options)


def _join_by_mpi(group: Group) -> None:
    """Let MPI say which rank this is: it knows the others from its launcher, and needs no place to meet."""
    if not dist.is_mpi_available():
        text = (
            f"backend='mpi': torch {torch.__version__} of {sys.executable} was built without MPI, as its published wheels "
            "are; name a Python whose torch was built with it, or leave backend unset, which is gloo"
        )
        raise WorkerFailure("not_supported", text)
    dist.init_process_group("mpi")
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) != (group.rank, group.world):
        text = (
            f"MPI calls this rank {rank} of {world}, the launcher {group.rank} of {group.world}: torch's MPI was not the one "
            "that started it; use the launcher mpirun of that MPI, or srun with --mpi for it"
        )
        raise WorkerFailure("too_few_ranks", text)


def leave_mpi() -> None:
    """End this process with exit code 0 by way of the C library's ``exit``, where torch exchanges by MPI; else return.

    torch finalizes MPI there. A rank that ends without that counts as aborted: its launcher then ends with an error. All
    ranks have to come here, as they wait for each other.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "mpi":
        dist.destroy_process_group()
        ctypes.CDLL(None).exit(0)


def port_taken(error: BaseException, environ: Mapping[str, str]) -> str:
    """Return a sentence if *error* says that another process listens at our port already, else nothing.

    torch's text holds that of the C library, or the name of the error (torch 1.13 to 2.13).
    """
    if "address already in use" not in f"{error}".lower() and "EADDRINUSE" not in f"{error}":
        return ""
    place = f"{environ.get('MASTER_PORT')} of {environ.get('MASTER_ADDR')}"
    return f"port {place}, at which the ranks were to meet, is taken by another process"


def barrier(group: Group, accelerator: Accelerator) -> None:
    """Wait for the device, then for all ranks."""
    accelerator.synchronize()
    if group.world == 1:
        return
    if accelerator.device.type == "cpu":
        dist.barrier()
    else:
        dist.barrier(device_ids=[accelerator.device.index])
        accelerator.synchronize()


def place(
    model: nn.Module, group: Group, accelerator: Accelerator, parameters: Mapping[str, Any]
) -> nn.Module:
    """Return *model* on its device, or in host memory where :func:`wrap` will spread it over devices."""
    return model if layout_of(parameters, group.world).shard > 1 else model.to(accelerator.device)


def wrap(
    model: nn.Module,
    group: Group,
    accelerator: Accelerator,
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Return the model that averages gradients over all ranks, as the field ``parallel`` asks; itself for one rank.

    Weights of a sharded model are others than before: build its optimizer after this.

    Raises:
        WorkerFailure: ``worker_exit`` or ``not_supported``, ``parallel`` or ``batch_norm_group`` cannot be had with these
            ranks, this model or this torch.
    """
    how = layout_of(parameters, group.world)
    if how.shard > 1:
        return shard(model, how, accelerator, str(parameters.get("precision") or "fp32"))
    if group.world == 1:
        return model
    share_statistics(model, group, accelerator, batch_norm_ranks(parameters, group.world))
    ids: Optional[List[Any]] = None if accelerator.device.type == "cpu" else [accelerator.device.index]
    size: Mapping[str, Any] = (
        {"bucket_cap_mb": parameters["bucket_mb"]} if parameters.get("bucket_mb") else {}
    )
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **size)
    compress(ddp, str(parameters.get("gradient_compression") or "none"))
    return ddp


def share_statistics(model: nn.Module, group: Group, accelerator: Accelerator, ranks: int) -> None:
    """Let each *ranks* neighbouring ranks normalise by statistics of all their samples; nothing to do for one.

    Layers stay the ones that they are on CPUs, and become torch.nn.SyncBatchNorm of the same weights elsewhere. All ranks
    must call this, as all take part in the making of each group.

    Raises:
        WorkerFailure: ``worker_exit``, the model has no batch normalisation, or *ranks* do not divide those of the run.
    """
    if ranks == 1:
        return
    if group.world % ranks:
        text = f"batch_norm_group={ranks} does not divide the {group.world} ranks of this run"
        raise WorkerFailure("worker_exit", text)
    norms = [part for part in model.modules() if isinstance(part, _BATCH_NORM)]
    if not norms:
        raise WorkerFailure("worker_exit", "batch_norm_group: the model has no batch normalisation")
    own: Any = None
    if ranks < group.world:
        firsts = range(0, group.world, ranks)
        made = [dist.new_group(list(range(first, first + ranks))) for first in firsts]
        own = made[group.rank // ranks]
    if accelerator.device.type != "cpu":
        nn.SyncBatchNorm.convert_sync_batchnorm(model, own)  # type: ignore[no-untyped-call]  # torch left it so
        return
    for norm in norms:
        norm.__class__ = GroupBatchNorm
        norm.process_group = own


def communication(
    trainer: Trainer, batch: Batch, group: Group, clock: Optional[Clock] = None, pairs: int = PAIRS
) -> Tuple[Optional[float], Optional[float]]:
    """Return seconds per step of communication that computation does not hide, and how late this rank arrives.

    Runs after the timed window, with a barrier before each pass, so it perturbs nothing but itself. Exposed
    communication is the median time of forward and backward with the exchange of gradients (of shards: of weights too)
    minus the median without. Lateness needs no common clock: all leave a barrier together, so who waits least came
    last. Weights are left as they are. (None, None) for a single rank, and None where nothing could be left out.
    """
    model = trainer.model
    if group.world == 1 or not _exchanges(model):
        return None, None
    now = (clock or Clock()).perf
    alone: List[float] = []
    together: List[float] = []
    waits: List[float] = []
    known = True
    for _ in range(pairs):
        with silent(model) as left_out:
            alone.append(_timed_pass(trainer, batch, group, now))
        known = known and (bool(left_out) or not is_sharded(model))
        arrived = now()
        barrier(group, trainer.accelerator)
        waits.append((now() - arrived) / 1e9)
        together.append(_timed_pass(trainer, batch, group, now))
    longest = torch.tensor(waits, dtype=torch.float64, device=trainer.accelerator.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    late = statistics.median(top - own for top, own in zip(longest.tolist(), waits))
    exposed = max(0.0, statistics.median(together) - statistics.median(alone))
    return exposed if known else None, max(0.0, late)


def traffic(trainer: Trainer, batch: Batch, group: Group) -> Tuple[Figure, ...]:
    """Return number and bytes of each kind of collective in one step, from a step after the timed window that updates nothing.

    Nothing for a single rank, in a torch before 2.5, and where the model is compiled: what happens inside is not seen then.
    """
    model = trainer.model
    if group.world == 1 or not _exchanges(model) or getattr(model, "_compiled_call_impl", None) is not None:
        return ()
    if not countable(str(torch.__version__)):
        return ()
    copied = trainer.accelerator.copy(batch[:2])
    trainer.accelerator.await_copy(copied)
    with noted() as collectives:
        for micro in range(trainer.accumulate):
            with trainer.unsynchronised(micro):
                trainer.backward(trainer.loss(copied.tensors[0], copied.tensors[1]))
    trainer.accelerator.synchronize()
    trainer.optimizer.zero_grad(set_to_none=True)
    return figures(collectives)


def _exchanges(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel) or is_sharded(model)


def _timed_pass(trainer: Trainer, batch: Batch, group: Group, now: Any) -> float:
    accelerator = trainer.accelerator
    copied = accelerator.copy(batch[:2])
    accelerator.await_copy(copied)
    barrier(group, accelerator)
    start = now()
    trainer.backward(trainer.loss(copied.tensors[0], copied.tensors[1]))
    accelerator.synchronize()
    seconds = float((now() - start) / 1e9)
    trainer.optimizer.zero_grad(set_to_none=True)
    return seconds
