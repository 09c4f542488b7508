"""PAYLOAD. torch.compile: whether it works on this node, and a model that is compiled in place."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.failure import WorkerFailure

#: Longest part of a compiler's own words that goes into a failure.
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
        words = " ".join(str(error).split())[:_WORDS] or type(error).__name__
        text = (
            f"compile={mode!r}: torch {torch.__version__} cannot compile on this node for {accelerator.type}: {words}. "
            "On CPUs it needs a C++ compiler (variable CXX, else g++), on GPUs triton and a C compiler"
        )
        raise WorkerFailure("not_supported", text) from error


def _trial(numbers: Tensor) -> Tensor:
    return torch.sin(numbers) * 2 + 1
