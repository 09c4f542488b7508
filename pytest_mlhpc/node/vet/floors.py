"""PAYLOAD. What each device should reach, for where there are too few peers to compare with.

A reading names the quantity (``gemm/bf16``, see :data:`NAMES`) and its device's model finds the hardware. A figure below
``fail`` condemns, one below ``warn`` warns. A floor of low confidence never condemns: below it nobody can tell. A site
that knows better has its own history, which tightens (``settings.Learned``).

Sources, by the letter in brackets, all as of 2026-11-21:

* C: eth-cscs/cscs-reframe-tests, checks/microbenchmarks/{gpu,cpu_gpu,xccl}, checks/system/network
* A: Azure/azurehpc-health-checks, conf
* Z: Azure/ai-infrastructure-on-azure, skills/ai-infra/references/sku_baselines.md
* E: stas00/ml-engineering, compute/accelerator/README.md and network/README.md
* R: ROCm/ROCmValidationSuite, rvs/conf
* D: NVIDIA/DCGM, nvvs/diag-skus.yaml.in
* V: eth-cscs/vetnode, configuration for Alps
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional, Tuple

#: Quantities that have floors. ``all_reduce/N``: bus bandwidth over N devices of one
#: node. ``host_copy``: one direction. ``memory/device``: read and written together.
NAMES = (
    "gemm/fp64", "gemm/fp32", "gemm/fp16", "gemm/bf16", "gemm/fp8",
    "memory/device", "host_copy", "all_reduce/2", "all_reduce/4", "all_reduce/8",
    "storage/write", "storage/read", "storage/create", "storage/stat",
)  # fmt: skip

#: Share of a measured figure that healthy devices reach: C allows 10 % below its own, Z fails at 10 % below the best of E.
USUAL = 0.90

#: Matrix products of random numbers run up to 18 % slower than of easy ones (R, MI300X fp16: 639 random, 523
#: trigonometric). Where a source does not say what it multiplied, the figure is taken as of easy ones.
RANDOM = 0.82

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Floor:
    """What devices whose model matches ``model`` reach; ``fail`` and ``warn`` in ``unit``. ``confidence`` is high, medium or low."""

    name: str
    hardware: str
    model: str
    fail: float
    source: str
    confidence: str
    unit: str = "FLOP/s"
    warn: Optional[float] = None

    def matches(self, name: str, model: str) -> bool:
        """Return whether this is the floor of *name* for a device called *model* by its driver."""
        return self.name == name and re.search(self.model, model, re.IGNORECASE) is not None


# What drivers call the devices. Cards of the same name in other forms (PCIe, NVL) reach less and have no floor.
_V100 = ("V100 SXM2", r"\bV100-SXM2\b")
_A100_40 = ("A100 SXM 40 GB", r"\bA100-SXM4?-40GB\b")
_A100_80 = ("A100 SXM 80 GB", r"\bA100-SXM4?-80GB\b")
_A100 = ("A100 SXM", r"\bA100-SXM4?-(40|80)GB\b")
_H100 = ("H100 SXM", r"\bH100 80GB HBM3\b|\bH100[ -]SXM")
_H200 = ("H200 SXM", r"\bH200\b(?! NVL)")
_GH200 = ("GH200", r"\bGH200\b")
_MI210 = ("MI210", r"\bMI210\b")
_MI250X = ("MI250X, one GCD", r"\bMI250X\b")
_MI300X = ("MI300X", r"\bMI300X\b")

# File systems, as Linux names their kinds (checks/storage.py); nobody knows more of their hardware.
_FILES = (
    "a file system",
    r"^(unknown|ext[234]|xfs|btrfs|zfs|f2fs|overlay|tmpfs|ramfs|nfs4?|lustre|gpfs|beegfs|ceph|9p|fuse.*|\w+fs)$",
)


def _flops(name: str, device: Tuple[str, str], tera: float, source: str, confidence: str) -> Floor:
    return Floor(f"gemm/{name}", *device, fail=tera * _T, source=source, confidence=confidence)


def _bytes(name: str, device: Tuple[str, str], giga: float, source: str, confidence: str) -> Floor:
    return Floor(name, *device, fail=giga * _G, source=source, confidence=confidence, unit="B/s")


FLOORS: Tuple[Floor, ...] = (
    _flops("fp64", _V100, 5.25 * USUAL, "C: 5.25 TFLOP/s -10 %", "high"),
    _bytes("memory/device", _V100, 777 * USUAL, "C: 777 GB/s -10 % (D: at least 607)", "high"),
    _bytes("host_copy", _V100, 12.0 * USUAL, "C: 12.0 to 13.2 GB/s -10 %", "high"),
    _bytes("all_reduce/8", _V100, 110, "A: at least 110 GB/s", "medium"),
    _flops("bf16", _A100, 271 * USUAL * RANDOM, "E: 271 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _flops("fp64", _A100, 16.6 * USUAL, "C: 16.6 TFLOP/s -10 %", "high"),
    _bytes("memory/device", _A100_40, 1322 * USUAL, "C: 1322 GB/s -10 % (D: at least 1173)", "medium"),
    _bytes("memory/device", _A100_80, 1900 * USUAL, "C: 1900 GB/s -10 %", "medium"),
    _bytes("host_copy", _A100, 21, "A: fails below 21 GB/s (C: 25.5)", "high"),
    _bytes("all_reduce/8", _A100, 228, "A: at least 228 GB/s", "high"),
    Floor("gemm/bf16", *_H100, fail=715 * RANDOM * _T, warn=742 * RANDOM * _T, confidence="medium",
          source="Z: warns below 742, fails below 715 TFLOP/s; -18 % for random data"),
    _flops("fp8", _H100, 1403 * USUAL * RANDOM, "E: 1403 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _bytes("memory/device", _H100, 1905, "D: at least 1905 GB/s, loose (the data sheet says 3350)", "low"),
    _bytes("host_copy", _H100, 48, "A: fails below 48 GB/s of 52", "high"),
    Floor("all_reduce/8", *_H100, fail=300 * _G, warn=400 * _G, confidence="high", unit="B/s",
          source="Z: expects 450, warns below 400, fails below 300 GB/s"),
    Floor("gemm/bf16", *_H200, fail=715 * RANDOM * _T, warn=742 * RANDOM * _T, confidence="medium",
          source="E: computes as an H100; Z: fails below 715 TFLOP/s; -18 % for random data"),
    _flops("fp8", _H200, 1453 * USUAL * RANDOM, "E: 1453 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _bytes("memory/device", _H200, 2212, "D: at least 2212 GB/s, loose (the data sheet says 4800)", "low"),
    _bytes("host_copy", _H200, 55.1 * USUAL, "E: 55.4 and 55.1 GB/s, -10 %", "high"),
    _bytes("all_reduce/8", _H200, 366 * USUAL, "E: 366 GB/s without NVLS, -10 % (with it 473 to 482)", "medium"),
    _bytes("all_reduce/4", _H200, 363 * USUAL, "E: 363 GB/s, -10 %", "high"),
    _flops("bf16", _GH200, 829 * USUAL * RANDOM, "E: 829 TFLOP/s at best, -10 %, -18 % for random data", "medium"),
    _flops("fp16", _GH200, 548 * USUAL, "C: 548 to 600 TFLOP/s, -10 %", "high"),
    _flops("fp32", _GH200, 48 * USUAL, "C: 48 to 52 TFLOP/s, -10 %", "high"),
    _flops("fp64", _GH200, 40 * USUAL, "C: 40 to 52 TFLOP/s, -10 %", "high"),
    _bytes("memory/device", _GH200, 3700 * USUAL, "C: 3700 GB/s -10 %", "high"),
    _bytes("host_copy", _GH200, 300, "guess: E has 359 and 377 GB/s on GB300, the data sheet 450", "low"),
    _bytes("all_reduce/4", _GH200, 250, "V: at least 250 GB/s", "medium"),
    _flops("fp16", _MI210, 150 * 0.93, "R: 150 TFLOP/s -7 %", "medium"),
    _flops("fp64", _MI210, 30 * 0.93, "R: 30 TFLOP/s -7 %", "medium"),
    _flops("bf16", _MI210, 41 * 0.93, "R: 41 TFLOP/s, a loose target, -7 %", "low"),
    _flops("fp16", _MI250X, 87 * USUAL, "C: 87 to 120 TFLOP/s, -10 %", "medium"),
    _flops("fp32", _MI250X, 29 * USUAL, "C: 29 to 33 TFLOP/s, -10 %", "medium"),
    _flops("fp64", _MI250X, 19 * USUAL, "C: 19 to 27 TFLOP/s, -10 %", "medium"),
    _bytes("host_copy", _MI250X, 12, "A: at least 12 GB/s", "medium"),
    _flops("bf16", _MI300X, 552 * 0.93, "R: 581 TFLOP/s random, 552 trigonometric, -7 %", "high"),
    _flops("fp16", _MI300X, 523 * 0.93, "R: 639 TFLOP/s random, 523 trigonometric, -7 %", "high"),
    _flops("fp8", _MI300X, 981 * 0.93, "R: 1215 TFLOP/s random, 981 trigonometric, -7 %", "high"),
    _flops("fp32", _MI300X, 100 * 0.93, "R: 100 TFLOP/s, -7 %", "high"),
    _bytes("host_copy", _MI300X, 48, "A: at least 48 GB/s", "high"),
    _bytes("all_reduce/8", _MI300X, 313, "A: at least 314 GB/s, elsewhere 313", "high"),
    _bytes("all_reduce/2", _MI300X, 47.7 * USUAL, "E: 47.7 GB/s, -10 %", "high"),
    _bytes("storage/write", _FILES, 0.005, "guess: a disk that many share, or that is failing", "low"),
    _bytes("storage/read", _FILES, 0.005, "guess: a disk that many share, or that is failing", "low"),
    Floor("storage/create", *_FILES, fail=5, confidence="low", unit="1/s", source="guess: 200 ms for a file"),
    Floor("storage/stat", *_FILES, fail=10, confidence="low", unit="1/s", source="guess: 100 ms for a file"),
)  # fmt: skip


def find(name: str, model: str) -> Optional[Floor]:
    """Return the floor of *name* for devices called *model*, or None where we know none."""
    if not name:
        return None
    return next((floor for floor in FLOORS if floor.matches(name, model)), None)
