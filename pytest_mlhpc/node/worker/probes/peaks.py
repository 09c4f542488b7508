"""The most that a device computes and moves, measured with more than its caches hold."""

from __future__ import annotations

import functools
import math
import os
from typing import Callable, Dict, List, Mapping, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.cores import last_caches
from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace


def last_level(device: torch.device) -> int:
    """Return the bytes of the last caches that *device* has, 0 where nothing tells.

    On CPUs those of all cores that this process may use together; each of them may belong to other cores too.
    """
    if device.type == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)  # Linux
        return last_caches(affinity(0)) if affinity is not None else 0
    properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    # Not in torch 1.13, and of NVIDIA's and AMD's devices alone.
    return int(getattr(properties(device), "L2_cache_size", 0)) if properties is not None else 0


#: How far equal runs differ where cores, caches and memory controllers are shared.
TOLERANCE = 0.20

_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Largest difference to the product in float64 of the same (rounded) factors, over the square root of the edge: elements
#: are uniform in [-1, 1), so that a sum is of about a third of that root. Results are rounded to 8 or 11 bits, TF32 rounds
#: its factors to 11.
_WRONG = {"fp32": 1e-4, "tf32": 2.0**-8, "bf16": 2.0**-7, "fp16": 2.0**-7}

#: Of the triad: b, c, s, and what must come out.
_B, _C, _S, _A = 1.0, 2.0, 3.0, 7.0


class PeaksProbe:
    """This rank's matrices and vectors."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        parameters, device = place.run.parameters, place.accelerator.device
        self._edge = int(parameters["matrix"])
        self._factors: Dict[str, Tuple[Tensor, Tensor, Tensor]] = {}
        for precision in parameters["precisions"]:
            prepare.require_precision(str(precision), place.accelerator)
            self._factors[str(precision)] = self._matrices(str(precision))
        elements = max(1, int(parameters["vector"]) // 4)
        self._a = torch.zeros(elements, device=device)
        self._b = torch.full((elements,), _B, device=device)
        self._c = torch.full((elements,), _C, device=device)
        self._jobs: Dict[str, Callable[[], object]] = {
            "copy": lambda: self._a.copy_(self._b),
            "triad": lambda: torch.add(self._b, self._c, alpha=_S, out=self._a),
        }
        self.operations = (*self._products(), *self._moves(elements * 4))

    def _matrices(self, precision: str) -> Tuple[Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(0)
        shape = (self._edge, self._edge)
        left, right = (
            (torch.rand(shape, generator=source) * 2 - 1).to(
                self._place.accelerator.device, _TYPES[precision]
            )
            for _ in range(2)
        )
        return left, right, torch.empty_like(left)

    def _products(self) -> List[TimedOperation]:
        flop = 2.0 * self._edge**3
        found = []
        for precision in self._factors:
            rate = Rate(f"gemm_flops_{precision}", "FLOP/s", flop, tolerance=TOLERANCE)
            found.append(TimedOperation(f"gemm_{precision}", (), (rate,)))
        return found

    @staticmethod
    def _moves(size: int) -> List[TimedOperation]:
        passes = (("copy", 2), ("triad", 3))
        return [
            TimedOperation(
                name, (), (Rate(f"{name}_bandwidth", "B/s", float(size * times), tolerance=TOLERANCE),)
            )
            for name, times in passes
        ]

    def verify(self) -> None:
        """Do each once and compare.

        Raises:
            WorkerFailure: ``wrong_result``, names what was computed, and the difference.
        """
        for precision in self._factors:
            prepare.choose_arithmetic(precision)  # else fp32 is what the last one chose, perhaps TF32
            self._multiply(precision)
            self._compare(precision)
        for name, wanted in (("triad", _A), ("copy", _B)):
            self._jobs[name]()
            least, most = float(self._a.min()), float(self._a.max())
            if (least, most) != (wanted, wanted):
                text = f"{name} of {len(self._a)} elements: {least:g} to {most:g} instead of {wanted:g} everywhere"
                raise WorkerFailure("wrong_result", text)

    def _multiply(self, precision: str) -> None:
        left, right, product = self._factors[precision]
        torch.mm(left, right, out=product)

    def _compare(self, precision: str) -> None:
        """Look at the first, middle and last rows and columns."""
        left, right, product = self._factors[precision]
        chosen = torch.tensor([0, self._edge // 2, self._edge - 1], device=left.device)
        rows, columns = left[chosen].double().cpu(), right[:, chosen].double().cpu()
        found = product[chosen][:, chosen].double().cpu()
        off = float((found - rows @ columns).abs().max()) / math.sqrt(self._edge)
        if not off <= _WRONG[precision]:
            text = (
                f"a product of matrices of edge {self._edge} in {precision} differs by {off:.2g} of the root of the edge from "
                f"that in float64; at most {_WRONG[precision]:.2g} is right: this device computes wrongly"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Do each once."""
        seconds: Dict[str, float] = {}
        for precision in self._factors:
            prepare.choose_arithmetic(precision)
            seconds[f"gemm_{precision}"] = self._place.timed(1, functools.partial(self._multiply, precision))
        for name, job in self._jobs.items():
            seconds[name] = self._place.timed(1, job)
        return seconds

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the sizes, which say whether a vector fits into a cache, and those of the caches if they are known."""
        found = {"matrix_edge": str(self._edge), "vector_bytes": str(len(self._a) * 4)}
        cache = last_level(self._place.accelerator.device)
        return {**found, "cache_bytes": str(cache)} if cache else found

    def close(self) -> None:
        """Leave the memory to the end of the process."""


#: A rank's part, by its ProbePlace.
probe = PeaksProbe
