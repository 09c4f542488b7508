"""PAYLOAD. Operations of a model by the rules of HPC AI500, which differ from ours (``node/worker/flops.py``).

Their table (V3.0), for one sample: convolution ``2 K^2 C_in H W C_out``, divided by the groups, if any (so a depthwise one is
``2 K^2 C_in H W``); fully connected ``F_in F_out``: one for a multiply-add, where convolutions count two; element-wise
``C_out H W``; pooling and normalisation ``C_in H W``. Matrix products of attention have no rule there and are counted as
fully connected layers, transposed convolutions as convolutions.

Training is three times forward, less the gradient of the inputs of the first layer, which nobody needs. That gives the
paper's 11,776 GFLOP for 512 samples of ResNet-50 (23.0 each) for v1, whose stride is in the first 1x1 convolution of a
bottleneck, and 24.4 for v1.5.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Tuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_mlhpc.node.worker import flops
from pytest_mlhpc.node.worker.workloads.base import Task

#: Functions that do one operation for each element of their output; names without underscores around them.
_ELEMENTWISE = frozenset(
    {
        "relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "exp", "log1p", "sqrt", "rsqrt", "neg", "pow",
        "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv",
    }
)  # fmt: skip

_PRODUCTS = frozenset({"matmul", "bmm", "mm"})


class _ByTheirRules(TorchFunctionMode):
    """Collects (operations, whether the input needs a gradient) of all that is called; what a function calls is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: List[Tuple[int, bool]] = []

    # The signature is torch's.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            done = operations_of(getattr(func, "__name__", ""), args, kwargs or {}, result)
            if done:
                self.counted.append((done, args[0].requires_grad))
        return result


def operations_of(name: str, args: Tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> int:
    """Return the operations of one call of torch's function *name* by their rules, zero for what has no rule."""
    name = name.strip("_")
    first: Tensor = args[0]
    if name.startswith("conv"):
        weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
        moved = first if "transpose" in name else output
        return 2 * moved.numel() * weight[0].numel()
    if name == "linear" or name in _PRODUCTS:
        return output.numel() * first.shape[-1]
    if name == "scaled_dot_product_attention":
        keys: Tensor = args[1] if len(args) > 1 else kwargs["key"]
        return 2 * first.numel() * keys.shape[-2]
    if "pool" in name or name.endswith("norm"):
        return first.numel()
    return output.numel() if name in _ELEMENTWISE else 0


def forward_and_train(model: nn.Module, inputs: Tensor) -> Tuple[int, int]:
    """Return the operations of *inputs* through *model*, forward, and forward with backward. Both may be on `meta`."""
    with _ByTheirRules() as mode, torch.enable_grad():
        model(inputs)
    forward = sum(done for done, _ in mode.counted)
    # The first layer with weights turns inputs that need no gradient into a result that does; so there is one such layer.
    return forward, 3 * forward - sum(done for done, needs_gradient in mode.counted if not needs_gradient)


def count(task: Task) -> Tuple[int, int]:
    """Return the operations of one sample of *task* by their rules: forward, and training. Takes no memory and no data.

    Raises:
        NotImplementedError: this torch cannot run the model without data (as 1.13 with 3-D pooling).
    """

    def sample(shape: Tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((1, *shape), dtype=dtype, device="meta")

    with flops.on_meta():
        # Evaluation mode, as normalisation over one sample of one pixel is refused while training.
        model = task.model().eval()
        inputs, _ = task.prepare(
            sample(task.input.shape, task.input.dtype), sample(task.target.shape, task.target.dtype)
        )
        return forward_and_train(model, inputs)
