"""PAYLOAD. How much one training step computes and moves, by class of work: a model of bytes, not a measurement.

A step runs once with torch telling each operator that it carries out. Operations are counted as everywhere here (a
multiply-add is two; convolutions, products of matrices and attention, which is not halved for its mask). Bytes follow one rule: an operator
reads each of its tensors once and writes each result once, and views move nothing. So caches that hold a tensor for the next
operator, and compilers that join operators, move less than this says; kernels that read a tensor twice move more.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_mlhpc.node.worker.loop import autocast
from pytest_mlhpc.node.worker.probes.classes import class_of
from pytest_mlhpc.node.worker.workloads.base import Task

#: Operators that make memory without writing it, or that only look.
_NOTHING = ("aten::empty", "aten::new_empty", "aten::lift", "aten::_local_scalar", "profiler::", "prim::")
#: Operators that write their first tensor without reading it.
_OVERWRITE = ("aten::fill_", "aten::zero_", "aten::copy_")

Count = Tuple[int, int]  #: operations, bytes


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves this class without types
    """Adds up what each operator does while it is active; ``optimizer`` says that all of it belongs to the update."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # see above
        self.found: Dict[str, Count] = {}
        self.optimizer = False

    # The signature is torch's.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        name = str(func._schema.name)  # noqa: SLF001 - torch has no other way to tell whether an operator only makes a view
        if not _is_view(func) and not name.startswith(_NOTHING):
            kind = "optimizer" if self.optimizer else class_of(name)
            done, moved = self.found.get(kind, (0, 0))
            self.found[kind] = (
                done + operations(name, args, result),
                moved + _moved(name, args, given, result),
            )
        return result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001 - see above
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _size(tensor: Tensor) -> int:
    """Return the bytes of *tensor*; of one that repeats itself (stride 0) only what lies there."""
    lying = math.prod(edge for edge, stride in zip(tensor.shape, tensor.stride()) if stride or edge <= 1)
    return int(lying * tensor.element_size())


def _moved(name: str, args: Any, kwargs: Any, result: Any) -> int:
    read: List[Tensor] = list(_tensors([args, kwargs]))
    written: List[Tensor] = list(_tensors(result))
    if not written and name.endswith(
        "_"
    ):  # operators on lists of tensors write into the first list and return nothing
        written = list(_tensors(args[0]))
    if name.startswith(_OVERWRITE):
        read = read[1:]
    return sum(map(_size, read)) + sum(map(_size, written))


def operations(name: str, args: Sequence[Any], result: Any) -> int:
    """Return the operations of one call of an operator with these arguments; zero for what is never counted."""
    if name == "aten::convolution":
        return _convolution(args[1], args[0], result, transposed=bool(args[6]))
    if name == "aten::convolution_backward":
        gradient, inputs, weight, mask = args[0], args[1], args[2], args[10]
        return _convolution(weight, inputs, gradient, transposed=bool(args[7])) * (
            bool(mask[0]) + bool(mask[1])
        )
    if name in ("aten::mm", "aten::bmm"):
        return 2 * int(result.numel()) * int(args[0].shape[-1])
    if name in ("aten::addmm", "aten::baddbmm"):
        return 2 * int(result.numel()) * int(args[1].shape[-1])
    if "scaled_dot_product" in name:
        return _attention(name, args)
    return 0


def _convolution(weight: Tensor, inputs: Tensor, output: Tensor, *, transposed: bool) -> int:
    """Each element of the output (transposed: of the input) meets the weights of its group."""
    met = inputs if transposed else output
    return 2 * int(met.numel()) * int(math.prod(weight.shape[1:]))


def _attention(name: str, args: Sequence[Any]) -> int:
    """Scores and their product with the values, of the whole square; backward twice as many."""
    shift = 1 if "backward" in name else 0
    query, key = args[shift], args[shift + 1]
    rows = int(math.prod(query.shape[:-1]))
    forward = 4 * rows * int(key.shape[-2]) * int(query.shape[-1])
    return 2 * forward if shift else forward


def count(task: Task, inputs: Tensor, targets: Tensor, precision: str) -> Dict[str, Count]:
    """Return (operations, bytes) of one step by class. A model is built for it, eager and on the batch's device, and left.

    Raises:
        WorkerFailure: what the step itself raises.
    """
    model = task.model().to(inputs.device).train()
    optimizer = task.optimizer(model)

    def step(counter: Optional[Counter]) -> None:
        optimizer.zero_grad(set_to_none=True)
        with counter if counter is not None else nullcontext():
            with autocast(inputs.device.type, precision):
                ready, wanted = task.prepare(inputs, targets)
                loss = task.loss(model(ready), wanted)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
            if counter is not None:
                counter.optimizer = True
            optimizer.step()

    step(None)  # the optimizer makes its states in the first one
    counter = Counter()
    step(counter)
    return counter.found
