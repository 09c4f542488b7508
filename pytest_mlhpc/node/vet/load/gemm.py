"""Matrix products, by precision, on all devices at once: what they reach under the power and heat of all.

A repetition is as many products as take some 20 ms; the figure is the median of periods of 0.1 s (``devices.py``). How large matrices are follows
from the device's model alone, never from a trial: a slow node would choose another size, and be compared with nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import Origin
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun
from pytest_mlhpc.node.vet.load.devices import (
    Device,
    LoadNode,
    Meet,
    by_clock,
    figures,
    note_unused,
    on_all,
    rate_of,
)
from pytest_mlhpc.node.vet.load.node_facts import cpu_flags

#: Seconds of measuring, all precisions together. A deep one is long enough for a device to become as hot as in a long run.
QUICK_S, DEEP_S = 3.0, 120.0

#: Quick seconds where there are cores alone: they have fewer precisions.
CORES_QUICK_S = 2.0

#: Of the data. Power, and so clocks, depend on how many bits change: 18 % between kinds of data on one MI300X (ROCm
#: Validation Suite, rvs/conf/MI300X: random against trigonometric), which is why the key says what they are.
SEED, DATA = 20261121, "uniform"

#: Chips with full-rate double precision: compute capability of P100, V100, A100, H100 and B200 (CUDA C++ Programming
#: Guide, throughput of native arithmetic instructions), and gfx names of the MI100, MI200 and MI300 series.
_FP64 = ("6.0", "7.0", "8.0", "9.0", "10.0", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")

#: What processors call instructions for bf16 products (Linux: x86 cpufeatures.h, arm64 hwcap); without, torch computes
#: in fp32 and converts, which tells nothing new.
_FAST_BF16 = ("amx_bf16", "avx512_bf16", "bf16")

_GIB = 1 << 30


@dataclass(frozen=True)
class GemmCase:
    """One kind of product: ``dtype`` is torch's name of the numbers, ``size`` the edge of the square matrices."""

    precision: str
    dtype: str
    size: int

    @property
    def flop(self) -> float:
        """Return the operations of one product."""
        return 2.0 * self.size**3


def cases_of(device: Device) -> Tuple[GemmCase, ...]:
    """Return what one device can compute fast. Below 12 GiB (older GPUs, slices of large ones) matrices are smaller."""
    size = 8192 if device.memory >= 12 * _GIB else 4096
    names: List[Tuple[str, str]] = [("fp32", "float32")]
    capability = float(device.arch) if device.kind == "cuda" and device.arch else 0.0
    if device.arch in _FP64:
        names.append(("fp64", "float64"))
    if device.kind != "cuda" or capability >= 7.0:
        names.append(("fp16", "float16"))
    if device.kind != "cuda" or capability >= 8.0:
        names.append(("bf16", "bfloat16"))
    if capability >= 8.0:
        names.append(("tf32", "float32"))
    return tuple(GemmCase(precision, dtype, size) for precision, dtype in names)


def cases_of_cores(threads: int, flags: Sequence[str]) -> Tuple[GemmCase, ...]:
    """Return what so many cores with such instructions can compute fast."""
    size = 1024 if threads <= 8 else 2048 if threads <= 32 else 4096
    found = [GemmCase("fp32", "float32", size)]
    if any(flag in flags for flag in _FAST_BF16):
        found.append(GemmCase("bf16", "bfloat16", size))
    return tuple(found)


def operands(case: GemmCase, device: torch.device) -> Tuple[Tensor, Tensor, Tensor]:
    """Return two matrices of numbers between -1 and 1, the same in every run, and room for their product."""
    generator = torch.Generator(device=device)
    generator.manual_seed(SEED)
    dtype = getattr(torch, case.dtype)
    shape = (case.size, case.size)
    left, right = (
        torch.empty(shape, device=device).uniform_(-1.0, 1.0, generator=generator).to(dtype) for _ in range(2)
    )
    return left, right, torch.empty(shape, dtype=dtype, device=device)


def measure(
    case: GemmCase,
    device: torch.device,
    timed: Callable[[Callable[[], object]], float],
    seconds: float,
    meet: Meet = lambda: None,
) -> float:
    """Return FLOP/s: the median over *seconds*, after a warm-up, from a moment when all devices are ready."""
    left, right, product = operands(case, device)
    return rate_of(case.flop, lambda: torch.mm(left, right, out=product), timed, seconds, meet)


def allow_tf32(*, allowed: bool) -> None:
    """Say whether fp32 products may be done in tf32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Measure each precision on all devices at once; on the cores where there is no device."""
    seconds = arguments.seconds(QUICK_S if node.devices else CORES_QUICK_S, DEEP_S)
    if node.devices:
        _of_devices(exam, node, arguments.round, seconds, begun)
    else:
        note_unused(exam, node)
        cases = cases_of_cores(node.threads, cpu_flags())
        for case in cases:
            begun(f"gemm {case.precision}")
            value = measure(case, torch.device("cpu"), by_clock, seconds / len(cases))
            _tell(exam, case, node.cpu_model, value, round=arguments.round)
    # Who may use fewer cores has other figures, which are not compared with those of the others: this says why.
    exam.fact("cores to compute on", str(node.threads), origin=Origin.USER)


def _of_devices(exam: Examination, node: LoadNode, round_: int, seconds: float, begun: Begun) -> None:
    """Measure what any device can do, on those that can."""
    able = {device: cases_of(device) for device in node.devices}
    cases = list(dict.fromkeys(case for cases in able.values() for case in cases))
    for case in cases:
        begun(f"gemm {case.precision}")
        devices = [device for device in node.devices if case in able[device]]
        allow_tf32(allowed=case.precision == "tf32")
        results = on_all(devices, _work(case, seconds / len(cases)), begun, f"gemm {case.precision}")
        allow_tf32(allowed=False)
        for device, value in figures(exam, results):
            _tell(exam, case, device.model, value, round=round_, device=device.name)


def _work(case: GemmCase, seconds: float) -> Callable[[Device, Meet], float]:
    return lambda device, meet: measure(case, device.torch, device.timed, seconds, meet)


def _tell(exam: Examination, case: GemmCase, model: str, value: float, **about: Any) -> None:
    key, floor = f"gemm/{case.precision}/{case.size}/{DATA}", f"gemm/{case.precision}"
    exam.reading(f"gemm_{case.precision}", key, model, value, "FLOP/s", floor=floor, **about)
