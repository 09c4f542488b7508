"""AMD devices: found by amdsmi or sysfs, and whether all are there, as described, and pass the ROCm Validation Suite."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable, or_else

#: amdsmi_status_t: NOT_SUPPORTED, NOT_YET_IMPLEMENTED; and UNEXPECTED_DATA, which the library's own tests let pass on devices that
#: are newer than it is.
UNSUPPORTED = (2, 3, 43)


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
            kind = NotReported if code in UNSUPPORTED else Unreadable
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
PROPERTIES: Dict[str, Tuple[str, Tuple[str, ...], str]] = {
    "compute_partition": ("gpu_compute_partition", (), "current_compute_partition"),
    "memory_partition": ("gpu_memory_partition", (), "current_memory_partition"),
    "firmware": ("gpu_vbios_info", ("version", "part_number"), "vbios_version"),
}

#: Other names in ``expect:``, and what nobody can look at here.
SAME = {"vbios": "firmware"}
NOT_OF_AMD = ("power_limit", "nvlinks", "ecc", "mig")

#: What ``expect:`` may say of each device.
EXPECTABLE = (*PROPERTIES, *SAME, "device_memory")


def property_of(session: AmdSession, device: AmdDevice, key: str) -> str:
    """Return one of ``EXPECTABLE``, "" if nobody tells; memory in whole GiB."""
    if key == "device_memory":
        size = memory_mib(session, device)
        return f"{(size + 512) // 1024}" if size else ""
    function, keys, file = PROPERTIES[SAME.get(key, key)]
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


#: Modes in which one package shows as several devices (AMD Instinct documentation, compute partitioning).
PARTITIONED = ("CPX", "QPX", "TPX", "DPX")


def _judge(exam: Examination, session: AmdSession) -> Optional[str]:
    """Count devices, and name those that differ from the partition's description."""
    lost = _lost(session)
    if not session.devices and not lost and exam.wanted.accelerator == "auto":
        return None
    _judge_count(exam, session)
    for name in lost or [""]:
        text = (
            f"{name} is on the PCI bus, but no driver has taken it: its memory may have too many bad pages; see the "
            "kernel's log for amdgpu"
        )
        exam.judge("amd.not_initialised", int(bool(name)), text, name)
    for device in session.devices:
        _judge_device(exam, session, device)
    _judge_driver(exam, session)
    _report_facts(exam, session)
    if session.without:
        exam.info(f"sysfs is read instead of amdsmi: {session.without}")
    return f"found {_models(session)}" if session.devices else None


def _judge_count(exam: Examination, session: AmdSession) -> None:
    found = len(session.devices)
    if not session.library:
        found = max(found, _computing(session.machine))
    least = exam.wanted.devices
    if least is None:
        least = 1 if exam.wanted.accelerator == "rocm" else found
    if found != least and _counted_otherwise(session, found, least):
        return
    there = f"there are {found} AMD devices ({_models(session) or 'none'}) where {least} are described"
    text = (
        f"{there}: see the kernel's log for amdgpu, and check that the "
        f"job was given all devices{'; ' + session.without if not found and session.without else ''}"
    )
    exam.judge("amd.devices_missing", max(least - found, 0), text)
    text = f"{there}: correct the description, or the partition mode"
    exam.judge("amd.devices_extra", max(found - least, 0), text)


def _judge_device(exam: Examination, session: AmdSession, device: AmdDevice) -> None:
    name, model = device.name, exam.wanted.device_model
    text = f"{name} is {device.model or 'of unknown model'} where {model or 'any model'} is described"
    exam.judge("amd.model", int(_bare(model) not in _bare(device.model)), text, name)
    for key in EXPECTABLE:
        if key in exam.wanted.expect:
            label = key.replace("_", " ")
            is_now = property_of(session, device, key)
            text = f"{name} has {label} {is_now} where {exam.wanted.expect[key]} is expected: correct either"
            if is_now:
                _judge_expected(exam, key, is_now, text, name)
            else:
                text = f"{name}: {label} is reported neither by amdsmi nor by sysfs"
                exam.unknown("amd.expectation", text, name)
    computing = busy(session, device)
    if computing is not None:
        text = f"{name} computes ({computing} %) before anything of ours does: end what an earlier job left"
        exam.judge("amd.busy", computing, text, name)


def _judge_expected(exam: Examination, key: str, is_now: str, text: str, device: str = "") -> None:
    differs = not is_as_expected(is_now, str(exam.wanted.expect[key]))
    exam.judge("amd.expectation", int(differs), text, device)


def _judge_driver(exam: Examination, session: AmdSession) -> None:
    """Compare the driver, and name what is expected and no check reads."""
    expect = exam.wanted.expect
    if not session.devices:
        return
    if exam.wanted.accelerator == "rocm":
        for key in (key for key in NOT_OF_AMD if key in expect):
            exam.unknown(
                "amd.expectation", f"no check can read {key} of AMD devices, which the partition expects"
            )
    if not expect.get("driver", ""):
        return
    is_now = driver_version(session)
    if is_now:
        text = f"the driver amdgpu is {is_now} where {expect['driver']} is expected: correct either"
        _judge_expected(exam, "driver", is_now, text)
    else:
        text = "neither amdsmi nor /sys/module/amdgpu/version reports the driver's version"
        exam.unknown("amd.expectation", text)


def _bare(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.lower())


def _lost(session: AmdSession) -> List[str]:
    """Return PCI addresses of accelerators that no driver has; virtual functions are their host's."""
    machine, known = session.machine, {device.name for device in session.devices}
    lost = []
    for path in machine.names("/sys/bus/pci/devices/*/vendor"):
        folder = path[: -len("/vendor")]
        name = folder.rpartition("/")[2]
        try:
            is_ours = machine.number(path) == VENDOR and machine.number(f"{folder}/device") in MODELS
            if is_ours and name not in known and not machine.exists(f"{folder}/physfn"):
                lost += [] if machine.exists(f"{folder}/driver") else [name]
        except Unreadable:
            continue
    return lost


def _computing(machine: Machine) -> int:
    """Return how many devices the compute driver (KFD) has, partitions included; processors have the id 0."""
    files = machine.names("/sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return sum(or_else(machine.number, path, 0, Unreadable) != 0 for path in files)


def _counted_otherwise(session: AmdSession, found: int, least: int) -> bool:
    """Return whether both counts are right: packages of two dies, or of several partitions."""
    if not least or found < least or found % least:
        return False
    models = {device.model.rpartition(" ")[2] for device in session.devices}
    if models and models <= set(OF_TWO_DIES):
        return found == 2 * least
    modes = {property_of(session, device, "compute_partition") for device in session.devices}
    return bool(modes) and modes <= set(PARTITIONED)


def _report_facts(exam: Examination, session: AmdSession) -> None:
    """Say what all nodes should have in common: the driver, and by model memory, firmware and modes."""
    driver = driver_version(session) if session.devices else ""
    if driver:
        exam.fact("amd driver", driver)
    for device in session.devices:
        properties = {key.replace("_", " "): property_of(session, device, key) for key in PROPERTIES}
        size = memory_mib(session, device)
        properties["memory"] = f"{size} MiB" if size else ""
        for name, value in properties.items():
            if value:
                exam.fact(f"amd {name}", value, device.model, device.name)


def _models(session: AmdSession) -> str:
    counted = Counter(device.model or "unknown" for device in session.devices)
    return ", ".join(f"{count} x {model}" for model, count in sorted(counted.items()))


#: Levels are 1 to 5; 2 takes minutes (ROCm Validation Suite, README: ``rvs -r``).
LEVEL = "2"

#: The suite's place when it is not on the path.
PROGRAMS = ("rvs", "/opt/rocm/bin/rvs")

TIMEOUT_S = 300.0

#: How a line of ``[RESULT]`` says whether a test passed, or met its target.
RESULT = re.compile(r"\b(?:pass|met): *(TRUE|FALSE)\b")


def _judge_rvs(exam: Examination, session: AmdSession) -> Optional[str]:
    """Run the suite, and believe it only when it says what it has tested."""
    for program in PROGRAMS if session.devices else ():
        try:
            done = exam.machine.command([program, "-r", LEVEL], TIMEOUT_S)
        except Absent:
            continue
        results = [line.strip() for line in done.output.splitlines() if RESULT.search(line)]
        failed = [line for line in results if "FALSE" in RESULT.findall(line)]
        text = f"rvs: {len(failed)} of {len(results)} tests failed, first: {''.join(failed[:1])[:200]}"
        if not exam.judge("amd.rvs", len(failed), text) and (done.code or not results):
            last = (done.errors.strip() or done.output.strip() or "nothing").splitlines()[-1]
            text = f"rvs tested nothing (exit code {done.code}), its output: {last[:200]}"
            exam.unknown("amd.rvs", text)
        return f"rvs passed {len(results)} tests"
    if session.devices:
        exam.info("the ROCm Validation Suite (rvs) is not installed")
    return None


CHECKS = (
    Check.named("amd_inventory", with_session(_judge)),
    Check.named("amd_rvs", with_session(_judge_rvs)),
)
