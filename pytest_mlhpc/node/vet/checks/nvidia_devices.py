"""NVIDIA devices: NVML's answers, and whether all GPUs are there, as described, and in the right modes.

Every call may raise: what a device does not have is *absent*, a device that is gone is *lost*, all else is trouble that
nobody can read. Calls go by name and constants by number, as nvidia-ml-py and driver may be years apart.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, or_else

#: nvmlReturn_t (NVML API reference, Error codes); they never change.
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH = 9, 12, 18
#: What a call says of something that device, driver or nvidia-ml-py does not have: NOT_SUPPORTED, FUNCTION_NOT_FOUND,
#: VGPU_ECC_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH; and our own: no such function in the module.
NO_FUNCTION = -1
ABSENT = frozenset({NOT_SUPPORTED, 13, 22, 25, NO_FUNCTION})
#: What it says of a device that nobody can use: INSUFFICIENT_POWER, IRQ_ISSUE, GPU_IS_LOST, RESET_REQUIRED.
LOST = frozenset({8, 11, 15, 16})
#: Any other trouble, such as text that is no UTF-8.
DEFECT = -2


@dataclass(frozen=True)
class Answer:
    """What a call said: a value, or an error's code and message."""

    value: Any = None
    code: int = 0
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.code == 0

    @property
    def absent(self) -> bool:
        """Whether the device, the driver or the module does not have this."""
        return self.code in ABSENT

    @property
    def lost(self) -> bool:
        """Whether the device cannot be used any more."""
        return self.code in LOST


@dataclass(frozen=True)
class GpuModel:
    """What is special to a model. ``links``: NVLinks that each device has, 0: none that must be up.

    ``rows``: rows are remapped (Ampere and newer, Memory: Supported GPUs), else pages are retired. ``direct``: links go to
    neighbours, and some may lead nowhere. ``optional``: there are boards on which no link leads anywhere. ``fabric``: links
    go to switches that a fabric manager sets up. ``shared_memory``: the device's memory is a NUMA node of the host.
    """

    pattern: str
    links: int = 0
    rows: bool = True
    direct: bool = False
    optional: bool = False
    fabric: bool = False
    shared_memory: bool = False


#: Models that we know, the first that matches counts; NVLinks from NVIDIA's data sheets of the four architectures.
MODELS = (
    GpuModel(r"GH200", links=18, optional=True, shared_memory=True),
    GpuModel(r"V100-SXM", links=6, rows=False, direct=True),
    GpuModel(r"V100", rows=False),
    GpuModel(r"A100-SXM", links=12),
    GpuModel(r"A100"),
    GpuModel(r"H100 80GB HBM3|H100[- ]SXM", links=18, fabric=True),
    GpuModel(r"H100"),
    GpuModel(r"H200$", links=18, fabric=True),
    GpuModel(r"H200"),
)


@dataclass(frozen=True)
class NvidiaDevice:
    """One device that answers. ``model`` is None for one that we do not know."""

    index: int
    handle: Any
    name: str
    uuid: str
    bus: str

    @property
    def label(self) -> str:
        """Its name in findings."""
        return f"GPU {self.index}"

    @property
    def place(self) -> str:
        """How to find it: PCI address and UUID, as far as it says them."""
        known = [part for part in (self.bus, self.uuid) if part]
        return f"{self.label} ({', '.join(known)})" if known else self.label

    @property
    def model(self) -> Optional[GpuModel]:
        """What is special to its model."""
        return next((model for model in MODELS if re.search(model.pattern, self.name)), None)


class NvmlUnavailable(Unreadable):
    """NVML cannot be asked at all; ``nvml`` is the error's code."""

    def __init__(self, text: str, nvml: int = DEFECT) -> None:
        super().__init__(text)
        self.nvml = nvml


class NvmlLibrary:
    """NVML, ready to be asked."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def ask(self, name: str, *arguments: Any) -> Answer:
        """Return what a function says."""
        function = getattr(self.module, name, None)
        if function is None:
            return Answer(code=NO_FUNCTION, text=f"this nvidia-ml-py has no {name}")
        try:
            value = function(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever the vendor's module raises is an answer
            code = getattr(error, "value", DEFECT)
            return Answer(code=code if isinstance(code, int) and code else DEFECT, text=f"{name}: {error}")
        return Answer(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)

    def devices(self) -> Iterator[Tuple[int, Answer]]:
        """Yield every device's number with its handle or why there is none.

        Raises:
            Closed: their count cannot be read.
        """
        count = self.ask("nvmlDeviceGetCount")
        if not count.ok:
            raise NvmlUnavailable(f"NVML does not say how many devices there are: {count.text}", count.code)
        for index in range(count.value):
            yield index, self.ask("nvmlDeviceGetHandleByIndex", index)

    def described(self, index: int, handle: Any) -> NvidiaDevice:
        """Return a device with what it says of itself; empty where it does not."""
        name, uuid, info = (self.ask(f"nvmlDeviceGet{what}", handle) for what in ("Name", "UUID", "PciInfo"))
        bus = getattr(info.value, "busId", "") if info.ok else ""
        bus = bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus)
        return NvidiaDevice(index, handle, name.value if name.ok else "", uuid.value if uuid.ok else "", bus)

    def answering(self) -> List[NvidiaDevice]:
        """Return the devices that have a handle; ``nvidia_inventory`` speaks of the others."""
        return [self.described(index, handle.value) for index, handle in self.devices() if handle.ok]


def wants_none(context: Context) -> bool:
    """Return whether nobody wants NVIDIA GPUs here."""
    return context.wanted.accelerator not in ("auto", "cuda")


def opened(machine: Machine) -> NvmlLibrary:
    """Return NVML, initialised. It stays so until this process ends: without persistence mode each start takes seconds.

    Raises:
        Closed: it cannot be initialised.
    """
    try:
        library = NvmlLibrary(machine.module("pynvml"))
    except Unreadable as error:
        raise NvmlUnavailable(str(error), NO_FUNCTION) from error
    begun = library.ask("nvmlInit")
    if not begun.ok:
        raise NvmlUnavailable(f"NVML cannot be initialised: {begun.text}", begun.code)
    return library


def usable(machine: Machine, context: Context) -> Optional[NvmlLibrary]:
    """Return NVML where GPUs are wanted and it answers; else nothing, as ``nvidia_inventory`` says why."""
    if wants_none(context):
        return None
    try:
        return opened(machine)
    except NvmlUnavailable:
        return None


def with_devices(
    judge: Callable[[Examination, NvmlLibrary, List[NvidiaDevice]], Optional[str]],
) -> Callable[[Examination], Optional[str]]:
    """Return a check's judgement by one of the devices that answer: nothing where there are none."""

    def judged(exam: Examination) -> Optional[str]:
        library = usable(exam.machine, exam.context)
        devices = library.answering() if library is not None else []
        return judge(exam, library, devices) if library is not None and devices else None

    return judged


def unread(
    exam: Examination, key: str, device: NvidiaDevice, what: str, answer: Answer, *, essential: bool = False
) -> None:
    """Say what a failed call means: a lost device, nothing for what is absent (unless *essential*), else UNKNOWN."""
    if any(one.rule == "nvidia.lost" and one.device == device.label for one in exam.findings):
        return
    text = f"{device.place} cannot be used: {answer.text}; leave the node out, reset or replace the device"
    if exam.judge("nvidia.lost", int(answer.lost), text, device.label):
        return
    if not answer.absent or essential:
        text = f"{device.place} does not say {what}: {answer.text}; ask the site to look at the driver"
        exam.unknown(key, text, device.label)


#: Most NVLinks of a device that we know (Hopper; NVIDIA H100 data sheet), for models that we do not know.
MOST_LINKS = 18

#: Of a link that the device does not have, and of a field that an older driver does not know (NVML API reference).
INVALID_ARGUMENT = 2

#: States in which a link carries data or would at once: active, asleep (NVML API reference, NVML_NVLINK_STATE).
UP = (1, 2)


@dataclass(frozen=True)
class LinkStates:
    """How many NVLinks are up and down; ``trouble`` is the first that could not be read, or why there are none."""

    up: int = 0
    down: int = 0
    trouble: Optional[Answer] = None


def link_states(library: NvmlLibrary, device: NvidiaDevice) -> LinkStates:
    """Return the states of all NVLinks that the device has."""
    model = device.model
    up = down = 0
    trouble: Optional[Answer] = None
    none: Optional[Answer] = None
    for link in range((model and model.links) or MOST_LINKS):
        answer = library.ask("nvmlDeviceGetNvLinkState", device.handle, link)
        if answer.ok:
            up += answer.value in UP
            down += answer.value not in UP
        elif answer.absent or answer.code == INVALID_ARGUMENT:
            none = Answer(code=NOT_SUPPORTED, text=answer.text)
        else:
            trouble = trouble or answer
            if answer.lost:
                break
    return LinkStates(up, down, trouble or (None if up or down else none))


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
