"""The ranks of one run: process group, barriers, data-parallel model, and the communication pass."""

from __future__ import annotations

import datetime as dt
import os
import statistics
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from pytest_mlhpc.node.protocol.channel import PORT_TAKEN
from pytest_mlhpc.node.protocol.schema import Figure
from pytest_mlhpc.node.worker import parallel
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Batch, Clock, Trainer
from pytest_mlhpc.node.worker.parallel import compress, layout_of, shard

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
        dist.init_process_group(
            accelerator.backend,
            rank=group.rank,
            world_size=group.world,
            timeout=dt.timedelta(seconds=timeout_s),
        )
    except (RuntimeError, OSError) as error:
        problem = port_taken(error, os.environ) if group.rank == 0 else ""
        if problem:
            raise WorkerFailure(PORT_TAKEN, problem) from error
        raise


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
        WorkerFailure: ``worker_exit`` or ``not_supported``, ``parallel`` cannot be had with these ranks or this torch.
    """
    how = layout_of(parameters, group.world)
    if how.shard > 1:
        return shard(model, how, accelerator, str(parameters.get("precision") or "fp32"))
    if group.world == 1:
        return model
    ids: Optional[List[Any]] = None if accelerator.device.type == "cpu" else [accelerator.device.index]
    size: Mapping[str, Any] = (
        {"bucket_cap_mb": parameters["bucket_mb"]} if parameters.get("bucket_mb") else {}
    )
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **size)
    compress(ddp, str(parameters.get("gradient_compression") or "none"))
    return ddp


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
        with parallel.silent(model) as left_out:
            alone.append(_timed_pass(trainer, batch, group, now))
        known = known and (bool(left_out) or not parallel.is_sharded(model))
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
    if not parallel.countable(str(torch.__version__)):
        return ()
    copied = trainer.accelerator.copy(batch[:2])
    trainer.accelerator.await_copy(copied)
    with parallel.noted() as collectives:
        for micro in range(trainer.accumulate):
            with trainer.unsynchronised(micro):
                trainer.backward(trainer.loss(copied.tensors[0], copied.tensors[1]))
    trainer.accelerator.synchronize()
    trainer.optimizer.zero_grad(set_to_none=True)
    return parallel.figures(collectives)


def _exchanges(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel) or parallel.is_sharded(model)


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
