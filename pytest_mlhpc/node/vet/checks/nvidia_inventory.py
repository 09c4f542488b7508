"""NVIDIA: whether all GPUs are there, under the described driver, in the modes that they should be in."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Dict, List

from pytest_mlhpc.node.vet.checks.nvidia_library import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_FUNCTION,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Answer,
    FindingNotes,
    NvidiaDevice,
    NvmlLibrary,
    NvmlUnavailable,
    opened,
    usable,
    wants_none,
)
from pytest_mlhpc.node.vet.checks.nvidia_memory import link_states
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable

#: There as soon as NVIDIA's kernel module is loaded (driver README, "procfs interface").
KERNEL_MODULE = "/proc/driver/nvidia/version"

#: PCI vendor of NVIDIA, and classes of display and 3D controllers (PCI code and ID assignment specification).
VENDOR, CLASSES = "0x10de", ("0x0300", "0x0302")

#: A device's properties that may be expected, with what a fact calls them.
EXPECTED = {
    "vbios": "nvidia vbios",
    "firmware": "nvidia vbios",
    "device_memory": "nvidia memory",
    "power_limit": "nvidia power limit",
    "nvlinks": "nvidia nvlinks",
}


class NvidiaInventory:
    """Counts and names devices, and reads what nodes should have in common."""

    name = "nvidia_inventory"
    level = "quick"
    cost_s = 3.0  #: without persistence mode each of eight devices starts anew
    reads = (
        "NVML: devices, names, UUIDs, driver, VBIOS, memory, power limit",
        KERNEL_MODULE,
        "/sys/bus/pci/devices",
    )
    purpose = ""

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Compare what there is with what the partition has."""
        notes = FindingNotes(self.name, context)
        if wants_none(context):
            return CheckOutcome()
        try:
            library = opened(machine)
            handles = list(library.devices())
        except NvmlUnavailable as closed:
            _explain(notes, machine, context, closed)
            return CheckOutcome(tuple(notes.findings))
        if not handles and context.wanted.accelerator == "auto" and not context.wanted.devices:
            return CheckOutcome()
        devices = [
            library.described(index, handle.value)
            for index, handle in handles
            if handle.ok or _refused(notes, index, handle)
        ]
        _count(notes, context, devices, len(handles))
        _identify(notes, context, devices)
        facts = _system_facts(notes, context, library)
        for device in devices:
            facts += _device_facts(notes, context, library, device)
        notes.passed(f"{len(devices)} devices, as they should be")
        return CheckOutcome(tuple(notes.findings), facts=tuple(facts))


def _explain(notes: FindingNotes, machine: Machine, context: Context, closed: NvmlUnavailable) -> None:
    """Say what it means that NVML cannot be asked."""
    wanted = context.wanted.accelerator == "cuda"
    loaded = _is_loaded(machine)
    cards = len(_cards(machine))
    if closed.nvml == LIB_RM_VERSION_MISMATCH:
        text = f"{closed}: NVML's library and the kernel module are of two versions; restart the node"
        notes.judge("driver", 1, text)
    elif closed.nvml == NO_FUNCTION or (closed.nvml == LIBRARY_NOT_FOUND and loaded):
        if wanted or loaded:
            advice = "nvidia-ml-py and libnvidia-ml.so.1 must be visible where the vetting runs, in a container too"
            notes.unknown("driver", f"{closed}, so that nothing is known of the GPUs: {advice}")
    elif closed.nvml in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        text = f"{closed}: there is no NVIDIA driver although the partition wants CUDA; install or load it"
        if not notes.judge("driver", int(wanted), text):
            text = (
                f"{closed}, but {cards} NVIDIA devices are on the PCI bus; load the driver if they are wanted"
            )
            notes.judge("driver_unasked", cards, text)
    elif wanted or loaded or cards:
        notes.unknown(
            "driver", f"{closed}, so that nothing is known of the GPUs; ask the site to look at the driver"
        )


def _is_loaded(machine: Machine) -> bool:
    try:
        return machine.exists(KERNEL_MODULE)
    except Unreadable:
        return True  # it is there, or nobody would close it


def _cards(machine: Machine) -> List[str]:
    """Return PCI addresses of NVIDIA's accelerators."""
    found = []
    for name in machine.names("/sys/bus/pci/devices/*/vendor"):
        folder = name.rpartition("/")[0]
        try:
            if machine.text(name).lower() == VENDOR and machine.text(f"{folder}/class").startswith(CLASSES):
                found.append(folder.rpartition("/")[2])
        except Unreadable:
            continue
    return found


def _refused(notes: FindingNotes, index: int, handle: Answer) -> bool:
    """Say why a device gives no handle; one that is closed to us is none of ours."""
    device = NvidiaDevice(index, None, "", "", "")
    if handle.code == NO_PERMISSION:
        notes.info(f"{device.label} is closed to us", device.label)
    else:
        notes.unread("lost", device, "anything", handle, essential=True)
    return False


def _count(notes: FindingNotes, context: Context, devices: List[NvidiaDevice], there: int) -> None:
    """Compare the number of devices. Those that NVML shows and that do not answer have their own findings."""
    wanted = context.wanted.devices
    if context.wanted.accelerator == "cuda" and not wanted and not there:
        wanted = 1
    if wanted is None:
        return
    text = f"{there} devices where the partition has {wanted}; leave the node out, and look for the missing in its kernel log"
    if not notes.judge("devices_missing", wanted - there, text) and len(devices) > wanted:
        notes.info(f"{len(devices)} devices, more than the {wanted} that are wanted")


def _identify(notes: FindingNotes, context: Context, devices: List[NvidiaDevice]) -> None:
    """Compare models and UUIDs."""
    wanted = context.wanted.device_model
    seen: Dict[str, NvidiaDevice] = {}
    for device in devices:
        if not device.name:
            answer = Answer(code=999, words="nvmlDeviceGetName failed")
            notes.unread("model", device, "its model", answer)
        elif wanted and context.wanted.accelerator == "cuda":
            text = f"{device.place} is a {device.name}, while the partition has {wanted}; correct either"
            notes.judge("model", int(not _is_model(wanted, device.name)), text, device.label)
        twin = seen.setdefault(device.uuid, device) if device.uuid else device
        text = f"{device.place} has the UUID of {twin.place}; ask the site to look at the driver"
        notes.judge("uuid", int(twin is not device), text, device.label)
    models = Counter(device.name for device in devices if device.name)
    if models and not wanted:
        text = f"devices are of several models ({', '.join(sorted(models))}), which cannot be compared; set nodes.device_model"
        notes.judge("mixed_models", len(models) - 1, text)


def _is_model(wanted: str, name: str) -> bool:
    """Return whether a device's name has the wanted words as whole ones: H200 is not in GH200."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9])", name, re.IGNORECASE) is not None


def _system_facts(notes: FindingNotes, context: Context, library: NvmlLibrary) -> List[Fact]:
    driver = library.ask("nvmlSystemGetDriverVersion")
    cuda = library.ask("nvmlSystemGetCudaDriverVersion")
    _compare(notes, context, "driver", driver, what="the driver")
    facts = []
    if driver.ok:
        facts.append(Fact(notes.check, "nvidia driver", driver.value))
    if cuda.ok:
        facts.append(Fact(notes.check, "nvidia cuda", f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"))
    return facts


def _device_facts(
    notes: FindingNotes, context: Context, library: NvmlLibrary, device: NvidiaDevice
) -> List[Fact]:
    """Return what should be equal on all devices of a model, compared with ``expect:`` on the way."""
    properties = _properties(library, device)
    for key, name in EXPECTED.items():
        _compare(notes, context, key, properties[name], what=f"{name} of {device.place}", device=device.label)
    return [
        Fact(notes.check, name, answer.value, scope=device.name, device=device.label)
        for name, answer in properties.items()
        if answer.ok and device.name
    ]


def _properties(library: NvmlLibrary, device: NvidiaDevice) -> Dict[str, Answer]:
    """Return a device's properties as texts, by a fact's name."""
    memory = library.ask("nvmlDeviceGetMemoryInfo", device.handle)
    power = library.ask("nvmlDeviceGetEnforcedPowerLimit", device.handle)
    links = link_states(library, device)
    none = Answer(code=NOT_SUPPORTED, words="it has none that can be read")
    return {
        "nvidia vbios": library.ask("nvmlDeviceGetVbiosVersion", device.handle),
        "nvidia memory": Answer(f"{memory.value.total >> 30}GiB") if memory.ok else memory,
        "nvidia power limit": Answer(f"{power.value // 1000}") if power.ok else power,
        "nvidia nvlinks": Answer(f"{links.up}") if links.up or links.down else none,
    }


def _compare(
    notes: FindingNotes, context: Context, key: str, found: Answer, *, what: str, device: str = ""
) -> None:
    """Compare a property with the partition's ``expect:``, if that has it."""
    expected = context.wanted.expect.get(key, "")
    if not expected:
        return
    if not found.ok:
        text = f"{what} cannot be read, while the partition expects {expected}: {found.words}"
        notes.unknown("expected", text, device)
    else:
        differs = not fnmatchcase(found.value.lower(), str(expected).lower())
        text = f"{what} is {found.value}, while the partition expects {expected}; correct either"
        notes.judge("expected", int(differs), text, device)


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

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Judge each device's modes, now and after the next reset."""
        library = usable(machine, context)
        if library is None:
            return CheckOutcome()
        notes = FindingNotes(self.name, context)
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
        return CheckOutcome(tuple(notes.findings))


def _judge_mode(notes: FindingNotes, device: NvidiaDevice, mode: Mode, answer: Answer, expected: str) -> None:
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


def _persistence(notes: FindingNotes, library: NvmlLibrary, device: NvidiaDevice) -> None:
    answer = library.ask("nvmlDeviceGetPersistenceMode", device.handle)
    if answer.ok:
        text = f"persistence mode of {device.place} is off; start nvidia-persistenced"
        notes.judge("persistence", int(not answer.value), text, device.label)


CHECKS = (
    NvidiaInventory(),
    Modes(),
)
