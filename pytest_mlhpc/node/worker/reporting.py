"""What reports of all modes have in common, and the operations of a model, counted analytically, by HPC AI500's rules too."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import socket
import statistics
from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    TypedDict,
)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import distributed, environment
from pytest_mlhpc.node.worker.base import Accelerator, Task, TensorSpec
from pytest_mlhpc.node.worker.distributed import Group

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FACTORIES = (
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
    torch.arange,
    torch.tensor,
)


@dataclass(frozen=True)
class Operations:
    """Cost of one sample.

    ``forward`` and ``train`` are in FLOP. Training is forward, gradient of the weights and gradient of the inputs, each as
    many as forward, but for inputs that need no gradient (those of the first layer).
    """

    parameters: int
    forward: int
    train: int


class _OnMeta(TorchFunctionMode):
    """Make new tensors on the meta device: what ``with torch.device("meta")`` does since torch 2.0."""

    # The signature is torch's.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func in _FACTORIES and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def on_meta() -> ContextManager[Any]:
    """Return a context in which modules are built without memory, whatever their size."""
    device = torch.device("meta")
    return device if hasattr(device, "__enter__") else _OnMeta()


def layer_operations(module: nn.Module, first_input: Tensor, output: Tensor) -> int:
    """Return the operations of one forward pass of one layer, zero for what is not counted."""
    own = getattr(module, "operations", None)
    if callable(own):
        return int(own(first_input, output))
    if isinstance(module, _CONVOLUTIONS):
        return 2 * output.numel() * module.in_channels // module.groups * math.prod(module.kernel_size)
    if isinstance(module, _TRANSPOSED):  # every input element meets every weight of its group
        return 2 * first_input.numel() * module.out_channels // module.groups * math.prod(module.kernel_size)
    if isinstance(module, nn.Linear):
        return 2 * output.numel() * module.in_features
    return 0


class _Counted(NamedTuple):
    """What one layer did, by its name in the model; whether its input needs a gradient."""

    name: str
    operations: int
    needs_gradient: bool


@contextlib.contextmanager
def _counting(model: nn.Module) -> Iterator[List[_Counted]]:
    """Yield a list that gets an entry for each layer that runs."""
    counted: List[_Counted] = []

    def hook(name: str, module: nn.Module, inputs: Tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            done = layer_operations(module, inputs[0], output)
            if done:
                counted.append(_Counted(name, done, inputs[0].requires_grad))

    handles = [
        module.register_forward_hook(functools.partial(hook, name)) for name, module in model.named_modules()
    ]
    try:
        yield counted
    finally:
        for handle in handles:
            handle.remove()


def _pool_by_shape(model: nn.Module) -> None:
    """Let 3-D max pooling make its output's shape without a kernel: torch 1.13 has none for the meta device."""

    def halved(pool: nn.MaxPool3d, maps: Tensor) -> Tensor:
        kernel, stride, padding = pool.kernel_size, pool.stride, pool.padding
        if not (isinstance(kernel, int) and isinstance(stride, int) and isinstance(padding, int)):
            raise NotImplementedError(
                "operations of 3-D pooling with unequal edges cannot be counted in this torch"
            )
        space = [(edge + 2 * padding - kernel) // stride + 1 for edge in maps.shape[2:]]
        # Adding the sum keeps the tie to the input, which tells what needs a gradient.
        return maps.new_empty((*maps.shape[:2], *space)) + maps.sum()

    for module in model.modules():
        if isinstance(module, nn.MaxPool3d):
            # mypy: replacing a method on one instance is the point
            module.forward = functools.partial(halved, module)  # type: ignore[method-assign]


def _run(model: nn.Module, inputs: Tensor) -> List[_Counted]:
    with _counting(model) as counted, torch.enable_grad():
        model(inputs)
    return counted


def count(task: Task) -> Operations:
    """Count the parameters of a task's model and the operations of one sample. Takes no memory and no data.

    Raises:
        NotImplementedError: this torch cannot run the model without data (one of our own never raises it).
    """
    model, counted = _one_sample(task)
    forward = sum(one.operations for one in counted)
    no_input_gradient = sum(one.operations for one in counted if not one.needs_gradient)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Operations(parameters, forward, 3 * forward - no_input_gradient)


def by_layer(task: Task) -> Mapping[str, int]:
    """Return the operations of one sample's forward pass by layer, whose full names in the model are the keys.

    Raises:
        NotImplementedError: as :func:`count`.
    """
    found: Dict[str, int] = {}
    for one in _one_sample(task)[1]:
        found[one.name] = found.get(one.name, 0) + one.operations
    return found


def _one_sample(task: Task) -> Tuple[nn.Module, List[_Counted]]:
    """Let the model see one sample on the meta device; return it with what was counted."""
    with on_meta():
        model, inputs = _model_and_sample(task)
        try:
            return model, _run(model, inputs)
        except NotImplementedError:
            _pool_by_shape(model)
            return model, _run(model, inputs)


def _model_and_sample(task: Task) -> Tuple[nn.Module, Tensor]:
    """Return the model of *task* and one sample for it, to be called within :func:`on_meta`.

    The model is in evaluation mode: normalisation over one sample of one pixel is refused while training.
    """

    def sample(spec: TensorSpec) -> Tensor:
        return torch.empty((1, *spec.shape), dtype=spec.dtype, device="meta")

    return task.model().eval(), task.prepare(sample(task.input), sample(task.target))[0]


#: Functions that do one operation for each element of their output; names without underscores around them.
_ELEMENTWISE = frozenset(
    {
        "relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "exp", "log1p", "sqrt", "rsqrt", "neg", "pow",
        "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv",
    }
)  # fmt: skip

_MATRIX_PRODUCTS = frozenset({"matmul", "bmm", "mm"})


class _CallCounter(TorchFunctionMode):
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
    """Return the operations of one call of torch's function *name* by the rules of HPC AI500, zero for what has no rule."""
    name = name.strip("_")
    first: Tensor = args[0]
    if name.startswith("conv"):
        weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
        moved = first if "transpose" in name else output
        return 2 * moved.numel() * weight[0].numel()
    if name == "linear" or name in _MATRIX_PRODUCTS:
        return output.numel() * first.shape[-1]
    if name == "scaled_dot_product_attention":
        keys: Tensor = args[1] if len(args) > 1 else kwargs["key"]
        return 2 * first.numel() * keys.shape[-2]
    if "pool" in name or name.endswith("norm"):
        return first.numel()
    return output.numel() if name in _ELEMENTWISE else 0


def forward_and_train(model: nn.Module, inputs: Tensor) -> Tuple[int, int]:
    """Return the operations of *inputs* through *model*, forward, and forward with backward. Both may be on `meta`."""
    with _CallCounter() as mode, torch.enable_grad():
        model(inputs)
    forward = sum(done for done, _ in mode.counted)
    # The first layer with weights turns inputs that need no gradient into a result that does; so there is one such layer.
    return forward, 3 * forward - sum(done for done, needs_gradient in mode.counted if not needs_gradient)


def count_ai500(task: Task) -> Tuple[int, int]:
    """Return the operations of one sample of *task* by the rules of HPC AI500: forward, and training. Takes no memory and no data.

    Raises:
        NotImplementedError: this torch cannot run the model without data (as 1.13 with 3-D pooling).
    """
    with on_meta():
        return forward_and_train(*_model_and_sample(task))


_T = 1e12
#: Device name as its driver spells it -> precision -> dense peak, FLOP/s of one device (MI250X: of one die). From the
#: makers' data sheets, as the tables of torchtitan and composer give them; tf32 is half of bf16 on A100 and Hopper.
_PEAKS: Tuple[Tuple[str, Tuple[Tuple[str, float], ...]], ...] = (
    (r"V100-SXM", (("fp16", 125 * _T),)),
    (r"A100\b", (("bf16", 312 * _T), ("fp16", 312 * _T), ("tf32", 156 * _T))),
    (r"H100.*(SXM|HBM3)|GH200", (("bf16", 989 * _T), ("fp16", 989 * _T), ("tf32", 494.5 * _T))),
    (r"H100 PCIe", (("bf16", 756 * _T), ("fp16", 756 * _T), ("tf32", 378 * _T))),
    (r"H100 NVL", (("bf16", 835 * _T), ("fp16", 835 * _T), ("tf32", 417.5 * _T))),
    (r"\bH200(?! NVL)\b", (("bf16", 989 * _T), ("fp16", 989 * _T), ("tf32", 494.5 * _T))),
    (r"\bH20\b", (("bf16", 148 * _T), ("fp16", 148 * _T), ("tf32", 74 * _T))),
    (r"\bGB200\b", (("bf16", 2500 * _T), ("fp16", 2500 * _T))),
    (r"\bB200\b", (("bf16", 2250 * _T), ("fp16", 2250 * _T))),
    (r"MI250X", (("bf16", 191.5 * _T), ("fp16", 191.5 * _T))),
    (r"MI300X|MI325X", (("bf16", 1300 * _T), ("fp16", 1300 * _T))),
    (r"MI355X", (("bf16", 2500 * _T), ("fp16", 2500 * _T))),
)


def peak_flops(device_model: str, precision: str, compute_units: Optional[int] = None) -> Optional[float]:
    """Return the dense peak of one device in FLOP/s, or None where it is not known. Never a guess.

    A slice of a device (MIG) has a part of its peak that its name does not tell: None. *compute_units* is needed for Intel's
    Max GPUs alone (512 operations of each in a cycle, at 1.3 GHz).
    """
    if re.search(r"\bMIG\b", device_model):
        return None
    if re.search(r"Data Center GPU Max", device_model):
        known = compute_units is not None and precision in ("bf16", "fp16")
        return 512 * float(compute_units or 0) * 1.3e9 if known else None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_model):
            return dict(peaks).get(precision)
    return None


#: ``progress(step, steps, samples per second of this rank)``; the batch adds ranks up. A rank that is late adds why as a
#: fourth argument (``contention.late_figures``).
Progress = Callable[..., None]


class RankIdentity(TypedDict):
    """Which rank measured, on which device, with data from where."""

    rank: int
    local_rank: int
    host: str
    device_type: str
    device_index: int
    device_model: str
    data_source: str


class SampleCost(TypedDict):
    """What one sample costs, and the peak rate of the device in the run's precision; see :mod:`~pytest_mlhpc.node.worker.reporting`."""

    forward_flop_per_sample: float
    train_flop_per_sample: float
    peak_flops_per_s: Optional[float]
    parameters: int
    tokens_per_sample: Optional[int]


class WindowUsage(TypedDict):
    """What was used in a window, and what else its node did."""

    energy_j: Optional[float]
    contention: Mapping[str, float]
    peak_memory_bytes: Optional[int]


def who(run: RunPlan, group: Group, accelerator: Accelerator) -> RankIdentity:
    """Say which rank measured what."""
    return {
        "rank": group.rank,
        "local_rank": group.local_rank,
        "host": socket.gethostname(),
        "device_type": accelerator.type,
        "device_index": accelerator.index,
        "device_model": accelerator.model,
        "data_source": run.data_source,
    }


def cost(run: RunPlan, task: Task, accelerator: Accelerator) -> SampleCost:
    """Count what the model of *task* costs."""
    operations = count(task)
    precision = str(run.parameters.get("precision") or "fp32")
    return {
        "forward_flop_per_sample": float(operations.forward),
        "train_flop_per_sample": float(operations.train),
        "peak_flops_per_s": peak_flops(accelerator.model, precision),
        "parameters": operations.parameters,
        "tokens_per_sample": task.tokens_per_sample or None,
    }


def energy_used(before: Optional[float], after: Optional[float]) -> Optional[float]:
    """Return the joules used between two readings, or None if one is missing or the counter did not move forward."""
    if before is None or after is None or after <= before:
        return None
    return after - before


class RunWatch:
    """Samples device and node from when it is made until :meth:`over`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        accelerator.reset_peak_memory()
        self._before, self._joules = contention.snapshot(), accelerator.energy_j()

    def late(self, elapsed_s: float, usual_s: Optional[float]) -> Optional[Mapping[str, float]]:
        """Return what else the node did so far, where the steps of the window are late."""
        return contention.late_figures(self._before, elapsed_s, usual_s)

    def over(self) -> WindowUsage:
        """Return what happened in between."""
        return {
            "energy_j": energy_used(self._joules, self._accelerator.energy_j()),
            "contention": contention.difference(self._before, contention.snapshot()),
            "peak_memory_bytes": self._accelerator.peak_memory_bytes(),
        }


#: Name and version of the calibration kernel, for the record's environment.
CALIBRATION_KERNEL = "gemm256-copy4m-1"

#: Edge of the square matrices: 3 x 256 KiB stay in a core's second-level cache.
_EDGE = 256
#: Floats copied per repetition: 4 Mi x 4 B = 16 MiB, more than the caches of one core.
_COPIED = 4 * 1024 * 1024
#: Products per repetition, so that products and copy take about equally long on one core.
_PRODUCTS = 8

#: How long the calibration kernel runs, in seconds.
_CALIBRATION_S = 0.25
#: Least and most repetitions of the calibration kernel.
_LEAST, _MOST = 5, 2000


def calibrate(accelerator: Accelerator, seconds: float = _CALIBRATION_S) -> float:
    """Run the kernel for about *seconds* and return repetitions per second (the median one's rate).

    Takes no random numbers, so training that follows sees the same ones.
    """
    left = torch.full((_EDGE, _EDGE), 1.0 / _EDGE, device=accelerator.device)
    right = left.clone()
    product = torch.empty_like(left)
    source = torch.ones(_COPIED, device=accelerator.device)
    target = torch.empty_like(source)

    def repetition() -> float:
        start = accelerator.mark()
        for _ in range(_PRODUCTS):
            torch.mm(left, right, out=product)
        target.copy_(source)
        end = accelerator.mark()
        accelerator.wait(end)
        return accelerator.seconds(start, end)

    for _ in range(_LEAST):
        repetition()
    accelerator.synchronize()
    times: List[float] = []
    while len(times) < _LEAST or (sum(times) < seconds and len(times) < _MOST):
        times.append(repetition())
    return 1.0 / max(statistics.median(times), 1e-9)


def calibrated(run: RunPlan, group: Group, accelerator: Accelerator) -> Optional[float]:
    """Run the fixed kernel, if it is wanted, and return its rate in 1/s.

    On all ranks at once: cores that share a cache or a clock must do so both times.
    """
    if not run.calibrate:
        return None
    distributed.barrier(group, accelerator)
    return calibrate(accelerator)


def surroundings(
    run: RunPlan,
    group: Group,
    accelerator: Accelerator,
    own: Mapping[str, str] = MappingProxyType({}),
) -> Optional[Mapping[str, str]]:
    """Return what software and hardware the ranks measure with, and a mode's *own*; the first rank tells it for all."""
    if group.rank != 0:
        return None
    device = {**accelerator.environment(), **environment.described(run)}
    if dist.is_available() and dist.is_initialized():
        device["backend"] = str(dist.get_backend())
    if run.calibrate:
        device["calibration_kernel"] = CALIBRATION_KERNEL
    return {**environment.describe(str(torch.__version__), accelerator.model, device, run.cwd), **own}
