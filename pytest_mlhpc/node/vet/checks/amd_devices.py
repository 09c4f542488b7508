"""AMD devices: found by amdsmi or sysfs, their properties, and the differences between amdsmi's releases."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, or_else

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
            flat = " ".join(str(error).split()) or type(error).__name__
            raise kind(f"{name} of amdsmi {self.release} fails: {flat}") from error


def number(value: Any, bits: int = 64) -> Optional[int]:
    """Return an integer, or None where the library says that there is none: 'N/A', or all *bits* set."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    whole = int(value)
    return None if whole < 0 or whole >> 64 or whole in ((1 << bits) - 1, (1 << 64) - 1) else whole


def text(value: Any) -> str:
    """Return a text, or "" where the library says that there is none."""
    flat = str(value).strip() if value is not None else ""
    return "" if flat.upper() in ("N/A", "NONE") else flat


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

    machine: Machine
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
        return or_else(lambda _: self.ask(name, device), name, None, Unreadable)

    def number(self, device: AmdDevice, file: str) -> Optional[int]:
        """Return the number in a file of the device's folder; None where there is none that can be read."""
        path = f"{device.folder}/{file}"
        return or_else(self.machine.number, path, None, Unreadable) if device.folder else None

    def text(self, device: AmdDevice, file: str) -> str:
        """Return the text of such a file; empty where there is none that can be read."""
        path = f"{device.folder}/{file}"
        return or_else(self.machine.text, path, "", Unreadable) if device.folder else ""


def applies(context: Context) -> bool:
    """Return whether AMD devices are what this node is for, as far as anybody has said."""
    return context.wanted.accelerator in ("auto", "rocm")


def with_session(
    judge: Callable[[Examination, AmdSession], Optional[str]],
) -> Callable[[Examination], Optional[str]]:
    """Return a check's judgement by one of the node's AMD devices: nothing where nobody wants such devices."""

    def judged(exam: Examination) -> Optional[str]:
        if not applies(exam.context):
            return None
        with contextlib.closing(open_session(exam.machine, exam.wanted.accelerator)) as session:
            return judge(exam, session)

    return judged


def open_session(machine: Machine, accelerator: str) -> AmdSession:
    """Return all AMD accelerators; with ``auto`` no displays, as a node of another kind may have one on its board."""
    folders = _folders(machine)
    displays = accelerator == "rocm"
    library, devices, without = _opened(machine, folders)
    if not devices:
        devices = [AmdDevice(name, _model(machine, folder), folder) for name, folder in folders.items()]
    found = AmdSession(machine, (), library, without)
    chosen = tuple(device for device in devices if displays or not _is_display(found, device))
    return AmdSession(machine, chosen, library, without)


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
    none: Dict[str, str] = {}
    values = or_else(lambda path: machine.key_values(path, "="), f"{folder}/uevent", none, Unreadable)
    return values.get("PCI_SLOT_NAME", "").lower() or folder.split("/")[4]


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
    number = or_else(machine.number, f"{folder}/device", None, Unreadable) if folder else None
    return "" if number is None else MODELS.get(number, f"AMD device {number:#06x}")


def _is_display(session: AmdSession, device: AmdDevice) -> bool:
    if device.model in MODELS.values():
        return False
    if not device.folder:
        return "Radeon" in device.model
    return (session.number(device, "class") or 0) >> 8 == DISPLAY


def busy(session: AmdSession, device: AmdDevice) -> Optional[int]:
    """Return how much of the time a device computes, in per cent; None if nobody tells."""
    answer = number(entry(session.maybe("gpu_activity", device), "gfx_activity"), 16)
    return answer if answer is not None else session.number(device, "gpu_busy_percent")


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


def property_of(session: AmdSession, device: AmdDevice, key: str) -> str:
    """Return one of ``EXPECTABLE``, "" if nobody tells; memory in whole GiB."""
    if key == "device_memory":
        size = memory_mib(session, device)
        return f"{(size + 512) // 1024}" if size else ""
    function, keys, file = TOLD[SAME.get(key, key)]
    answer = session.maybe(function, device)
    return text(entry(answer, *keys) if keys else answer) or session.text(device, file)


def memory_mib(session: AmdSession, device: AmdDevice) -> int:
    """Return the size of a device's memory in MiB, 0 if nobody tells; an MI300A shares its processor's."""
    size = number(entry(session.maybe("gpu_vram_info", device), "vram_size", "vram_size_mb"))
    return size or (session.number(device, "mem_info_vram_total") or 0) >> 20


def driver_version(session: AmdSession) -> str:
    """Return the version of amdgpu, or "" if nobody tells: a driver that came with its kernel has none of its own."""
    for device in session.devices:
        answer = text(entry(session.maybe("gpu_driver_info", device), "driver_version"))
        if answer:
            return answer
    return or_else(session.machine.text, "/sys/module/amdgpu/version", "", Unreadable)


def is_as_expected(is_now: str, expected: str) -> bool:
    """Return whether a value matches what is expected, which may have wildcards."""
    return fnmatchcase(is_now.lower(), str(expected).lower())
