"""Silent corruption: the same chains of matrix products must give the same bits on every core and device."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import threading
import time
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.load import devices
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode, Meet, on_all
from pytest_mlhpc.node.vet.load.gemm import allow_tf32, cases_of
from pytest_mlhpc.node.vet.load.node_facts import at_once

#: Products in a chain.
STEPS = 8

#: What the exact chain gives, by edge: SHA-256 of its last product as little-endian int32. Sums of whole numbers; a test
#: computes the first in integers alone, and the second in double precision.
EXACT: Dict[int, str] = {
    256: "cdc9f3bbcb2520e4b4e55a4b1f3d4522af5ade1e8eaa5becd4cbfc7e494803fb",
    2048: "9e6a9681230fc0dfaba24818011cd6dc76dbcec4f7a5de4ba5cfb0dc54191fba",
}


@dataclass(frozen=True)
class Digests:
    """What one core or device gave: for each computation its digests with how often each came."""

    exact: Dict[str, int]
    full: Dict[str, int]

    @property
    def steady(self) -> bool:
        """Return whether every repetition gave the same."""
        return len(self.exact) <= 1 and len(self.full) <= 1


def whole_numbers(size: int, salt: int) -> Tensor:
    """Return a square matrix of numbers of 32 bits, as int64, that look random and are the same everywhere."""
    mask = 0xFFFFFFFF
    mixed = (torch.arange(size * size, dtype=torch.int64) + salt) * 2654435761 & mask
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & mask
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 & mask
    return (mixed ^ (mixed >> 16)).reshape(size, size)


def small(numbers: Tensor) -> Tensor:
    """Return numbers from -8 to 7 in which every one of the 28 lower bits counts."""
    folded = numbers
    for shift in (4, 8, 12, 16, 20, 24):
        folded = folded ^ (numbers >> shift)
    return (folded & 15) - 8


def exact_chain(start: Tensor, factor: Tensor, steps: int = STEPS) -> Tensor:
    """Return the last product, as int32. Operands hold whole numbers from -8 to 7, in any type that holds all sums.

    Sums are at most 64 times the edge: below 2**24, up to which fp32 holds every whole number, for edges to 262,144.
    """
    current = start
    for _ in range(steps - 1):
        current = small(torch.mm(current, factor).to(torch.int32)).to(factor.dtype)
    return torch.mm(current, factor).to(torch.int32)


def full_chain(start: Tensor, factor: Tensor, steps: int = STEPS) -> Tensor:
    """Return the last product; *factor* keeps the numbers' size (:func:`full_operands`)."""
    current = start
    for _ in range(steps):
        current = torch.mm(current, factor)
    return current


def full_operands(size: int) -> Tuple[Tensor, Tensor]:
    """Return a matrix of numbers between -1 and 1, and one of such spread that a product's numbers are as large again.

    The variance of n products of independent numbers is n times the product of both variances; that of numbers from -1 to 1
    is 1/3, so the factor's is to be 1/n: numbers from -sqrt(3/n) to sqrt(3/n).
    """
    one, other = (
        whole_numbers(size, salt).to(torch.float64) / 2.0**31 - 1.0 for salt in (3, size * size + 11)
    )
    return one, other * (3.0 / size) ** 0.5


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    here = tensor.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(here.data_ptr(), here.numel() * here.element_size())).hexdigest()


#: The operands of both computations.
Operands = Tuple[Tuple[Tensor, Tensor], Tuple[Tensor, Tensor]]


def operands(size: int) -> Operands:
    """Return the operands of both computations on the host, the full ones in double precision."""
    return (
        (small(whole_numbers(size, 1)).float(), small(whole_numbers(size, size * size + 7)).float()),
        full_operands(size),
    )


def compute(given: Operands, device: torch.device, dtype: torch.dtype, seconds: float) -> Digests:
    """Repeat both computations for *seconds*, at least twice each."""
    exact = (given[0][0].to(device, copy=True), given[0][1].to(device, copy=True))
    full = (given[1][0].to(dtype).to(device), given[1][1].to(dtype).to(device))
    found: Tuple[Dict[str, int], Dict[str, int]] = ({}, {})
    end, count = time.monotonic() + seconds, 0
    while count < 2 or time.monotonic() < end:
        for results, result in zip(found, (exact_chain(*exact), full_chain(*full))):
            key = digest(result)
            results[key] = results.get(key, 0) + 1
        count += 1
    return Digests(*found)


#: Seconds on the cores, and as much on the devices.
QUICK_S, DEEP_S = 0.5, 30.0

#: Edge of the matrices: of a core, three of them fit into its caches; of a device, all its multiprocessors have work.
CORE_SIZE, DEVICE_SIZE = 256, 2048

#: At most so many different cores or devices are named.
NAMED = 8


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Compute on every core, then on all devices at once."""
    seconds = arguments.seconds(QUICK_S, DEEP_S)
    devices.note_unused(exam, node)
    begun("hash on the cores")
    of_cores(exam, node, seconds)
    if node.devices:
        begun("hash on the devices")
        of_devices(exam, node, seconds, begun)


def of_cores(exam: Examination, node: LoadNode, seconds: float) -> None:
    """Judge the cores' results."""

    def work(_number: int, _barrier: threading.Barrier) -> Digests:
        torch.set_num_threads(1)  # of the calling thread: several may add in another order
        return compute(given, torch.device("cpu"), torch.float32, seconds)

    given = operands(CORE_SIZE)
    try:
        found = at_once(node.threads, work, node.cores)
    finally:
        torch.set_num_threads(node.threads)
    names = [f"core {number}" for number in node.cores]
    common, odd = vote(names, found)
    exam.findings += [*wrong(names, found, EXACT[CORE_SIZE]), *odd]
    if common:
        name = f"hash/fp32/{CORE_SIZE}x{STEPS}/torch {node.torch}"
        exam.fact(name, common, f"{node.processor}, {isa()}", severity=Severity.CRITICAL)


def of_devices(exam: Examination, node: LoadNode, seconds: float, begun: Begun) -> None:
    """Judge the devices' results."""

    def work(device: Device, _meet: Meet) -> Digests:
        return compute(given, device.torch, dtype_of(device), seconds)

    given = operands(DEVICE_SIZE)
    with keep_order():
        results = on_all(node.devices, work, begun, "hash on the devices")
    done = devices.figures(exam, results)
    names = [device.name for device, _ in done]
    exam.findings += wrong(names, [one for _, one in done], EXACT[DEVICE_SIZE])
    for device, one in done:
        if one.steady:
            precision = str(dtype_of(device)).replace("torch.", "")
            name = f"hash/{precision}/{DEVICE_SIZE}x{STEPS}/torch {node.torch}/{build()}"
            scope = f"{device.model}, {device.units} units"
            exam.fact(name, next(iter(one.full)), scope, device.name, severity=Severity.CRITICAL)


def wrong(names: Sequence[str], found: Sequence[Digests], expected: str) -> List[Finding]:
    """Return findings on those that gave two results for one computation, or not the one that is right."""
    findings = []
    others_steady = sum(one.steady for one in found) > 0
    for name, one in zip(names, found):
        if len(one.exact) > 1 or (not one.steady and others_steady):
            text = (
                f"{name} gave {max(len(one.exact), len(one.full))} different results for the same matrix products in "
                f"{sum(one.exact.values())} repetitions: it computes wrongly now and then; take the node out of use"
            )
            findings.append(Finding("hash", Severity.CRITICAL, text, name, "steady"))
        elif expected not in one.exact:
            text = (
                f"{name} gave a wrong result for matrix products of small whole numbers, which no rounding can change: "
                "it computes wrongly; take the node out of use"
            )
            findings.append(Finding("hash", Severity.CRITICAL, text, name, "exact"))
        elif not one.steady:  # all alike: a library that adds in no fixed order does this too
            text = (
                f"{name} gave different results for the same matrix products, and so did all others here: the BLAS library may "
                "add in no fixed order; whether they compute correctly is unknown"
            )
            findings.append(Finding("hash", Severity.UNKNOWN, text, name, "steady"))
    return findings


def vote(names: Sequence[str], found: Sequence[Digests]) -> Tuple[Optional[str], List[Finding]]:
    """Return the full computation's result on most cores, None without a majority, and findings on the others.

    Cores of one processor need no other node to be compared with; of two that differ nobody can say which is right.
    """
    steady = [(name, next(iter(one.full))) for name, one in zip(names, found) if one.steady]
    if not steady:
        return None, []
    (common, count), *_ = collections.Counter(value for _, value in steady).most_common(1)
    if 2 * count <= len(steady):
        text = f"the cores gave {len({value for _, value in steady})} different results for the same matrix products, none of them mostly"
        return None, [Finding("hash", Severity.UNKNOWN, text, rule="vote")]
    odd = [name for name, value in steady if value != common]
    findings = []
    for name in odd[:NAMED]:
        text = (
            f"{name} gave another result than {count} of {len(steady)} cores for the same matrix products"
            f"{f' ({len(odd)} cores did)' if len(odd) > 1 else ''}: it computes wrongly; take the node out of use"
        )
        findings.append(Finding("hash", Severity.CRITICAL, text, name, "vote"))
    return common, findings


def dtype_of(device: Device) -> torch.dtype:
    """Return the precision in which a device of this kind trains."""
    names = [case.dtype for case in cases_of(device)]
    chosen = next(name for name in ("bfloat16", "float16", "float32") if name in names)
    found: torch.dtype = getattr(torch, chosen)
    return found


@contextlib.contextmanager
def keep_order() -> Iterator[None]:
    """Have the BLAS libraries add in the same order each time, and in fp32 (of what torch's release has of these)."""
    matmul = torch.backends.cuda.matmul
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        if hasattr(matmul, name):  # the second is not in torch 1.13
            setattr(matmul, name, False)
    allow_tf32(allowed=False)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # without it rocBLAS may add atomically
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(
            mode=False
        )  # with it torch also fills new memory, which costs time


def build() -> str:
    """Return which libraries torch was built with: another release of the BLAS may add in another order."""
    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    return f"cuda {torch.version.cuda}" if torch.version.cuda else "oneapi"


def isa() -> str:
    """Return the instructions that torch uses here: hosts of one model may hide some from their guests."""
    capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
    return str(capability()) if capability is not None else "unknown instructions"  # not in torch 1.13
