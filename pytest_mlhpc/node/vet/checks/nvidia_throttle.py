"""PAYLOAD. Are clocks held back while NVIDIA GPUs compute? *Sustained* is a share of samples (policy ``nvidia.hw_slowdown``).

At the power limit (0x4) a device is as fast as it may be; clocks that somebody has set (0x2, 0x10, 0x100) are told by peers.
"""

from __future__ import annotations

from typing import Dict, List

from pytest_mlhpc.node.vet.checks import nvidia_load
from pytest_mlhpc.node.vet.checks.nvidia_library import Answer, Device, Library, Notes
from pytest_mlhpc.node.vet.checks.nvidia_load import Sample, seen_of
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Context, Machine

#: nvmlClocksEventReason (NVML API reference); those that are not here are normal, or set by somebody.
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
HARDWARE = HW_SLOWDOWN | HW_THERMAL | POWER_BRAKE
WORDS = {HW_SLOWDOWN: "slowdown by hardware", HW_THERMAL: "heat", POWER_BRAKE: "external power brake"}

#: NVML_TEMPERATURE_GPU.
TEMPERATURE = 0

#: Fewest samples under load from which a share means anything (ours: one and a half seconds).
FEWEST = 3


class Throttle:
    """Samples why clocks are held back."""

    name = "nvidia_throttle"
    level = "quick"
    cost_s = 0.5
    reads = ("NVML: clock event reasons, utilization, temperature, under load",)
    purpose = ""

    def begin(self, machine: Machine, context: Context) -> object:
        """Return the state before the load."""
        return nvidia_load.begin(machine, context)

    def sample(self, machine: Machine, state: object) -> object:
        """Return the state with what is seen now."""
        return nvidia_load.sample(machine, seen_of(state), _look_at_clocks)

    def end(self, machine: Machine, context: Context, state: object) -> Outcome:  # noqa: ARG002 - of the protocol
        """Judge the shares of samples with each reason."""
        seen, notes = seen_of(state), Notes(self.name, context)
        if seen is None:
            return Outcome()
        for device, why in seen.lost:
            notes.unread("lost", device, "anything", why)
        if seen.closed and not seen.samples:
            notes.unknown(
                "hw_slowdown",
                f"nothing was seen under load: {seen.closed[0]}; ask the site to look at the driver",
            )
        for samples in seen.by_device().values():
            _judge_clocks(notes, samples)
        if seen.samples:
            notes.passed("clocks were not held back under load")
        elif not notes.findings:
            notes.info("there was no load to watch")
        return Outcome(tuple(notes.findings))


def _look_at_clocks(library: Library, device: Device) -> Dict[str, Answer]:
    return {"temperature": library.ask("nvmlDeviceGetTemperature", device.handle, TEMPERATURE)}


def _judge_clocks(notes: Notes, samples: List[Sample]) -> None:
    device = samples[-1].device
    _tell_temperature(notes, device, samples)
    answers = [one.values["reasons"] for one in samples]
    bits = [answer.value for answer in answers if answer.ok]
    if not bits:
        essential = device.model is not None
        notes.unread("hw_slowdown", device, "what holds its clocks back", answers[0], essential=essential)
        return
    if len(bits) < FEWEST:
        notes.info(
            f"{device.place} was seen under load {len(bits)} times only, which tells nothing", device.label
        )
        return
    share = sum(bool(bit & HARDWARE) for bit in bits) / len(bits)
    causes = [word for mask, word in WORDS.items() if any(bit & mask for bit in bits)]
    text = (
        f"{device.place} was slowed to half its clock or less in {share:.0%} of {len(bits)} samples under load "
        f"({', '.join(causes)}); have its cooling and power supply looked at"
    )
    notes.judge("hw_slowdown", share, text, device.label)
    share = sum(bool(bit & SW_THERMAL) for bit in bits) / len(bits)
    text = f"{device.place} was slowed because of heat in {share:.0%} of {len(bits)} samples under load; have its cooling looked at"
    notes.judge("sw_thermal", share, text, device.label)


def _tell_temperature(notes: Notes, device: Device, samples: List[Sample]) -> None:
    """Tell the highest temperature. It is no reading: rooms and places in a rack differ, and slowdowns say when it matters."""
    seen = [one.values["temperature"].value for one in samples if one.values["temperature"].ok]
    if seen:
        text = f"{device.place} reached {max(seen)} degrees Celsius under load"
        notes.info(text, device.label, float(max(seen)), "degree_celsius")


WATCHES = (Throttle(),)
