"""NVIDIA: whether all GPUs are there, under the described driver, in the modes that they should be in."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Dict, List, Optional

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.nvidia_library import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_FUNCTION,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Answer,
    NvidiaDevice,
    NvmlLibrary,
    NvmlUnavailable,
    opened,
    unread,
    wants_none,
    with_devices,
)
from pytest_mlhpc.node.vet.checks.nvidia_memory import link_states
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, or_else

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


def _judge(exam: Examination) -> Optional[str]:
    """Compare what there is with what the partition has."""
    wanted = exam.wanted
    if wants_none(exam.context):
        return None
    try:
        library = opened(exam.machine)
        handles = list(library.devices())
    except NvmlUnavailable as closed:
        _explain(exam, closed)
        return None
    if not handles and wanted.accelerator == "auto" and not wanted.devices:
        return None
    devices = [
        library.described(index, handle.value)
        for index, handle in handles
        if handle.ok or _refused(exam, index, handle)
    ]
    _count(exam, devices, len(handles))
    _identify(exam, devices)
    _compare_system(exam, library)
    for device in devices:
        properties = _properties(library, device)
        for key, name in EXPECTED.items():
            _compare(exam, key, properties[name], f"{name} of {device.place}", device.label)
        for name, answer in properties.items():
            if answer.ok and device.name:
                exam.fact(name, answer.value, device.name, device.label)
    return f"{len(devices)} devices, as they should be"


def _explain(exam: Examination, closed: NvmlUnavailable) -> None:
    """Say what it means that NVML cannot be asked."""
    wanted = exam.wanted.accelerator == "cuda"
    # Where nobody may look, it is there, or nobody would close it.
    loaded = or_else(exam.machine.exists, KERNEL_MODULE, otherwise=True, but=Unreadable)
    cards = len(_cards(exam.machine))
    if closed.nvml == LIB_RM_VERSION_MISMATCH:
        text = f"{closed}: NVML's library and the kernel module are of two versions; restart the node"
        exam.judge("nvidia.driver", 1, text)
    elif closed.nvml == NO_FUNCTION or (closed.nvml == LIBRARY_NOT_FOUND and loaded):
        if wanted or loaded:
            advice = "nvidia-ml-py and libnvidia-ml.so.1 must be visible where the vetting runs, in a container too"
            exam.unknown("nvidia.driver", f"{closed}, so that nothing is known of the GPUs: {advice}")
    elif closed.nvml in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED):
        text = f"{closed}: there is no NVIDIA driver although the partition wants CUDA; install or load it"
        if not exam.judge("nvidia.driver", int(wanted), text):
            text = (
                f"{closed}, but {cards} NVIDIA devices are on the PCI bus; load the driver if they are wanted"
            )
            exam.judge("nvidia.driver_unasked", cards, text)
    elif wanted or loaded or cards:
        exam.unknown(
            "nvidia.driver",
            f"{closed}, so that nothing is known of the GPUs; ask the site to look at the driver",
        )


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


def _refused(exam: Examination, index: int, handle: Answer) -> bool:
    """Say why a device gives no handle; one that is closed to us is none of ours."""
    device = NvidiaDevice(index, None, "", "", "")
    if handle.code == NO_PERMISSION:
        exam.info(f"{device.label} is closed to us", device.label)
    else:
        unread(exam, "nvidia.lost", device, "anything", handle, essential=True)
    return False


def _count(exam: Examination, devices: List[NvidiaDevice], there: int) -> None:
    """Compare the number of devices. Those that NVML shows and that do not answer have their own findings."""
    wanted = exam.wanted.devices
    if exam.wanted.accelerator == "cuda" and not wanted and not there:
        wanted = 1
    if wanted is None:
        return
    text = f"{there} devices where the partition has {wanted}; leave the node out, and look for the missing in its kernel log"
    if not exam.judge("nvidia.devices_missing", wanted - there, text) and len(devices) > wanted:
        exam.info(f"{len(devices)} devices, more than the {wanted} that are wanted")


def _identify(exam: Examination, devices: List[NvidiaDevice]) -> None:
    """Compare models and UUIDs."""
    wanted = exam.wanted.device_model
    by_uuid: Dict[str, NvidiaDevice] = {}
    for device in devices:
        if not device.name:
            answer = Answer(code=999, text="nvmlDeviceGetName failed")
            unread(exam, "nvidia.model", device, "its model", answer)
        elif wanted and exam.wanted.accelerator == "cuda":
            text = f"{device.place} is a {device.name}, while the partition has {wanted}; correct either"
            exam.judge("nvidia.model", int(not _is_model(wanted, device.name)), text, device.label)
        twin = by_uuid.setdefault(device.uuid, device) if device.uuid else device
        text = f"{device.place} has the UUID of {twin.place}; ask the site to look at the driver"
        exam.judge("nvidia.uuid", int(twin is not device), text, device.label)
    models = Counter(device.name for device in devices if device.name)
    if models and not wanted:
        text = f"devices are of several models ({', '.join(sorted(models))}), which cannot be compared; set nodes.device_model"
        exam.judge("nvidia.mixed_models", len(models) - 1, text)


def _is_model(wanted: str, name: str) -> bool:
    """Return whether a device's name has the wanted words as whole ones: H200 is not in GH200."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9])", name, re.IGNORECASE) is not None


def _compare_system(exam: Examination, library: NvmlLibrary) -> None:
    driver = library.ask("nvmlSystemGetDriverVersion")
    cuda = library.ask("nvmlSystemGetCudaDriverVersion")
    _compare(exam, "driver", driver, "the driver")
    if driver.ok:
        exam.fact("nvidia driver", driver.value)
    if cuda.ok:
        exam.fact("nvidia cuda", f"{cuda.value // 1000}.{cuda.value % 1000 // 10}")


def _properties(library: NvmlLibrary, device: NvidiaDevice) -> Dict[str, Answer]:
    """Return a device's properties as texts, by a fact's name."""
    memory = library.ask("nvmlDeviceGetMemoryInfo", device.handle)
    power = library.ask("nvmlDeviceGetEnforcedPowerLimit", device.handle)
    links = link_states(library, device)
    none = Answer(code=NOT_SUPPORTED, text="it has none that can be read")
    return {
        "nvidia vbios": library.ask("nvmlDeviceGetVbiosVersion", device.handle),
        "nvidia memory": Answer(f"{memory.value.total >> 30}GiB") if memory.ok else memory,
        "nvidia power limit": Answer(f"{power.value // 1000}") if power.ok else power,
        "nvidia nvlinks": Answer(f"{links.up}") if links.up or links.down else none,
    }


def _compare(exam: Examination, key: str, found: Answer, what: str, device: str = "") -> None:
    """Compare a property with the partition's ``expect:``, if that has it."""
    expected = exam.wanted.expect.get(key, "")
    if not expected:
        return
    if not found.ok:
        text = f"{what} cannot be read, while the partition expects {expected}: {found.text}"
        exam.unknown("nvidia.expected", text, device)
    else:
        differs = not fnmatchcase(found.value.lower(), str(expected).lower())
        text = f"{what} is {found.value}, while the partition expects {expected}; correct either"
        exam.judge("nvidia.expected", int(differs), text, device)


@dataclass(frozen=True)
class Mode:
    """A mode with a present and a pending state. ``essential``: all models that we know have it."""

    key: str
    word: str
    function: str
    essential: bool = False


ECC = Mode("nvidia.ecc_off", "ECC", "nvmlDeviceGetEccMode", essential=True)
MIG = Mode("nvidia.mig", "MIG", "nvmlDeviceGetMigMode")


def _judge_modes(exam: Examination, library: NvmlLibrary, devices: List[NvidiaDevice]) -> str:
    """Judge each device's modes, now and after the next reset."""
    ecc = str(exam.wanted.expect.get("ecc", "on")).lower()
    sliced = exam.machine.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    mig = str(exam.wanted.expect.get("mig", "any" if sliced else "off")).lower()
    for device in devices:
        _judge_mode(exam, device, ECC, library.ask(ECC.function, device.handle), ecc)
        _judge_mode(exam, device, MIG, library.ask(MIG.function, device.handle), mig)
        persistence = library.ask("nvmlDeviceGetPersistenceMode", device.handle)
        if persistence.ok:
            text = f"persistence mode of {device.place} is off; start nvidia-persistenced"
            exam.judge("nvidia.persistence", int(not persistence.value), text, device.label)
    return "the devices' modes are as they should be"


def _judge_mode(exam: Examination, device: NvidiaDevice, mode: Mode, answer: Answer, expected: str) -> None:
    """Judge a mode that is changed by a reset; a device that does not have it passes unless its model should."""
    if not answer.ok:
        essential = mode.essential and expected != "any" and device.model is not None
        unread(exam, mode.key, device, f"whether {mode.word} is on", answer, essential=essential)
        return
    now, later = ("on" if state else "off" for state in answer.value)
    text = (
        f"{mode.word} of {device.place} is {now}, not {expected}; change it with nvidia-smi and a reset, "
        f"or say expect: {{{mode.word.lower()}: '{now}'}} in the partition"
    )
    if not exam.judge(mode.key, int(expected not in ("any", now)), text, device.label):
        text = f"{mode.word} of {device.place} is {now}, and will be {later} after the next reset; undo that, or reset it"
        exam.judge("nvidia.pending_mode", int(later != now), text, device.label)


CHECKS = (
    Check.named("nvidia_inventory", _judge),
    Check.named("nvidia_modes", with_devices(_judge_modes)),
)
