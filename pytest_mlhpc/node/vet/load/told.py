"""PAYLOAD. What all of the child's commands say alike: of devices that fail."""

from __future__ import annotations

import statistics
from typing import List, Sequence, Tuple, Union

from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.load.devices import Device, Node

#: What torch says, in any of its releases and back-ends, when memory is short.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


#: The time over which Linux counts what a control group has used of its quota of processor time (kernel, sched-bwc.rst:
#: cpu.cfs_period_us is 100 ms), in seconds.
PERIOD_S = 0.1

#: What torch and BLAS libraries say of what they were never made for: no fault of the device.
_LACKING = ("not supported", "not_supported", "not implemented", "not compiled", "no kernel image")


def is_no_memory(error: BaseException) -> bool:
    """Return whether memory was short: torch 1.13 on processors raises a plain RuntimeError for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY)


def failure(check: str, device: Device, error: Exception) -> Finding:
    """Return the finding on a device that could not do what was asked."""
    words = " ".join(str(error).split())[:300]
    if is_no_memory(error):
        text = (
            f"{check} needs more memory than {device.name} ({device.model}) has free: is a process of an earlier job "
            f"left on it? {words}"
        )
        return Finding(check, Severity.CRITICAL, text, device.name, "device_memory")
    if any(sign in words.lower() for sign in _LACKING):
        text = f"whether {device.name} ({device.model}) is well cannot be told by {check}: this torch cannot do it there: {words}"
        return Finding(check, Severity.UNKNOWN, text, device.name, "not_supported")
    text = f"{check} failed on {device.name} ({device.model}): {type(error).__name__}: {words}"
    return Finding(check, Severity.CRITICAL, text, device.name, "device_error")


def split(
    check: str, results: Sequence[Tuple[Device, Union[float, Exception]]]
) -> Tuple[List[Tuple[Device, float]], List[Finding]]:
    """Return figures by device, and findings on the devices that failed."""
    figures = [(device, one) for device, one in results if not isinstance(one, Exception)]
    return figures, [failure(check, device, one) for device, one in results if isinstance(one, Exception)]


def not_computed(check: str, node: Node) -> Tuple[Finding, ...]:
    """Return an UNKNOWN where accelerators are here that torch cannot use: what was not looked at never passes."""
    if not node.trouble:
        return ()
    return (Finding(check, Severity.UNKNOWN, node.trouble, rule="no_device"),)


def median_rate(amount: float, seconds: Sequence[float]) -> float:
    """Return the median rate of a repetition of *amount*, where repetitions of one period count as one.

    Of a node that is stopped for 20 ms in every 100 most single repetitions are as fast as ever; no whole period is.
    """
    rates: List[float] = []
    count, total = 0, 0.0
    for one in seconds:
        count, total = count + 1, total + one
        if total >= PERIOD_S:
            rates.append(amount * count / total)
            count, total = 0, 0.0
    return statistics.median(rates) if rates else amount * count / max(total, 1e-9)
