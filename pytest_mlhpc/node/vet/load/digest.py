"""PAYLOAD. Silent corruption: the same computation must give the same bits, again and again, on every core and device.

Two computations, each a chain of matrix products in which one wrong element spreads to all:

* *exact*: small whole numbers in fp32. Every sum is below 2**24, so that no order of adding rounds: all hardware and all software
  must give the one result that is written here.
* *full*: numbers with all their bits, in the precision of training, where order matters: results are equal only for one model,
  one torch and one BLAS. Their digest is a :class:`Fact`, on which devices of one model vote.

On processors each core computes alone, bound to it, with one thread: so threads cannot change the order, and the core is
known that computed wrongly.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Iterator, List, Optional, Sequence, Tuple

import torch

from pytest_mlhpc.node.vet.finding import Fact, Finding, Outcome, Severity
from pytest_mlhpc.node.vet.load import told
from pytest_mlhpc.node.vet.load.chains import EXACT, STEPS, Digests, compute, operands
from pytest_mlhpc.node.vet.load.cores import at_once
from pytest_mlhpc.node.vet.load.devices import Device, Meet, Node, on_all
from pytest_mlhpc.node.vet.load.gemm import allow_tf32, cases_of
from pytest_mlhpc.node.vet.load.protocol import Arguments, Begun

#: Seconds on the cores, and as much on the devices.
QUICK_S, DEEP_S = 0.5, 30.0

#: Edge of the matrices: of a core, three of them fit into its caches; of a device, all its multiprocessors have work.
CORE_SIZE, DEVICE_SIZE = 256, 2048

#: At most so many different cores or devices are named.
NAMED = 8


def run(node: Node, arguments: Arguments, begun: Begun) -> Outcome:
    """Compute on every core, then on all devices at once."""
    began, seconds = time.monotonic(), arguments.seconds(QUICK_S, DEEP_S)
    findings: List[Finding] = list(told.not_computed("hash", node))
    facts: List[Fact] = []
    begun("hash on the cores")
    found, facts_found = of_cores(node, seconds)
    findings += found
    facts += facts_found
    if node.devices:
        begun("hash on the devices")
        found, facts_found = of_devices(node, seconds, begun)
        findings += found
        facts += facts_found
    return Outcome(tuple(findings), (), tuple(facts), time.monotonic() - began)


def of_cores(node: Node, seconds: float) -> Tuple[List[Finding], List[Fact]]:
    """Return what the cores' results say."""

    def work(_number: int, _barrier: threading.Barrier) -> Digests:
        torch.set_num_threads(1)  # of the calling thread: several may add in another order
        return compute(given, torch.device("cpu"), torch.float32, seconds)

    given = operands(CORE_SIZE)
    try:
        found = at_once(node.threads, work, node.cores)
    finally:
        torch.set_num_threads(node.threads)
    names = [f"core {number}" for number in node.cores]
    findings = wrong(names, found, EXACT[CORE_SIZE])
    common, odd = vote(names, found)
    findings += odd
    scope = f"{node.processor}, {isa()}"
    name = f"hash/fp32/{CORE_SIZE}x{STEPS}/torch {node.torch}"
    return findings, [Fact("hash", name, common, scope, severity=Severity.CRITICAL)] if common else []


def of_devices(node: Node, seconds: float, begun: Begun) -> Tuple[List[Finding], List[Fact]]:
    """Return what the devices' results say."""

    def work(device: Device, _meet: Meet) -> Digests:
        return compute(given, device.torch, dtype_of(device), seconds)

    given = operands(DEVICE_SIZE)
    with keep_order():
        results = on_all(node.devices, work, begun, "hash on the devices")
    findings = [told.failure("hash", device, one) for device, one in results if isinstance(one, Exception)]
    done = [(device, one) for device, one in results if not isinstance(one, Exception)]
    names = [device.name for device, _ in done]
    findings += wrong(names, [one for _, one in done], EXACT[DEVICE_SIZE])
    facts = []
    for device, one in done:
        if one.steady:
            precision = str(dtype_of(device)).replace("torch.", "")
            name = f"hash/{precision}/{DEVICE_SIZE}x{STEPS}/torch {node.torch}/{build()}"
            scope = f"{device.model}, {device.units} units"
            facts.append(Fact("hash", name, next(iter(one.full)), scope, device.name, Severity.CRITICAL))
    return findings, facts


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
                "add in no fixed order; whether they compute rightly cannot be told"
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
