"""NVML for the other checks: calls whose errors are answers, the devices, and what is special to a model.

Every call may raise: what a device does not have is *absent*, a device that is gone is *lost*, all else is trouble that
nobody can read. Calls go by name and constants by number, as nvidia-ml-py and driver may be years apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable

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
