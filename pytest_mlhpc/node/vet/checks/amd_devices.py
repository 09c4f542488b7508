"""AMD devices: found by amdsmi or sysfs, their properties, and the differences between amdsmi's releases."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable

#: amdsmi_status_t: NOT_SUPPORTED, NOT_YET_IMPLEMENTED; and UNEXPECTED_DATA, which the library's own tests let pass on devices that
#: are newer than it is.
NEVER_TOLD = (2, 3, 43)


class NotReported(Unreadable):
    """This device or this release of the library never tells that: asking again does not help."""


#: Watches run in threads of one process, of which the library knows nothing: its shutting down in one takes another's handles away.
#: It is one for the process, as this lock therefore has to be.
_TURN = threading.Lock()

#: Who has to wait longer for it, in seconds, waits for a call that hangs.
TURN_S = 6.0


class AmdLibrary:
    """``amdsmi``, initialised, for one thread at a time; to be closed.

    Raises:
        Unreadable: it is not installed, does not find its driver or devices, or another check does not let it go.
    """

    def __init__(self, machine: Machine) -> None:
        self._module = machine.module("amdsmi")
        self.release = str(getattr(self._module, "__version__", "of unknown release"))
        if not _TURN.acquire(timeout=TURN_S):
            raise Unreadable(f"amdsmi {self.release} hangs in another check")
        try:
            self._call("amdsmi_init")
        except Unreadable:
            _TURN.release()
            raise

    def close(self) -> None:
        """Let the library go; what it says to that does not matter any more."""
        with contextlib.suppress(Exception):  # nothing depends on it, and the library raises anything
            self._module.amdsmi_shut_down()
        _TURN.release()

    def handles(self) -> List[Any]:
        """Return a handle for each device.

        Raises:
            Unreadable: the library fails.
        """
        return list(self._call("amdsmi_get_processor_handles"))

    def ask(self, name: str, handle: Any) -> Any:
        """Return what ``amdsmi_get_<name>`` says of a device.

        Raises:
            Untold: this release or device does not tell that.
            Unreadable: the library fails.
        """
        return self._call(f"amdsmi_get_{name}", handle)

    def maybe(self, name: str, handle: Any) -> Any:
        """Return the same, or None for whatever reason."""
        try:
            return self.ask(name, handle)
        except Unreadable:
            return None

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._module, name, None)
        if function is None:
            raise NotReported(f"amdsmi {self.release} has no {name}")
        try:
            return function(*arguments)
        except Exception as error:  # its own exceptions, ctypes', OSError: all mean that there is no answer
            code = getattr(error, "err_code", None)
            kind = NotReported if code in NEVER_TOLD else Unreadable
            words = " ".join(str(error).split()) or type(error).__name__
            raise kind(f"{name} of amdsmi {self.release} fails: {words}") from error


def number(value: Any, bits: int = 64) -> Optional[int]:
    """Return an integer, or None where the library says that there is none: 'N/A', or all *bits* set."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    whole = int(value)
    return None if whole < 0 or whole >> 64 or whole in ((1 << bits) - 1, (1 << 64) - 1) else whole


def text(value: Any) -> str:
    """Return a text, or "" where the library says that there is none."""
    words = str(value).strip() if value is not None else ""
    return "" if words.upper() in ("N/A", "NONE") else words


def entry(answer: Any, *keys: str) -> Any:
    """Return what stands under the first of *keys* that there is: releases renamed some."""
    if isinstance(answer, Mapping):
        for key in keys:
            if key in answer:
                return answer[key]
    return None


VENDOR = 0x1002

#: PCI device ids of accelerators (PCI ID repository, pci.ids, vendor 1002).
MODELS: Dict[int, str] = {
    0x738C: "AMD Instinct MI100",
    0x738E: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X/MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}

#: Packages of two dies (GCDs), each of which is a device.
OF_TWO_DIES = ("MI250X", "MI250", "MI250X/MI250")

#: PCI class 0x0300 is a display, such as one on the board; accelerators have 0x0380 or 0x1200.
DISPLAY = 0x0300


@dataclass(frozen=True)
class AmdDevice:
    """One device as programs see it: its PCI address, model, folder in sysfs ("" if there is none), handle of ``amdsmi``."""

    name: str
    model: str
    folder: str = ""
    handle: Any = None


@dataclass(frozen=True)
class AmdSession:
    """What there is: devices, the library if it works, else why not. To be closed."""

    devices: Tuple[AmdDevice, ...] = ()
    library: Optional[AmdLibrary] = None
    without: str = ""

    def close(self) -> None:
        """Let the library go."""
        if self.library is not None:
            self.library.close()

    def ask(self, name: str, device: AmdDevice) -> Any:
        """Return what the library says of a device.

        Raises:
            Unreadable: there is no library, or it does not say.
        """
        if self.library is None or device.handle is None:
            raise Unreadable(self.without or "amdsmi does not know this device")
        return self.library.ask(name, device.handle)

    def maybe(self, name: str, device: AmdDevice) -> Any:
        """Return the same, or None."""
        try:
            return self.ask(name, device)
        except Unreadable:
            return None


def applies(context: Context) -> bool:
    """Return whether AMD devices are what this node is for, as far as anybody has said."""
    return context.wanted.accelerator in ("auto", "rocm")


def open_session(machine: Machine, accelerator: str) -> AmdSession:
    """Return all AMD accelerators; with ``auto`` no displays, as a node of another kind may have one on its board."""
    folders = _folders(machine)
    displays = accelerator == "rocm"
    library, devices, without = _opened(machine, folders)
    if not devices:
        devices = [AmdDevice(name, _model(machine, folder), folder) for name, folder in folders.items()]
    kept = tuple(device for device in devices if displays or not _is_display(machine, device))
    return AmdSession(kept, library, without)


def _opened(machine: Machine, folders: Dict[str, str]) -> Tuple[Optional[AmdLibrary], List[AmdDevice], str]:
    """Return the library and the devices that it has, or why there is none."""
    library: Optional[AmdLibrary] = None
    try:
        library = AmdLibrary(machine)
        handles = enumerate(library.handles())
        return (
            library,
            [_by_library(machine, library, handle, place, folders) for place, handle in handles],
            "",
        )
    except Exception as error:
        if library is not None:
            library.close()
        if not isinstance(error, Unreadable):
            raise
        return None, [], str(error)


def _folders(machine: Machine) -> Dict[str, str]:
    """Return PCI address -> folder of the DRM devices of AMD."""
    found: Dict[str, str] = {}
    for path in machine.names("/sys/class/drm/card*/device/vendor"):
        folder = path[: -len("/vendor")]
        if not re.match(r"/sys/class/drm/card\d+/device$", folder):
            continue
        try:
            if int(machine.text(path), 0) != VENDOR:
                continue
        except (Unreadable, ValueError):
            continue
        found[_address(machine, folder)] = folder
    return found


def _address(machine: Machine, folder: str) -> str:
    try:
        name = machine.key_values(f"{folder}/uevent", "=").get("PCI_SLOT_NAME", "")
    except Unreadable:
        name = ""
    return name.lower() or folder.split("/")[4]


def _by_library(
    machine: Machine, library: AmdLibrary, handle: Any, place: int, folders: Dict[str, str]
) -> AmdDevice:
    name = text(library.maybe("gpu_device_bdf", handle)).lower() or f"device {place}"
    folder = folders.get(name, "")
    if not folder and re.search(r"\.[1-7]$", name):  # a partition of a device: its package's files tell of it
        folder = folders.get(name[:-1] + "0", "")
    asic = library.maybe("gpu_asic_info", handle)
    return AmdDevice(
        name,
        _named(text(entry(asic, "market_name")), entry(asic, "device_id")) or _model(machine, folder),
        folder,
        handle,
    )


def _named(market: str, identifier: Any) -> str:
    """Return a model's name; libraries before a model was born give its number instead."""
    try:
        number = int(str(identifier), 0)
    except ValueError:
        number = 0
    if number in MODELS:
        return MODELS[number]
    return "" if market.lower().startswith("0x") else market


def _model(machine: Machine, folder: str) -> str:
    if not folder:
        return ""
    try:
        number = machine.number(f"{folder}/device")
    except Unreadable:
        return ""
    return MODELS.get(number, f"AMD device {number:#06x}")


def _is_display(machine: Machine, device: AmdDevice) -> bool:
    if device.model in MODELS.values():
        return False
    if not device.folder:
        return "Radeon" in device.model
    try:
        return machine.number(f"{device.folder}/class") >> 8 == DISPLAY
    except Unreadable:
        return False


def busy(machine: Machine, seen: AmdSession, device: AmdDevice) -> Optional[int]:
    """Return how much of the time a device computes, in per cent; None if nobody tells."""
    told = number(entry(seen.maybe("gpu_activity", device), "gfx_activity"), 16)
    if told is not None or not device.folder:
        return told
    try:
        return machine.number(f"{device.folder}/gpu_busy_percent")
    except Unreadable:
        return None


def judge(
    context: Context,
    check: str,
    key: str,
    value: float,
    reason: str,
    *,
    device: str = "",
    metric: str = "",
) -> List[Finding]:
    """Return a finding if *value* reaches a stage of the bound *key*, else none."""
    bound, value = context.policy[key], float(min(value, 1 << 64))
    if bound.reached(value, bound.fail):
        severity = Severity.CRITICAL
    elif bound.reached(value, bound.warn):
        severity = Severity.WARNING
    else:
        return []
    return [Finding(check, severity, reason, device, key, metric=metric, value=value, unit=bound.unit)]


def unknown(check: str, key: str, error: Unreadable, device: str) -> Finding:
    """Return that a device could not be judged by the bound *key*."""
    return Finding(check, Severity.UNKNOWN, f"{device}: {error}", device, key)


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


def property_of(machine: Machine, seen: AmdSession, device: AmdDevice, key: str) -> str:
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
        raise Unreadable(f"{key.replace('_', ' ')} is reported neither by amdsmi nor by sysfs")
    return machine.text(f"{device.folder}/{file}")


def property_or_empty(machine: Machine, seen: AmdSession, device: AmdDevice, key: str) -> str:
    """Return the same, or "" if nobody tells."""
    try:
        return property_of(machine, seen, device, key)
    except Unreadable:
        return ""


def memory_mib(machine: Machine, seen: AmdSession, device: AmdDevice) -> int:
    """Return the size of a device's memory in MiB.

    Raises:
        Unreadable: nobody tells; an MI300A shares its processor's.
    """
    size = number(entry(seen.maybe("gpu_vram_info", device), "vram_size", "vram_size_mb"))
    if not size and device.folder:
        size = machine.number(f"{device.folder}/mem_info_vram_total") >> 20
    if not size:
        raise Unreadable("the size of its memory is reported neither by amdsmi nor by sysfs")
    return size


def driver_version(machine: Machine, seen: AmdSession) -> str:
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
