"""Standard library only. Bytes that went to and from memory, as the processor counts them, where it may be read.

Two counters are known, both of whole sockets, so that other programs' traffic counts too:

- memory bandwidth monitoring of Linux's resctrl (Documentation/filesystems/resctrl.rst): ``mbm_total_bytes`` of each L3,
  where ``/sys/fs/resctrl`` is mounted and may be read. Each group of tasks has its own, without those of other groups, and a
  scheduler may have put this process into any, so all are added up;
- CAS commands of Intel's integrated memory controllers (``uncore_imc_*``, events ``cas_count_read`` and
  ``cas_count_write``), by perf_event_open(2), where ``kernel.perf_event_paranoid`` lets this user count a whole processor.

GPUs have such counters for administrators alone (DCGM, profilers); there is none here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

from pytest_mlhpc.node.agents.hostlist import number_list

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


def find(resctrl: Path = RESCTRL, events: Path = EVENTS) -> Tuple[Optional[ByteCounter], str]:
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
                processors = number_list((device / "cpumask").read_text().strip())
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
    values: Dict[str, int] = {}
    for part in text.strip().split(","):
        name, _, value = part.partition("=")
        values[name] = int(value or "1", 0)
    if set(values) - {"event", "umask"} or not values:
        raise ValueError(f"event {text.strip()!r} is not spelt by event and umask")
    return values.get("event", 0) | values.get("umask", 0) << 8


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
