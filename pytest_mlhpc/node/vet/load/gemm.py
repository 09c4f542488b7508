"""Matrix products, by precision, on all devices at once: what they reach under the power and heat of all.

A repetition is as many products as take some 20 ms; the figure is the median of periods of 0.1 s (``devices.py``). How large matrices are follows
from the device's model alone, never from a trial: a slow node would choose another size, and be compared with nobody.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Callable, List, Sequence, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Origin, Reading
from pytest_mlhpc.node.vet.load.devices import (
    Device,
    LoadNode,
    Meet,
    median_rate,
    not_computed,
    on_all,
    split,
)
from pytest_mlhpc.node.vet.load.host import cpu_flags
from pytest_mlhpc.node.vet.load.protocol import Arguments, Begun

#: Seconds of measuring, all precisions together. A deep one is long enough for a device to become as hot as in a long run.
QUICK_S, DEEP_S = 3.0, 120.0

#: Quick seconds where there are cores alone: they have fewer precisions.
CORES_QUICK_S = 2.0

#: Least time of a repetition in seconds, so that starting and stopping the clock is none of it.
REPETITION_S = 0.02

#: Repetitions: at least for a median, at most for a list.
LEAST, MOST = 3, 100_000

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

    def one() -> object:
        return torch.mm(left, right, out=product)

    timed(one)  # kernels are loaded and chosen
    inner = max(1, math.ceil(REPETITION_S / max(timed(one), 1e-6)))

    def repetition() -> None:
        for _ in range(inner):
            one()

    meet()
    timed(repetition)  # clocks rise
    times: List[float] = []
    end = time.monotonic() + seconds
    while len(times) < LEAST or (time.monotonic() < end and len(times) < MOST):
        times.append(timed(repetition))
    return median_rate(case.flop * inner, times)


def by_clock(work: Callable[[], object]) -> float:
    """Return the seconds that *work* takes on the host's cores."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def allow_tf32(*, allowed: bool) -> None:
    """Say whether fp32 products may be done in tf32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed


def run(node: LoadNode, arguments: Arguments, begun: Begun) -> CheckOutcome:
    """Measure each precision on all devices at once; on the cores where there is no device."""
    began, seconds = time.monotonic(), arguments.seconds(QUICK_S if node.devices else CORES_QUICK_S, DEEP_S)
    readings, findings = _of_devices(node, arguments.round, seconds, begun) if node.devices else ([], [])
    if not node.devices:
        findings += not_computed("gemm", node)
        readings = _of_cores(node, arguments.round, seconds, begun)
    # Who may use fewer cores has other figures, which are not compared with those of the others: this says why.
    cores = Fact("gemm", "cores to compute on", str(node.threads), origin=Origin.USER)
    return CheckOutcome(tuple(findings), tuple(readings), (cores,), time.monotonic() - began)


def _of_devices(
    node: LoadNode, round_: int, seconds: float, begun: Begun
) -> Tuple[List[Reading], List[Finding]]:
    """Measure what any device can do, on those that can."""
    able = {device: cases_of(device) for device in node.devices}
    cases = list(dict.fromkeys(case for cases in able.values() for case in cases))
    readings: List[Reading] = []
    findings: List[Finding] = []
    for case in cases:
        begun(f"gemm {case.precision}")
        devices = [device for device in node.devices if case in able[device]]
        allow_tf32(allowed=case.precision == "tf32")
        results = on_all(devices, _work(case, seconds / len(cases)), begun, f"gemm {case.precision}")
        allow_tf32(allowed=False)
        values, failed = split("gemm", results)
        findings += failed
        readings += [
            replace(_reading(case, device.model, value, round_), device=device.name)
            for device, value in values
        ]
    return readings, findings


def _work(case: GemmCase, seconds: float) -> Callable[[Device, Meet], float]:
    return lambda device, meet: measure(case, device.torch, device.timed, seconds, meet)


def _of_cores(node: LoadNode, round_: int, seconds: float, begun: Begun) -> List[Reading]:
    cases = cases_of_cores(node.threads, cpu_flags())
    readings = []
    for case in cases:
        begun(f"gemm {case.precision}")
        value = measure(case, torch.device("cpu"), by_clock, seconds / len(cases))
        readings.append(_reading(case, node.cpu_model, value, round_))
    return readings


def _reading(case: GemmCase, model: str, value: float, round_: int) -> Reading:
    key, floor = f"gemm/{case.precision}/{case.size}/{DATA}", f"gemm/{case.precision}"
    return Reading("gemm", f"gemm_{case.precision}", key, model, value, "FLOP/s", floor=floor, round=round_)
