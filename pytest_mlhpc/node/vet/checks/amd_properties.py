"""PAYLOAD. AMD: properties of devices, which nodes compare with each other, and with what a partition's ``expect:`` says."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Dict, Tuple

from pytest_mlhpc.node.vet.checks.amd_devices import Device, Sight
from pytest_mlhpc.node.vet.checks.amd_library import entry, number, text
from pytest_mlhpc.node.vet.machine import Machine, Unreadable

#: Modes and versions: key -> (function of the library, keys of its answer, file of sysfs).
TOLD: Dict[str, Tuple[str, Tuple[str, ...], str]] = {
    "compute_partition": ("gpu_compute_partition", (), "current_compute_partition"),
    "memory_partition": ("gpu_memory_partition", (), "current_memory_partition"),
    "firmware": ("gpu_vbios_info", ("version", "part_number"), "vbios_version"),
}

#: Other names in ``expect:``, and what nobody can look at here.
SAME = {"vbios": "firmware"}
NOT_OF_AMD = ("power_limit", "nvlinks", "ecc", "mig")

#: What ``expect:`` may say of each device.
EXPECTABLE = (*TOLD, *SAME, "device_memory")


def property_of(machine: Machine, seen: Sight, device: Device, key: str) -> str:
    """Return one of ``EXPECTABLE``; memory in whole GiB.

    Raises:
        Unreadable: nobody tells.
    """
    if key == "device_memory":
        return f"{(memory_mib(machine, seen, device) + 512) // 1024}"
    function, keys, file = TOLD[SAME.get(key, key)]
    answer = seen.maybe(function, device)
    told = text(entry(answer, *keys)) if keys else text(answer)
    if told:
        return told
    if not device.folder:
        raise Unreadable(f"{key.replace('_', ' ')} is told neither by amdsmi nor by sysfs")
    return machine.text(f"{device.folder}/{file}")


def told_property(machine: Machine, seen: Sight, device: Device, key: str) -> str:
    """Return the same, or "" if nobody tells."""
    try:
        return property_of(machine, seen, device, key)
    except Unreadable:
        return ""


def memory_mib(machine: Machine, seen: Sight, device: Device) -> int:
    """Return the size of a device's memory in MiB.

    Raises:
        Unreadable: nobody tells; an MI300A shares its processor's.
    """
    size = number(entry(seen.maybe("gpu_vram_info", device), "vram_size", "vram_size_mb"))
    if not size and device.folder:
        size = machine.number(f"{device.folder}/mem_info_vram_total") >> 20
    if not size:
        raise Unreadable("the size of its memory is told neither by amdsmi nor by sysfs")
    return size


def driver_version(machine: Machine, seen: Sight) -> str:
    """Return the version of amdgpu, or "" if nobody tells: a driver that came with its kernel has none of its own."""
    for device in seen.devices:
        told = text(entry(seen.maybe("gpu_driver_info", device), "driver_version"))
        if told:
            return told
    try:
        return machine.text("/sys/module/amdgpu/version")
    except Unreadable:
        return ""


def is_as_expected(is_now: str, expected: str) -> bool:
    """Return whether a value matches what is expected, which may have wildcards."""
    return fnmatchcase(is_now.lower(), str(expected).lower())
