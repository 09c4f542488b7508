"""The most that a device computes and moves, measured with more than its caches hold."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import re
import struct
import sys
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.cores import last_caches
from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace


def last_level(device: torch.device) -> int:
    """Return the bytes of the last caches that *device* has, 0 where nothing tells.

    On CPUs those of all cores that this process may use together; each of them may belong to other cores too.
    """
    if device.type == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)  # Linux
        return last_caches(affinity(0)) if affinity is not None else 0
    properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    # Not in torch 1.13, and of NVIDIA's and AMD's devices alone.
    return int(getattr(properties(device), "L2_cache_size", 0)) if properties is not None else 0


#: How far equal runs differ where cores, caches and memory controllers are shared.
TOLERANCE = 0.20

_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Largest difference to the product in float64 of the same (rounded) factors, over the square root of the edge: elements
#: are uniform in [-1, 1), so that a sum is of about a third of that root. Results are rounded to 8 or 11 bits, TF32 rounds
#: its factors to 11.
_WRONG = {"fp32": 1e-4, "tf32": 2.0**-8, "bf16": 2.0**-7, "fp16": 2.0**-7}

#: Of the triad: b, c, s, and what must come out.
_B, _C, _S, _A = 1.0, 2.0, 3.0, 7.0


class PeaksProbe:
    """This rank's matrices and vectors."""

    kernel_works = False

    def __init__(self, place: ProbePlace) -> None:
        self._place = place
        parameters, device = place.run.parameters, place.accelerator.device
        self._edge = int(parameters["matrix"])
        self._factors: Dict[str, Tuple[Tensor, Tensor, Tensor]] = {}
        for precision in parameters["precisions"]:
            prepare.require_precision(str(precision), place.accelerator)
            self._factors[str(precision)] = self._matrices(str(precision))
        elements = max(1, int(parameters["vector"]) // 4)
        self._a = torch.zeros(elements, device=device)
        self._b = torch.full((elements,), _B, device=device)
        self._c = torch.full((elements,), _C, device=device)
        self._jobs: Dict[str, Callable[[], object]] = {
            "copy": lambda: self._a.copy_(self._b),
            "triad": lambda: torch.add(self._b, self._c, alpha=_S, out=self._a),
        }
        self.operations = (*self._products(), *self._moves(elements * 4))

    def _matrices(self, precision: str) -> Tuple[Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(0)
        shape = (self._edge, self._edge)
        left, right = (
            (torch.rand(shape, generator=source) * 2 - 1).to(
                self._place.accelerator.device, _TYPES[precision]
            )
            for _ in range(2)
        )
        return left, right, torch.empty_like(left)

    def _products(self) -> List[TimedOperation]:
        flop = 2.0 * self._edge**3
        found = []
        for precision in self._factors:
            rate = Rate(f"gemm_flops_{precision}", "FLOP/s", flop, tolerance=TOLERANCE)
            found.append(TimedOperation(f"gemm_{precision}", (), (rate,)))
        return found

    @staticmethod
    def _moves(size: int) -> List[TimedOperation]:
        passes = (("copy", 2), ("triad", 3))
        return [
            TimedOperation(
                name, (), (Rate(f"{name}_bandwidth", "B/s", float(size * times), tolerance=TOLERANCE),)
            )
            for name, times in passes
        ]

    def verify(self) -> None:
        """Do each once and compare.

        Raises:
            WorkerFailure: ``wrong_result``, names what was computed, and the difference.
        """
        for precision in self._factors:
            prepare.choose_arithmetic(precision)  # else fp32 is what the last one chose, perhaps TF32
            self._multiply(precision)
            self._compare(precision)
        for name, wanted in (("triad", _A), ("copy", _B)):
            self._jobs[name]()
            least, most = float(self._a.min()), float(self._a.max())
            if (least, most) != (wanted, wanted):
                text = f"{name} of {len(self._a)} elements: {least:g} to {most:g} instead of {wanted:g} everywhere"
                raise WorkerFailure("wrong_result", text)

    def _multiply(self, precision: str) -> None:
        left, right, product = self._factors[precision]
        torch.mm(left, right, out=product)

    def _compare(self, precision: str) -> None:
        """Look at the first, middle and last rows and columns."""
        left, right, product = self._factors[precision]
        chosen = torch.tensor([0, self._edge // 2, self._edge - 1], device=left.device)
        rows, columns = left[chosen].double().cpu(), right[:, chosen].double().cpu()
        found = product[chosen][:, chosen].double().cpu()
        off = float((found - rows @ columns).abs().max()) / math.sqrt(self._edge)
        if not off <= _WRONG[precision]:
            text = (
                f"a product of matrices of edge {self._edge} in {precision} differs by {off:.2g} of the root of the edge from "
                f"that in float64; at most {_WRONG[precision]:.2g} is right: this device computes wrongly"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Do each once."""
        seconds: Dict[str, float] = {}
        for precision in self._factors:
            prepare.choose_arithmetic(precision)
            seconds[f"gemm_{precision}"] = self._place.timed(1, functools.partial(self._multiply, precision))
        for name, job in self._jobs.items():
            seconds[name] = self._place.timed(1, job)
        return seconds

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the sizes, which say whether a vector fits into a cache, and those of the caches if they are known."""
        found = {"matrix_edge": str(self._edge), "vector_bytes": str(len(self._a) * 4)}
        cache = last_level(self._place.accelerator.device)
        return {**found, "cache_bytes": str(cache)} if cache else found

    def close(self) -> None:
        """Leave the memory to the end of the process."""


def probe(place: ProbePlace) -> PeaksProbe:
    """Return this rank's part."""
    return PeaksProbe(place)


#: Where the kernel counts bytes that went to and from memory. Two counters are known, both of whole sockets, so that other
#: programs' traffic counts too: memory bandwidth monitoring of resctrl (Documentation/filesystems/resctrl.rst), whose
#: ``mbm_total_bytes`` of each L3 and group of tasks are added up, as a scheduler may have put this process into any; and CAS
#: commands of Intel's integrated memory controllers (``uncore_imc_*``, events ``cas_count_read`` and ``cas_count_write``), by
#: perf_event_open(2), where ``kernel.perf_event_paranoid`` lets this user count a whole processor. GPUs have such counters for
#: administrators alone (DCGM, profilers).
RESCTRL = Path("/sys/fs/resctrl")
EVENTS = Path("/sys/bus/event_source/devices")

#: A cache line, which one CAS command moves.
LINE = 64

#: perf_event_open(2) by machine, and the size of the first version of its attributes (perf_event.h, PERF_ATTR_SIZE_VER0).
_SYSCALL = {"x86_64": 298, "aarch64": 241}
_ATTR_SIZE = 64


class ByteCounter:
    """Something that counts bytes up. ``name`` says what; ``read`` returns None once it cannot be read any more."""

    def __init__(self, name: str, read: Callable[[], Optional[int]], close: Callable[[], None]) -> None:
        self.name, self.read, self.close = name, read, close


def find_counter(resctrl: Path = RESCTRL, events: Path = EVENTS) -> Tuple[Optional[ByteCounter], str]:
    """Return a counter that can be read, or None and why there is none."""
    found, why = _resctrl(resctrl)
    if found is not None:
        return found, ""
    other, also = _controllers(events)
    return other, "" if other is not None else f"{why}; {also}"


def _resctrl(root: Path) -> Tuple[Optional[ByteCounter], str]:
    of_group = "mon_data/mon_L3_*/mbm_total_bytes"
    files = sorted([*root.glob(of_group), *root.glob(f"*/{of_group}")])
    if not files:
        return None, f"no mbm_total_bytes below {root}"

    def read() -> Optional[int]:
        try:
            return sum(int(file.read_text()) for file in files)
        except (
            OSError,
            ValueError,
        ):  # "Unavailable" and "Error" are what the kernel writes instead of a number
            return None

    if read() is None:
        return None, f"{files[0]} cannot be read"
    return ByteCounter("resctrl mbm_total_bytes", read, lambda: None), ""


def _controllers(root: Path) -> Tuple[Optional[ByteCounter], str]:
    opened: List[int] = []
    try:
        for device in sorted(root.glob("uncore_imc*")):
            events = [device / "events" / name for name in ("cas_count_read", "cas_count_write")]
            if not any(event.exists() for event in events):
                continue  # since Ice Lake there are free-running counters besides, which count the same once more
            for event in events:
                config = _config(event.read_text())
                kind = int((device / "type").read_text())
                processors = _processors((device / "cpumask").read_text())
                opened.extend(perf_open(kind, config, processor) for processor in processors)
    except (OSError, ValueError) as error:
        _close(opened)
        return None, f"memory controllers cannot be counted: {error}"
    if not opened:
        return None, f"no uncore_imc with CAS counters below {root}"

    def read() -> Optional[int]:
        try:
            return LINE * sum(int.from_bytes(os.read(one, 8), sys.byteorder) for one in opened)
        except OSError:
            return None

    return ByteCounter("uncore_imc cas_count", read, lambda: _close(opened)), ""


def _close(opened: List[int]) -> None:
    for one in opened:
        with contextlib.suppress(OSError):
            os.close(one)
    opened.clear()


def _config(text: str) -> int:
    """Return ``event=0x04,umask=0x03`` as perf's number: the event in the low byte, the mask in the next."""
    words: Dict[str, int] = {}
    for part in text.strip().split(","):
        name, _, value = part.partition("=")
        words[name] = int(value or "1", 0)
    if set(words) - {"event", "umask"} or not words:
        raise ValueError(f"event {text.strip()!r} is not spelt by event and umask")
    return words.get("event", 0) | words.get("umask", 0) << 8


def _processors(text: str) -> List[int]:
    """Return ``0,24-25`` as numbers."""
    found: List[int] = []
    for part in text.strip().split(","):
        if not re.match(r"\d+(-\d+)?\Z", part):
            raise ValueError(f"{text.strip()!r} is no list of processors")
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def perf_open(kind: int, config: int, processor: int, pid: int = -1) -> int:
    """Return the descriptor of a running counter: perf_event_open(2), of all processes on *processor* or of process *pid*.

    Raises:
        OSError: the kernel refuses, or this machine's number of the call is not known.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"perf_event_open is not known on {platform.machine()}")
    attributes = struct.pack("<IIQ", kind, _ATTR_SIZE, config).ljust(_ATTR_SIZE, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(pid), ctypes.c_int(processor), ctypes.c_int(-1), ctypes.c_ulong(0))
    descriptor = int(libc.syscall(ctypes.c_long(number), ctypes.c_char_p(attributes), *arguments))
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"perf_event_open: {os.strerror(code)}")
    return descriptor
