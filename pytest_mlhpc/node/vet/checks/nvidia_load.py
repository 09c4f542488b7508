"""NVIDIA GPUs under load: clocks that are limited, and PCIe links that are not at their best."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Callable, Dict, FrozenSet, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Examination, LoadWatch
from pytest_mlhpc.node.vet.checks.nvidia_devices import (
    Answer,
    NvidiaDevice,
    NvmlLibrary,
    NvmlUnavailable,
    opened,
    unread,
    wants_none,
)
from pytest_mlhpc.node.vet.machine import Context, Machine

#: nvmlClocksEventReasonGpuIdle (NVML API reference).
IDLE = 0x1

#: A device computes if it was busy for at least this share of NVML's last interval, in per cent (ours).
BUSY_PERCENT = 50

#: Names of one call, the newer first: R535 renamed it.
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


@dataclass(frozen=True)
class GpuSample:
    """What a watch saw of one device under load; ``values`` are answers by their name."""

    device: NvidiaDevice
    values: Dict[str, Answer]


@dataclass(frozen=True)
class WatchedDevices:
    """What a watch has read: devices that answered before the load, samples under load, devices lost since, and NVML's refusals."""

    before: FrozenSet[int] = frozenset()
    samples: Tuple[GpuSample, ...] = ()
    lost: Tuple[Tuple[NvidiaDevice, Answer], ...] = ()
    closed: Tuple[str, ...] = ()

    def by_device(self) -> Dict[int, List[GpuSample]]:
        """Return samples by the device's number."""
        found: Dict[int, List[GpuSample]] = {}
        for sample in self.samples:
            found.setdefault(sample.device.index, []).append(sample)
        return found


Read = Callable[[NvmlLibrary, NvidiaDevice], Dict[str, Answer]]


def start(machine: Machine, context: Context) -> Optional[WatchedDevices]:
    """Return the state of a watch before the load; None where there is nothing to watch (``nvidia_inventory`` says why)."""
    if wants_none(context):
        return None
    try:
        answering = opened(machine).answering()
    except NvmlUnavailable:
        return None
    return WatchedDevices(frozenset(device.index for device in answering)) if answering else None


def observe(machine: Machine, watched: WatchedDevices, read: Read) -> WatchedDevices:
    """Return the state with what *read* says of each device that computes now."""
    try:
        library = opened(machine)
        handles = list(library.devices())
    except NvmlUnavailable as closed:
        return replace(watched, closed=(*watched.closed, str(closed)))
    samples, lost = list(watched.samples), {device.index: (device, why) for device, why in watched.lost}
    for index, handle in handles:
        if index not in watched.before:
            continue
        if not handle.ok:
            if handle.lost:
                lost.setdefault(index, (NvidiaDevice(index, None, "", "", ""), handle))
            continue
        device = library.described(index, handle.value)
        values = {"reasons": ask_reasons(library, device), **read(library, device)}
        gone = next((answer for answer in values.values() if answer.lost), None)
        if gone is not None:
            lost.setdefault(index, (device, gone))
        elif is_busy(library, device, values["reasons"]):
            samples.append(GpuSample(replace(device, handle=None), values))
    return replace(watched, samples=tuple(samples), lost=tuple(lost.values()))


def is_busy(library: NvmlLibrary, device: NvidiaDevice, reasons: Answer) -> bool:
    """Return whether a device computes: it does not say that it idles, and is in use as far as it says that."""
    if reasons.ok and reasons.value & IDLE:
        return False
    use = library.ask("nvmlDeviceGetUtilizationRates", device.handle)
    if use.ok:
        return bool(use.value.gpu >= BUSY_PERCENT)
    return reasons.ok and device.model is not None  # a device split by MIG does not say how busy it is


def ask_reasons(library: NvmlLibrary, device: NvidiaDevice) -> Answer:
    """Return the bits that say what holds the clocks back."""
    new, old = REASONS
    answer = library.ask(new, device.handle)
    if not answer.absent:
        return answer
    older = library.ask(old, device.handle)
    return answer if older.absent else older


#: nvmlClocksEventReason (NVML API reference); those that are not here are normal, or set by somebody.
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
HARDWARE = HW_SLOWDOWN | HW_THERMAL | POWER_BRAKE
WORDS = {HW_SLOWDOWN: "slowdown by hardware", HW_THERMAL: "heat", POWER_BRAKE: "external power brake"}

#: NVML_TEMPERATURE_GPU.
TEMPERATURE = 0

#: Fewest samples under load from which a share means anything (ours: one and a half seconds).
FEWEST = 3


def _read_clocks(library: NvmlLibrary, device: NvidiaDevice) -> Dict[str, Answer]:
    return {"temperature": library.ask("nvmlDeviceGetTemperature", device.handle, TEMPERATURE)}


def _judge_clocks(exam: Examination, samples: List[GpuSample]) -> None:
    device = samples[-1].device
    warm = [one.values["temperature"].value for one in samples if one.values["temperature"].ok]
    if warm:  # no reading: rooms and places in a rack differ, and slowdowns say when it matters
        text = f"{device.place} reached {max(warm)} degrees Celsius under load"
        exam.info(text, device.label, value=float(max(warm)), unit="degree_celsius")
    answers = [one.values["reasons"] for one in samples]
    bits = [answer.value for answer in answers if answer.ok]
    if not bits:
        essential = device.model is not None
        unread(
            exam, "nvidia.hw_slowdown", device, "what holds its clocks back", answers[0], essential=essential
        )
        return
    if len(bits) < FEWEST:
        exam.info(
            f"{device.place} was seen under load {len(bits)} times only, too few to judge", device.label
        )
        return
    share = sum(bool(bit & HARDWARE) for bit in bits) / len(bits)
    causes = [word for mask, word in WORDS.items() if any(bit & mask for bit in bits)]
    text = (
        f"{device.place} was slowed to half its clock or less in {share:.0%} of {len(bits)} samples under load "
        f"({', '.join(causes)}); have its cooling and power supply checked"
    )
    exam.judge("nvidia.hw_slowdown", share, text, device.label)
    share = sum(bool(bit & SW_THERMAL) for bit in bits) / len(bits)
    text = f"{device.place} was slowed because of heat in {share:.0%} of {len(bits)} samples under load; have its cooling checked"
    exam.judge("nvidia.sw_thermal", share, text, device.label)


def _read_link(library: NvmlLibrary, device: NvidiaDevice) -> Dict[str, Answer]:
    return {
        what: library.ask(f"nvmlDeviceGet{what}", device.handle)
        for what in (
            "CurrPcieLinkWidth",
            "MaxPcieLinkWidth",
            "CurrPcieLinkGeneration",
            "MaxPcieLinkGeneration",
        )
    }


def _judge_link(exam: Examination, samples: List[GpuSample]) -> None:
    device = samples[-1].device
    for key, what, word in (
        ("nvidia.pcie_width", "PcieLinkWidth", "lanes"),
        ("nvidia.pcie_generation", "PcieLinkGeneration", "generation"),
    ):
        now = [one.values[f"Curr{what}"] for one in samples]
        most = [one.values[f"Max{what}"] for one in samples]
        best = max((one.value for one in now if one.ok), default=None)
        limit = max((one.value for one in most if one.ok), default=None)
        if best is None or limit is None:
            trouble = next(one for one in (*now, *most) if not one.ok)
            unread(exam, key, device, f"its PCIe {word}", trouble)
            continue
        if not limit:
            continue
        value = best / limit if key == "nvidia.pcie_width" else limit - best
        text = (
            f"the PCIe link of {device.place} had {word} {best} of {limit} under load; "
            "have the board seated anew, and its slot and riser checked"
        )
        exam.judge(key, value, text, device.label)


def _judge_throttle(exam: Examination, watched: WatchedDevices) -> Optional[str]:
    for device, why in watched.lost:
        unread(exam, "nvidia.lost", device, "anything", why)
    if watched.closed and not watched.samples:
        text = f"nothing was read under load: {watched.closed[0]}; ask the site to look at the driver"
        exam.unknown("nvidia.hw_slowdown", text)
    return _judge_each(exam, watched, _judge_clocks, "clocks were not reduced under load")


def _judge_each(
    exam: Examination,
    watched: WatchedDevices,
    judge: Callable[[Examination, List[GpuSample]], None],
    passed: str,
) -> Optional[str]:
    """Judge each device by its samples."""
    for samples in watched.by_device().values():
        judge(exam, samples)
    if not watched.samples and not exam.findings:
        exam.info("there was no load to watch")
    return passed if watched.samples else None


WATCHES = (
    LoadWatch.named("nvidia_throttle", start, functools.partial(observe, read=_read_clocks), _judge_throttle),
    LoadWatch.named(
        "nvidia_pcie",
        start,
        functools.partial(observe, read=_read_link),
        functools.partial(_judge_each, judge=_judge_link, passed="PCIe links were at their best under load"),
    ),
)
