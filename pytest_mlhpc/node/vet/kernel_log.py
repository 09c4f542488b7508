"""The kernel's log: its messages with times from /dev/kmsg, dmesg or the journal, and which of them are events. Pure but for reading."""

from __future__ import annotations

import enum
import errno
import functools
import os
import re
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Callable, Deque, Dict, FrozenSet, Iterable, List, Mapping, Optional, Pattern, Set, Tuple

from pytest_mlhpc.node.vet.policy import tables

#: Most of a log that is looked at, its end, in bytes: kernels keep 16 MiB at most by their usual configurations.
MOST_BYTES = 8 << 20

#: Longest time that reading /dev/kmsg may take, in seconds.
LONGEST_S = 2.0

#: One record of /dev/kmsg is smaller than this (Linux, PRINTK_MESSAGE_MAX is 2048, LOG_LINE_MAX 1024 before).
_RECORD = 16 << 10

#: The kernel's own facility (RFC 5424, table 1).
_KERNEL = 0

_KMSG = re.compile(r"(\d{1,5}),\d+,(\d{1,18}),[^;]*;(.*)")
_DMESG = re.compile(r"(?:<(\d{1,5})>)?(?:\[ *(\d{1,12}\.\d+)\](?:\[[^\]]*\])? ?)?(.*)")
_JOURNAL = re.compile(r"(\d{1,12}\.\d+) \S+ kernel: (.*)")


@dataclass(frozen=True)
class KernelMessage:
    """One message; ``at`` in seconds since 1970, None where the log does not say."""

    text: str
    at: Optional[float] = None


@dataclass(frozen=True)
class KernelLog:
    """What was read, oldest first; ``source`` says where; ``up_s`` is how long the kernel runs, None where unknown."""

    source: str
    messages: Tuple[KernelMessage, ...]
    up_s: Optional[float] = None


def records(path: str) -> bytes:
    """Return what /dev/kmsg holds now, its end if that is much, without waiting for more.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found: Deque[bytes] = deque()
    size, end = 0, time.monotonic() + LONGEST_S
    try:
        while time.monotonic() < end:
            try:
                record = os.read(fd, _RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the next one is there
                    continue
                raise
            if not record:
                break
            found.append(record)
            size += len(record)
            while size > MOST_BYTES:
                size -= len(found.popleft())
    finally:
        os.close(fd)
    return b"".join(found)


def _lines(data: bytes) -> List[str]:
    lines = data[-MOST_BYTES:].decode("utf-8", "replace").split("\n")
    return lines[1:] if len(data) > MOST_BYTES else lines  # the first may be the end of one


def _dated(seconds: float, now: float, up_s: Optional[float]) -> Optional[float]:
    """Return when something happened that many seconds after boot; what is in the future happened now."""
    return None if up_s is None else min(now - up_s + seconds, now)


def from_kmsg(data: bytes, now: float, up_s: Optional[float]) -> Tuple[KernelMessage, ...]:
    """Return the messages of /dev/kmsg. Lines that are no records stay, without a time: a fault in one still counts."""
    found = []
    for line in _lines(data):
        match = _KMSG.match(line)
        if match is None:
            if line.strip() and not line.startswith(" "):  # " KEY=value" belongs to the record before it
                found.append(KernelMessage(line))
        elif int(match[1]) >> 3 == _KERNEL:
            found.append(KernelMessage(match[3], _dated(int(match[2]) / 1e6, now, up_s)))
    return tuple(found)


def from_dmesg(text: str, now: float, up_s: Optional[float]) -> Tuple[KernelMessage, ...]:
    """Return the messages of ``dmesg -r``."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _DMESG.match(line)
        if match is None or not match[3].strip() or (match[1] and int(match[1]) >> 3 != _KERNEL):
            continue
        found.append(KernelMessage(match[3], _dated(float(match[2]), now, up_s) if match[2] else None))
    return tuple(found)


def from_journal(text: str, now: float) -> Tuple[KernelMessage, ...]:
    """Return the messages of ``journalctl -k -o short-unix``; its remarks and other lines are left out."""
    found = []
    for line in _lines(text.encode("utf-8", "replace")):
        match = _JOURNAL.match(line)
        if match is not None:
            found.append(KernelMessage(match[2], min(float(match[1]), now)))
    return tuple(found)


@dataclass(frozen=True)
class KernelEvent:
    """One event; ``rule`` is the policy's key, empty for what is only worth a mention (``mention`` says as what).

    ``weight`` is how many it counts for. ``at`` as in :class:`KernelMessage`.
    """

    rule: str
    text: str
    at: Optional[float]
    device: str = ""
    weight: int = 1
    mention: str = ""


class Xid(enum.Enum):
    """What an Xid asks for."""

    NODE = "node"  #: reset, restart, repair, or a workflow of the vendor's: the node is not fit
    APPLICATION = "application"  #: the application failed, not the node
    IGNORE = "ignore"
    REPEATED = "repeated"  #: ignored once, suspicious when it comes again
    C2C = "c2c"  #: the link between processor and GPU of a Grace Hopper; to be ignored elsewhere
    RECOVERY = "recovery"  #: says which recovery the driver wants by now
    FOLLOWS = "follows"  #: only ever follows another


@dataclass(frozen=True)
class DriverEvents:
    """NVIDIA's codes (``policy.json``): what Xids ask for and are called, PCI devices of Grace Hopper, SXids by how bad they are."""

    xids: Mapping[int, Xid]
    names: Mapping[int, str]
    c2c_devices: FrozenSet[str]
    always_fatal: FrozenSet[int]
    fatal: FrozenSet[int]
    notable: FrozenSet[int]
    harmless: FrozenSet[int]


@functools.lru_cache(maxsize=1)
def driver_events() -> DriverEvents:
    """Return the tables of Xids and SXids."""
    xid, sxid = tables()["xid"], tables()["sxid"]
    meanings = {code: Xid(meaning) for meaning, codes in xid["codes"].items() for code in codes}
    names = {int(code): name for code, name in xid["names"].items()}
    kinds = (frozenset(sxid[kind]) for kind in ("always_fatal", "fatal", "notable", "harmless"))
    return DriverEvents(meanings, names, frozenset(xid["c2c_devices"]), *kinds)


#: A message with none of these words is no event: one search in each of many thousand lines.
_WORDS = re.compile(
    r"Xid|fallen off|[Mm]achine [Cc]heck|Hardware Error|memory error|Memory failure|EDAC|ut of memory: Kill"
    r"|I/O|medium error|EXT4-fs|XFS|BTRFS|PCIe Bus Error|uncorrectable|ERREVENT"
    r"|GPU reset|GPU Recovery|GPU init|reset failed|timeout|is down"
)

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{5,16})\): (\d{1,6})(.*)")
_SXID = re.compile(r"SXid \((?:PCI:)?([0-9A-Fa-f:.]{5,16})\): (\d{1,6}), *(.*)")
_ACTION = re.compile(r"to 0x[0-9a-fA-F]+ \(([^)]*)\)")
_MCE_STATUS = re.compile(r"Machine [Cc]heck(?: Exception)?: \d+ Bank \d+: (?:0x)?([0-9a-fA-F]{16})\b")
_AMD_STATUS = re.compile(r"MC\d+_STATUS\[[^\]]*\|(UE|UC|CE)\|")
_AMD_COUNT = re.compile(r"(\d+|no) (?:new )?uncorrectable hardware errors? detected")

#: MCi_STATUS.UC, bit 61 (Intel SDM volume 3B, 15.3.2.2; AMD has it in the same place).
_UNCORRECTED = 1 << 61

_PCI = r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.\d)?)"

#: Rule, what shows it, which group names the device (0: the node). Order matters: the first that fits counts.
_PLAIN: Tuple[Tuple[str, Pattern[str], int], ...] = tuple(
    (rule, re.compile(pattern.replace("{pci}", _PCI)), group)
    for rule, pattern, group in tables()["kernel_log"]
)


def pci_name(text: str) -> str:
    """Return a PCI address as sysfs writes it: lower case, domain of four digits, function."""
    text = text.lower()
    domain, _, rest = text.partition(":")
    if rest.count(":") == 0:  # bus:device only
        domain, rest = "0000", text
    if len(domain) > 4 and domain[:-4].strip("0") == "":
        domain = domain[-4:]
    return f"{domain}:{rest}" if "." in rest else f"{domain}:{rest}.0"


def events(messages: Iterable[KernelMessage], is_c2c: Callable[[str], bool]) -> List[KernelEvent]:
    """Return the events of a log, oldest first; *is_c2c* says whether the GPU at an address is a Grace Hopper's."""
    found: List[KernelEvent] = []
    recovery: Dict[str, KernelEvent] = {}
    announced: Set[Tuple[str, int]] = set()  # SXids whose first line has said how bad they are
    for message in messages:
        if not _WORDS.search(message.text):
            continue
        event = (
            _xid(message, is_c2c)
            or _sxid(message, announced)
            or _hardware(message)
            or _amd(message)
            or _plain(message)
        )
        if event is None:
            continue
        if event.rule == "xid.recovery":
            recovery[event.device] = event
        else:
            found.append(event)
    return found + list(recovery.values())  # the last of each GPU counts


def _event(
    rule: str, message: KernelMessage, device: str = "", weight: int = 1, mention: str = ""
) -> KernelEvent:
    return KernelEvent(rule, message.text.strip()[:200], message.at, device, weight, mention)


def _xid(message: KernelMessage, is_c2c: Callable[[str], bool]) -> Optional[KernelEvent]:
    match = _XID.search(message.text)
    if match is None:
        return None
    table, device, code = driver_events(), pci_name(match[1]), int(match[2])
    meaning = table.xids.get(code)
    if code in table.names:
        message = replace(message, text=f"{message.text.strip()[:120]} ({table.names[code]})")
    if meaning is Xid.RECOVERY:
        action = _ACTION.search(match[3])
        wanted = action is None or action[1].strip().lower() != "none"
        return _event("xid.recovery", message, device, int(wanted))
    if meaning is Xid.C2C and not is_c2c(device):
        meaning = Xid.IGNORE
    rules = {
        None: "xid.unlisted",
        Xid.NODE: "xid.node",
        Xid.REPEATED: "xid.repeated",
        Xid.C2C: "xid.c2c",
    }
    of_user = meaning is Xid.APPLICATION
    mention = f"Xid {code}, of an application" if of_user else f"Xid {code}, which asks for nothing"
    return _event(rules.get(meaning, ""), message, device, mention=mention)


def _sxid(message: KernelMessage, announced: Set[Tuple[str, int]]) -> Optional[KernelEvent]:
    match = _SXID.search(message.text)
    if match is None:
        return None
    table, device, code, rest = driver_events(), pci_name(match[1]), int(match[2]), match[3]
    worded = rest.startswith(("Fatal", "Non-fatal"))
    if not worded and (device, code) in announced:
        return None  # Data and Severity lines follow the one that says it all
    announced.add((device, code))
    if code in table.always_fatal or rest.startswith("Fatal") or (not worded and code in table.fatal):
        return _event("sxid.fatal", message, device)
    if code in table.notable or (not worded and code not in table.harmless):
        return _event("sxid.notable", message, device)
    return _event("", message, device, mention=f"SXid {code}, not fatal")


def _hardware(message: KernelMessage) -> Optional[KernelEvent]:
    """Return the event of a machine check, whose text differs by vendor."""
    text = message.text
    status = _MCE_STATUS.search(text)
    if status is not None:
        bad = bool(int(status[1], 16) & _UNCORRECTED)
        return _event("kernel_log.mce_uncorrected" if bad else "kernel_log.mce_corrected", message)
    amd = _AMD_STATUS.search(text)
    if amd is not None:
        return _event("kernel_log.mce_corrected" if amd[1] == "CE" else "kernel_log.mce_uncorrected", message)
    edac = re.search(r"EDAC \S*MC\S*: (\d{1,9}) (UE|CE) ", text)
    if edac is not None:
        rule = "kernel_log.mce_uncorrected" if edac[2] == "UE" else "kernel_log.mce_corrected"
        return _event(rule, message, weight=int(edac[1]))
    return None


def _amd(message: KernelMessage) -> Optional[KernelEvent]:
    """Return uncorrectable errors of an AMD GPU: the driver also writes that there are none."""
    count = _AMD_COUNT.search(message.text)
    if count is None:
        return None
    where = re.search(_PCI, message.text)
    device = pci_name(where[1]) if where else ""
    if count[1] == "no" or int(count[1]) == 0:
        return _event("", message, device, mention="an AMD GPU without uncorrectable errors")
    return _event("kernel_log.amd_uncorrected", message, device, weight=int(count[1]))


def _plain(message: KernelMessage) -> Optional[KernelEvent]:
    for rule, pattern, group in _PLAIN:
        match = pattern.search(message.text)
        if match is not None:
            device = match[group] if group else ""
            return _event(rule, message, pci_name(device) if ":" in device else device)
    if "ut of memory: Kill" in message.text:
        return _event("", message, mention="a process killed at its own memory limit")
    return None
