"""What of a node torch can use: all devices of one kind, or its cores; how their errors are reported."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, TypeVar, Union

import torch

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.load import node_facts
from pytest_mlhpc.node.vet.load.arguments import Begun, Failed
from pytest_mlhpc.node.worker.environment import cpu_model

T = TypeVar("T")

#: After so many seconds a device that is behind the others is named.
LATE_S = 3.0

KINDS = ("auto", "cpu", "cuda", "rocm", "xpu")


@dataclass(frozen=True)
class Device:
    """One accelerator. ``units`` are its multiprocessors, ``arch`` the compute capability or gfx name."""

    kind: str
    ordinal: int
    model: str
    arch: str = ""
    units: int = 0
    memory: int = 0
    pci: str = ""
    index: Optional[int] = None

    @property
    def name(self) -> str:
        """Return how findings name it: with the number that the driver's tools give it, where that is known."""
        return f"GPU {self.ordinal if self.index is None else self.index}"

    @property
    def torch(self) -> torch.device:
        """Return torch's name of it: it calls AMD's devices cuda as well."""
        return torch.device("xpu" if self.kind == "xpu" else "cuda", self.ordinal)

    @property
    def module(self) -> Any:
        """Return torch's module for this kind."""
        return getattr(torch, self.torch.type)

    def use(self) -> None:
        """Make it the current device of the calling thread."""
        self.module.set_device(self.ordinal)

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds that the device takes for what *work* queues."""
        if self.kind == "xpu":  # its events tell no time before torch 2.5
            self.module.synchronize(self.ordinal)
            began = time.perf_counter()
            work()
            self.module.synchronize(self.ordinal)
            return time.perf_counter() - began
        start, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class LoadNode:
    """This node. ``trouble`` says why accelerators that it has are not in ``devices``."""

    torch: str
    kind: str
    devices: Tuple[Device, ...]
    cores: Tuple[int, ...]
    processor: str
    trouble: str = ""

    @property
    def threads(self) -> int:
        """Return how many threads compute on its cores."""
        return len(self.cores)

    @property
    def cpu_model(self) -> str:
        """Return what is compared of its cores: fewer of them are another thing, and are compared with their like."""
        return f"{self.processor}, {self.threads} cores"

    @property
    def models(self) -> Tuple[str, ...]:
        """Return the model of each device; that of the processor where there is none."""
        return tuple(device.model for device in self.devices) or (self.cpu_model,)


def open_node(wanted: str, begun: Begun) -> LoadNode:
    """Return what torch finds here, with every device in use, so that no measurement waits for drivers and libraries to load.

    Raises:
        Failed: *wanted* is a kind of accelerator, and torch finds none.
    """
    found = dict.fromkeys(KINDS, ()) if wanted == "cpu" else _all_devices()
    kind = next((kind for kind in ("cuda", "rocm", "xpu") if found.get(kind)), "cpu")
    if wanted not in ("auto", "cpu") and kind != wanted:
        text = f"torch {torch.__version__} finds no {wanted} device here; check driver, allocation and environment"
        raise Failed("no_device", text)
    trouble = node_facts.unused_devices(str(torch.__version__)) if wanted == "auto" and kind == "cpu" else ""
    allowed = node_facts.allowed_cores()
    paid = node_facts.cores_of_quota()
    if paid is not None:
        allowed = allowed[:paid]
    torch.set_num_threads(len(allowed))
    model = cpu_model() or platform.machine()
    if found.get(kind):
        on_all(found[kind], _first_use, begun, "opening devices")  # who fails is named when it is to compute
    return LoadNode(str(torch.__version__), kind, tuple(found.get(kind, ())), allowed, model, trouble)


def _first_use(device: Device, _meet: Callable[[], None]) -> float:
    """Make a device's context and load its BLAS."""
    data = torch.ones((64, 64), device=device.torch)
    return float(torch.mm(data, data)[0, 0].item())


def _all_devices() -> Dict[str, Tuple[Device, ...]]:
    """Return the devices that torch finds, by kind."""
    found: Dict[str, Tuple[Device, ...]] = {}
    if torch.cuda.is_available():
        kind = "rocm" if torch.version.hip is not None else "cuda"
        shown = shown_indices(kind, os.environ)
        found[kind] = tuple(
            _cuda(kind, number, torch.cuda.get_device_properties(number), shown.get(number))
            for number in range(torch.cuda.device_count())
        )
    xpu: Any = getattr(torch, "xpu", None)  # not in torch 1.13
    if xpu is not None and hasattr(xpu, "get_device_properties") and xpu.is_available():
        count = range(xpu.device_count())
        found["xpu"] = tuple(_xpu(number, xpu.get_device_properties(number)) for number in count)
    return found


def shown_indices(kind: str, environ: Mapping[str, str]) -> Dict[int, int]:
    """Return the driver's number of each of torch's devices, where the user shows us some of them by number."""
    names = ("CUDA_VISIBLE_DEVICES",) if kind == "cuda" else ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    lists = [environ[name] for name in names if environ.get(name)]
    if len(lists) != 1 or not all(part.strip().isdigit() for part in lists[0].split(",")):
        return {}
    return {number: int(part) for number, part in enumerate(lists[0].split(","))}


def _cuda(kind: str, ordinal: int, properties: Any, index: Optional[int] = None) -> Device:
    arch = f"{properties.major}.{properties.minor}"
    if kind == "rocm":
        arch = str(getattr(properties, "gcnArchName", arch)).partition(":")[0]
    units, memory = int(properties.multi_processor_count), int(properties.total_memory)
    return Device(kind, ordinal, str(properties.name), arch, units, memory, pci_address(properties), index)


def _xpu(ordinal: int, properties: Any) -> Device:
    units = int(getattr(properties, "max_compute_units", 0))
    return Device("xpu", ordinal, str(properties.name), "", units, int(properties.total_memory))


def pci_address(properties: Any) -> str:
    """Return ``domain:bus:device.0`` as the kernel spells it, or nothing where torch does not tell (before 2.5)."""
    numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


#: Waits for the other devices, but not for one that has failed: its error says enough.
Meet = Callable[[], None]


def on_all(
    devices: Sequence[Device], work: Callable[[Device, Meet], T], begun: Begun, what: str
) -> List[Tuple[Device, Union[T, Exception]]]:
    """Call *work* for each device in a thread of its own, all at once; what one raises stands in its result's place.

    Where some devices wait for others, or have ended long before them, *begun* names those: should they hang, they are known.
    """
    met: Set[int] = set()
    ended: Set[int] = set()
    over = threading.Event()

    def one(number: int, barrier: threading.Barrier) -> Union[T, Exception]:
        def meet() -> None:
            met.add(number)
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait()

        try:
            devices[number].use()
            return work(devices[number], meet)
        except Exception as error:  # noqa: BLE001 - reported for this device, while the others go on
            barrier.abort()
            return error
        finally:
            ended.add(number)

    def watch() -> None:
        reported: Set[int] = set()
        while not over.wait(LATE_S):
            ahead = set(ended or met)
            late = set(range(len(devices))) - ahead
            if ahead and late and late != reported:
                reported = late
                begun(f"{what} on {', '.join(devices[number].name for number in sorted(late)[:8])}")

    threading.Thread(target=watch, daemon=True).start()
    try:
        return list(zip(devices, node_facts.at_once(len(devices), one)))
    finally:
        over.set()


#: What torch says, in any of its releases and back-ends, when memory is short.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


#: The time over which Linux counts what a control group has used of its quota of processor time (kernel, sched-bwc.rst:
#: cpu.cfs_period_us is 100 ms), in seconds.
PERIOD_S = 0.1

#: What torch and BLAS libraries say of what they were never made for: no fault of the device.
_LACKING = ("not supported", "not_supported", "not implemented", "not compiled", "no kernel image")


def is_no_memory(error: BaseException) -> bool:
    """Return whether memory was short: torch 1.13 on processors raises a plain RuntimeError for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY)


def failure(check: str, device: Device, error: Exception) -> Finding:
    """Return the finding on a device that could not do what was asked."""
    message = " ".join(str(error).split())[:300]
    if is_no_memory(error):
        text = (
            f"{check} needs more memory than {device.name} ({device.model}) has free: is a process of an earlier job "
            f"left on it? {message}"
        )
        return Finding(check, Severity.CRITICAL, text, device.name, "device_memory")
    if any(sign in message.lower() for sign in _LACKING):
        text = f"whether {device.name} ({device.model}) is well cannot be told by {check}: this torch cannot do it there: {message}"
        return Finding(check, Severity.UNKNOWN, text, device.name, "not_supported")
    text = f"{check} failed on {device.name} ({device.model}): {type(error).__name__}: {message}"
    return Finding(check, Severity.CRITICAL, text, device.name, "device_error")


def figures(
    exam: Examination, results: Sequence[Tuple[Device, Union[T, Exception]]]
) -> List[Tuple[Device, T]]:
    """Return figures by device; those that failed are findings."""
    exam.findings += [
        failure(exam.check, device, one) for device, one in results if isinstance(one, Exception)
    ]
    return [(device, one) for device, one in results if not isinstance(one, Exception)]


def note_unused(exam: Examination, node: LoadNode) -> None:
    """Say UNKNOWN where accelerators are here that torch cannot use: what was not looked at never passes."""
    if node.trouble:
        exam.add(Severity.UNKNOWN, node.trouble, rule="no_device")


#: Least time of a repetition in seconds, so that starting and stopping the clock is none of it.
REPETITION_S = 0.02

#: Repetitions: at least for a median, at most for a list.
LEAST, MOST = 3, 100_000


def times_of(timed: Callable[[], float], seconds: float) -> List[float]:
    """Return what *timed* returns, again and again for *seconds*."""
    times: List[float] = []
    end = time.monotonic() + seconds
    while len(times) < LEAST or (time.monotonic() < end and len(times) < MOST):
        times.append(timed())
    return times


def rate_of(
    amount: float,
    one: Callable[[], object],
    timed: Callable[[Callable[[], object]], float],
    seconds: float,
    meet: Callable[[], None] = lambda: None,
) -> float:
    """Return the rate of *one*, which does *amount*: after a warm-up, from a moment when all devices are ready."""
    timed(one)  # kernels are loaded and chosen
    inner = max(1, math.ceil(REPETITION_S / max(timed(one), 1e-6)))

    def repetition() -> None:
        for _ in range(inner):
            one()

    meet()
    timed(repetition)  # clocks rise
    return median_rate(amount * inner, times_of(lambda: timed(repetition), seconds))


def by_clock(work: Callable[[], object]) -> float:
    """Return the seconds that *work* takes on the host."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def times_together(
    node: LoadNode,
    count: int,
    prepare: Callable[[int], Callable[[], object]],
    seconds: float,
    cores: Sequence[int] = (),
) -> List[float]:
    """Return how long *count* threads take for what *prepare* returns for each: all begin and end at once, the slowest counts.

    The first says after each repetition whether there is another one.
    """
    times: List[float] = []
    going = [True]

    def work(number: int, barrier: threading.Barrier) -> None:
        torch.set_num_threads(1)  # of the calling thread
        one = prepare(number)
        barrier.wait()
        end = time.monotonic() + seconds
        while going[0]:
            began = time.perf_counter()
            one()
            barrier.wait()
            if number == 0:
                times.append(time.perf_counter() - began)
                going[0] = len(times) < LEAST or (time.monotonic() < end and len(times) < MOST)
            barrier.wait()

    try:
        node_facts.at_once(count, work, cores)
    finally:
        torch.set_num_threads(node.threads)
    return times


def median_rate(amount: float, seconds: Sequence[float]) -> float:
    """Return the median rate of a repetition of *amount*, where repetitions of one period count as one.

    Of a node that is stopped for 20 ms in every 100 most single repetitions are as fast as ever; no whole period is.
    """
    rates: List[float] = []
    count, total = 0, 0.0
    for one in seconds:
        count, total = count + 1, total + one
        if total >= PERIOD_S:
            rates.append(amount * count / total)
            count, total = 0, 0.0
    return statistics.median(rates) if rates else amount * count / max(total, 1e-9)
