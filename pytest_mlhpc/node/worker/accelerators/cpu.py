"""The host's cores as a device, and torch.compile for models of any device."""

from __future__ import annotations

import ctypes
import os
import resource
import time
import warnings
from typing import Any, Mapping, Optional, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.accelerators.base import Accelerator, Copied, Mark
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
