"""PAYLOAD. NVIDIA GPUs while they compute: what the watches ``nvidia_throttle`` and ``nvidia_pcie`` have in common.

Only samples of a device that computes count: idle ones lower clocks and PCIe generation by right, and report slowdowns while
they change state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple

from pytest_mlhpc.node.vet.checks.nvidia_library import Answer, Closed, Device, Library, opened, wants_none
from pytest_mlhpc.node.vet.machine import Context, Machine

#: nvmlClocksEventReasonGpuIdle (NVML API reference).
IDLE = 0x1

#: A device computes if it was busy for at least this share of NVML's last interval, in per cent (ours).
BUSY_PERCENT = 50

#: Names of one call, the newer first: R535 renamed it.
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass(frozen=True)
class Sample:
    """What a watch saw of one device under load; ``values`` are answers by their name."""

    device: Device
    values: Dict[str, Answer]


@dataclass(frozen=True)
class Seen:
    """What a watch has seen: devices that answered before the load, samples under load, devices lost since, and NVML's refusals."""

    before: FrozenSet[int] = frozenset()
    samples: Tuple[Sample, ...] = ()
    lost: Tuple[Tuple[Device, Answer], ...] = ()
    closed: Tuple[str, ...] = ()

    def by_device(self) -> Dict[int, List[Sample]]:
        """Return samples by the device's number."""
        found: Dict[int, List[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.device.index, []).append(sample)
        return found


Look = Callable[[Library, Device], Dict[str, Answer]]


def begin(machine: Machine, context: Context) -> Optional[Seen]:
    """Return the state of a watch before the load; None where there is nothing to watch (``nvidia_inventory`` says why)."""
    if wants_none(context):
        return None
    try:
        answering = opened(machine).answering()
    except Closed:
        return None
    return Seen(frozenset(device.index for device in answering)) if answering else None


def sample(machine: Machine, seen: Optional[Seen], look: Look) -> Optional[Seen]:
    """Return the state with what *look* sees of each device that computes now."""
    if seen is None:
        return None
    try:
        library = opened(machine)
        handles = list(library.devices())
    except Closed as closed:
        return replace(seen, closed=(*seen.closed, str(closed)))
    samples, lost = list(seen.samples), {device.index: (device, why) for device, why in seen.lost}
    for index, handle in handles:
        if index not in seen.before:
            continue
        if not handle.ok:
            if handle.lost:
                lost.setdefault(index, (Device(index, None, "", "", ""), handle))
            continue
        device = library.described(index, handle.value)
        values = {"reasons": ask_reasons(library, device), **look(library, device)}
        gone = next((answer for answer in values.values() if answer.lost), None)
        if gone is not None:
            lost.setdefault(index, (device, gone))
        elif is_busy(library, device, values["reasons"]):
            samples.append(Sample(replace(device, handle=None), values))
    return replace(seen, samples=tuple(samples), lost=tuple(lost.values()))


def is_busy(library: Library, device: Device, reasons: Answer) -> bool:
    """Return whether a device computes: it does not say that it idles, and is in use as far as it says that."""
    if reasons.ok and reasons.value & IDLE:
        return False
    use = library.ask("nvmlDeviceGetUtilizationRates", device.handle)
    if use.ok:
        return bool(use.value.gpu >= BUSY_PERCENT)
    return reasons.ok and device.model is not None  # a device split by MIG does not say how busy it is


def ask_reasons(library: Library, device: Device) -> Answer:
    """Return the bits that say what holds the clocks back."""
    new, old = REASONS
    answer = library.ask(new, device.handle)
    if not answer.absent:
        return answer
    older = library.ask(old, device.handle)
    return answer if older.absent else older


def seen_of(state: object) -> Optional[Seen]:
    """Return a watch's state as what it is."""
    return state if isinstance(state, Seen) else None
