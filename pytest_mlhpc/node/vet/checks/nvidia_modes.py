"""PAYLOAD. Do the devices run in the modes that they should: ECC on, not split by MIG, persistent?

``expect:`` may say ``ecc`` (on, off; any: also where it cannot be read, as on virtual GPUs) and ``mig`` (on, off, any); else ECC has to be on and MIG off.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_mlhpc.node.vet.checks.nvidia_library import Answer, Device, Library, Notes, usable
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.machine import Context, Machine


@dataclass(frozen=True)
class Mode:
    """A mode with a present and a pending state. ``essential``: all models that we know have it."""

    key: str
    word: str
    function: str
    essential: bool = False


ECC = Mode("ecc_off", "ECC", "nvmlDeviceGetEccMode", essential=True)
MIG = Mode("mig", "MIG", "nvmlDeviceGetMigMode")


class Modes:
    """Compares modes with what is expected."""

    name = "nvidia_modes"
    level = "quick"
    cost_s = 0.5
    reads = ("NVML: ECC mode, MIG mode, persistence mode",)
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Judge each device's modes, now and after the next reset."""
        library = usable(machine, context)
        if library is None:
            return Outcome()
        notes = Notes(self.name, context)
        devices = library.answering()
        ecc = str(context.wanted.expect.get("ecc", "on")).lower()
        sliced = machine.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        mig = str(context.wanted.expect.get("mig", "any" if sliced else "off")).lower()
        for device in devices:
            _judge_mode(notes, device, ECC, library.ask(ECC.function, device.handle), ecc)
            _judge_mode(notes, device, MIG, library.ask(MIG.function, device.handle), mig)
            _persistence(notes, library, device)
        if devices:
            notes.passed("the devices' modes are as they should be")
        return Outcome(tuple(notes.findings))


def _judge_mode(notes: Notes, device: Device, mode: Mode, answer: Answer, expected: str) -> None:
    """Judge a mode that is changed by a reset; a device that does not have it passes unless its model should."""
    if not answer.ok:
        essential = mode.essential and expected != "any" and device.model is not None
        notes.unread(mode.key, device, f"whether {mode.word} is on", answer, essential=essential)
        return
    now, later = ("on" if state else "off" for state in answer.value)
    text = (
        f"{mode.word} of {device.place} is {now}, not {expected}; change it with nvidia-smi and a reset, "
        f"or say expect: {{{mode.word.lower()}: '{now}'}} in the partition"
    )
    if not notes.judge(mode.key, int(expected not in ("any", now)), text, device.label):
        text = f"{mode.word} of {device.place} is {now}, and will be {later} after the next reset; undo that, or reset it"
        notes.judge("pending_mode", int(later != now), text, device.label)


def _persistence(notes: Notes, library: Library, device: Device) -> None:
    answer = library.ask("nvmlDeviceGetPersistenceMode", device.handle)
    if answer.ok:
        text = f"persistence mode of {device.place} is off; start nvidia-persistenced"
        notes.judge("persistence", int(not answer.value), text, device.label)


CHECKS = (Modes(),)
