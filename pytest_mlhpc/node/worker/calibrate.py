"""PAYLOAD. A fixed kernel whose rate tells a slower machine from slower code.

It never changes (``KERNEL`` names it): a rate is comparable only with rates of the same kernel. Work is a mix of matrix
products and memory copies, because training is limited by either.
"""

from __future__ import annotations

import statistics
from typing import List

import torch

from pytest_mlhpc.node.worker.accelerators.base import Accelerator

#: Name and version of the kernel, for the record's environment.
KERNEL = "gemm256-copy4m-1"

#: Edge of the square matrices: 3 x 256 KiB stay in a core's second-level cache.
_EDGE = 256
#: Floats copied per repetition: 4 Mi x 4 B = 16 MiB, more than the caches of one core.
_COPIED = 4 * 1024 * 1024
#: Products per repetition, so that products and copy take about equally long on one core.
_PRODUCTS = 8

_SECONDS = 0.25
_LEAST, _MOST = 5, 2000


def calibrate(accelerator: Accelerator, seconds: float = _SECONDS) -> float:
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
