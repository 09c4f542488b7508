"""The host's cores as a device, batch normalisation of several ranks there, and torch.compile for models of any device."""

from __future__ import annotations

import ctypes
import os
import resource
import time
import warnings
from typing import Any, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from pytest_mlhpc.node.worker.base import Accelerator, Copied, Mark
from pytest_mlhpc.node.worker.environment import WorkerFailure, cpu_model

#: mallopt(3): parameter numbers of glibc's malloc.h, and the values that keep freed memory in the process. The first
#: threshold is the largest that glibc takes without limit (2.35 and newer), the second the largest of older releases.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM, _MMAP_THRESHOLDS = 2**31 - 1, (2**30, 32 * 2**20)


def keep_freed_memory() -> int:
    """Let this process keep the memory of a step's tensors for the next step; return the threshold in bytes, 0 for none.

    glibc gives blocks of more than some MiB back to the system at once, and the next step faults them in again, page by
    page: 160,000 faults in 20 steps of CosmoFlow's smoke preset, and a sixth of its throughput.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return 0
    mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    return next((size for size in _MMAP_THRESHOLDS if mallopt(_M_MMAP_THRESHOLD, size)), 0)


class Cpu:
    """Work is done when a call returns, so marks are the host's clock and copies are free."""

    type = "cpu"
    backend = "gloo"
    asynchronous = False

    def __init__(self, local_rank: int, model: str) -> None:
        self.index = local_rank
        self.model = model
        self.device = torch.device("cpu")
        self._malloc_threshold = keep_freed_memory()

    def synchronize(self) -> None:
        """Return at once: torch.accelerator.synchronize would raise on a build without any accelerator."""

    def mark(self) -> Mark:
        """Return the host's clock in nanoseconds."""
        return time.perf_counter_ns()

    def wait(self, mark: Mark) -> None:
        """Return at once."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two readings of the clock."""
        return float((end - start) / 1e9)

    def copy(self, tensors: Tuple[Tensor, ...]) -> Copied:
        """Return the tensors themselves: they are where they are needed."""
        return Copied(tensors)

    def await_copy(self, copied: Copied) -> None:
        """Return at once."""

    def reset_peak_memory(self) -> None:
        """Do nothing: the kernel's high-water mark is of the whole process and cannot be reset without privileges."""

    def peak_memory_bytes(self) -> Optional[int]:
        """Return the process's largest resident size. ``ru_maxrss`` is in KiB on Linux (getrusage(2))."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def energy_j(self) -> Optional[float]:
        """Return None: RAPL counts a whole socket, which ranks and other users share, and needs root since Linux 5.10."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return what torch chose for these cores."""
        found = {
            "torch_threads": str(torch.get_num_threads()),
            "malloc_mmap_threshold": str(self._malloc_threshold),
        }
        capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
        if capability is not None:  # not in torch 1.13
            found["cpu_capability"] = str(capability())
        return found


def open_device(local_rank: int) -> Cpu:
    """Return this rank's share of the cores as a device."""
    import platform

    return Cpu(local_rank, cpu_model() or platform.machine())


#: Longest part of a compiler's own message that goes into a failure.
_WORDS = 400


def compile_model(model: nn.Module, mode: str, accelerator: Accelerator) -> None:
    """Let *model* be compiled at its first call, for the shapes that it then sees and no others.

    In place, so that a wrapper for several ranks stays what it is. *model* is the wrapper: so torch splits what it
    compiles where buckets of gradients end, and sends them as early as without it (DDPOptimizer).

    Raises:
        WorkerFailure: ``not_supported``, see :func:`require`.
    """
    require(mode, accelerator)
    model.compile(mode=mode, dynamic=False)


def require(mode: str, accelerator: Accelerator) -> None:
    """Compile a few operations for this device, to learn here and not in the first step whether that works.

    Raises:
        WorkerFailure: ``not_supported``: this torch has no compiler, or it misses something on this node, such as a C++
            compiler (CPUs), or triton and a C compiler (GPUs).
    """
    if not hasattr(nn.Module, "compile") or not hasattr(torch, "compile"):
        text = f"compile={mode!r}: torch {torch.__version__} cannot compile a model in place, torch 2.2 and newer can"
        raise WorkerFailure("not_supported", text)
    # Each rank may use as many processes for compiling as it computes with, not as many as the node has cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(torch.get_num_threads()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints, which come again with the model
            trial: Any = torch.compile(_trial, mode=mode, dynamic=False)
            trial(torch.ones(64, device=accelerator.device, requires_grad=True)).sum().backward()
    # Compilers fail with classes of torch, of triton, OSError and more; each means that it does not work here.
    except Exception as error:
        message = " ".join(str(error).split())[:_WORDS] or type(error).__name__
        text = (
            f"compile={mode!r}: torch {torch.__version__} cannot compile on this node for {accelerator.type}: {message}. "
            "On CPUs it needs a C++ compiler (variable CXX, else g++), on GPUs triton and a C compiler"
        )
        raise WorkerFailure("not_supported", text) from error


def _trial(numbers: Tensor) -> Tensor:
    return torch.sin(numbers) * 2 + 1


class GroupBatchNorm(nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - torch has no other name of it
    """Batch normalisation by mean and variance of all samples of a group of ranks, as torch.nn.SyncBatchNorm on GPUs.

    torch's own takes no tensors of CPUs. Input and output are (N, C, ...); ranks may have different N. Not trained, it is
    what it was made of.
    """

    process_group: Any = None  #: of torch.distributed; None: all ranks

    def _check_input_dim(self, _input: Tensor) -> None:
        """Take any number of dimensions: it was checked by the class that this was made of."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        """Normalise, and in training let running statistics follow those of the group."""
        if not self.training:
            return super().forward(input)
        # mypy: torch leaves this without types
        normalised: Tensor = _NormaliseGroup.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return normalised

    def follow(self, mean: Tensor, variance: Tensor) -> None:
        """Let running statistics follow *mean* and the unbiased *variance* of this step, as torch's do."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _NormaliseGroup(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over a group: one exchange forward, one backward.

    Means and sums of squares of the ranks are joined as in Chan, Golub and LeVeque (1979), equation 2.1, weighted by their
    numbers of values. Statistics are at least float32.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], norm: Any) -> Any:
        axes = [axis for axis in range(given.dim()) if axis != 1]
        variance, mean = torch.var_mean(_wide(given), axes, unbiased=False)
        values = torch.full_like(mean[:1], given.numel() / given.shape[1])
        own = torch.cat([mean, variance * values, values])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(norm.process_group))]
        dist.all_gather(parts, own, group=norm.process_group)
        table, channels = torch.stack(parts), mean.numel()
        means, squares, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        spread = (squares + counts * (means - mean) ** 2).sum(0)
        norm.follow(mean, spread / (total - 1))
        ctx.save_for_backward(given, weight, mean, torch.rsqrt(spread / total + norm.eps), total)
        ctx.process_group = norm.process_group
        return functional.batch_norm(given, mean, spread / total, weight, bias, False, 0.0, norm.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, weight, mean, scale, total = ctx.saved_tensors
        axes = [axis for axis in range(given.dim()) if axis != 1]
        shape = [1, -1, *[1] * (given.dim() - 2)]
        wide, centred = _wide(gradient), _wide(given) - mean.view(shape)
        of_bias, of_centred = wide.sum(axes), (wide * centred).sum(axes)
        both = torch.stack([of_bias, of_centred])
        dist.all_reduce(both, group=ctx.process_group)
        offset, slope = both[0] / total, both[1] / total * scale * scale
        factor = scale if weight is None else scale * weight
        of_given = (wide - offset.view(shape) - centred * slope.view(shape)) * factor.view(shape)
        if weight is None:
            return of_given.to(given.dtype), None, None, None
        return of_given.to(given.dtype), of_centred * scale, of_bias, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
