"""PAYLOAD. What ranks exchange in one step: number and bytes of each kind of collective, and passes that exchange nothing.

Bytes of a collective are those of its whole message, as NCCL's tests count them: the summed tensor of an all-reduce, all
that an all-gather puts together, all that a reduce-scatter takes apart. What travels on a link depends on the algorithm.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Tuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_mlhpc.node.protocol.schema import Figure

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
        with model.no_sync():
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
