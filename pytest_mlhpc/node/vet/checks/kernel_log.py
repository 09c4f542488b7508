"""What the kernel has logged: machine checks, memory, disks, PCIe, NVIDIA's Xid and SXid, AMD's RAS.

*Not there and not readable are the same here*: every node has a kernel that logs, in a container as well, so a log that nobody
shows us is UNKNOWN (rule ``kernel_log.closed``; a site where users may never read it sets no stage for that).

Only events of this boot within the window (24 hours) are judged; older ones are mentioned. An event without a time counts if
the node is up for less than the window; else nobody can tell, and what would be CRITICAL is UNKNOWN.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import (
    Callable,
    DefaultDict,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    Optional,
    Pattern,
    Set,
    Tuple,
)

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.node.vet.machine import KernelLog, KernelMessage, Machine, Unreadable, or_else
from pytest_mlhpc.node.vet.policy import Bound, tables


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


#: What to do, by rule; what is not here: have the node examined.
_ADVICE = {
    "xid.node": "reset the GPU or restart the node",
    "xid.recovery": "do what the driver asks for",
    "xid.repeated": "watch the GPU's memory",
    "xid.unlisted": "look the code up in NVIDIA's Xid catalogue",
    "kernel_log.off_bus": "restart the node",
    "kernel_log.oom": "look for processes that are left behind",
    "kernel_log.file_system": "repair the file system",
    "kernel_log.amd_failed": "restart the node",
}


def _judge(exam: Examination) -> Optional[str]:
    """Read the log, and judge what is in it."""
    machine, policy = exam.machine, exam.context.policy
    try:
        log = machine.kernel_log()
    except Unreadable as error:
        exam.findings.append(_closed(policy["kernel_log.closed"], error))
        return None
    exam.judge("kernel_log.closed", 0, f"the log can be read by {log.source}")
    now = machine.clock()
    groups: DefaultDict[Tuple[str, str], List[KernelEvent]] = defaultdict(list)
    mentioned: DefaultDict[str, int] = defaultdict(int)
    for event in events(log.messages, lambda device: _is_c2c(machine, device)):
        if event.rule:
            groups[event.rule, event.device].append(event)
        else:
            mentioned[event.mention] += 1
    for (rule, _), group in groups.items():
        exam.findings.append(_judged(policy[rule], group, log.up_s, now, exam.context.window_s))
    for what, count in mentioned.items():
        exam.info(f"the kernel log has {count} x {what}", origin=Origin.USER)
    return _reach(log, now)


def _is_c2c(machine: Machine, device: str) -> bool:
    """Return whether a GPU is a Grace Hopper's; one that sysfs does not show is taken for another."""
    identifier = or_else(machine.text, f"/sys/bus/pci/devices/{device}/device", "", Unreadable)
    return identifier.lower() in driver_events().c2c_devices


def _closed(bound: Bound, error: Unreadable) -> Finding:
    severity = Severity.INFO
    if bound.reached(1, bound.fail):
        severity = Severity.UNKNOWN
    elif bound.reached(1, bound.warn):
        severity = Severity.WARNING
    text = (
        f"{error}; allow it (kernel.dmesg_restrict=0, or group systemd-journal or adm), "
        f'or say in the policy that this is so: [bounds."{bound.key}"] fail = "off"'
    )
    return Finding("kernel_log", severity, text, rule=bound.key)


def _reach(log: KernelLog, now: float) -> str:
    times = [message.at for message in log.messages if message.at is not None]
    since = f", reaching back {(now - min(times)) / 3600:.1f} h" if times else ", without times"
    return f"{len(log.messages)} messages of the kernel by {log.source}{since}, nothing that counts"


def _judged(
    bound: Bound, group: List[KernelEvent], up_s: Optional[float], now: float, window_s: float
) -> Finding:
    """Return what these events of one kind on one device come to."""
    device = group[0].device
    undated_count = up_s is not None and up_s <= window_s
    recent = sum(
        one.weight for one in group if (undated_count if one.at is None else now - one.at <= window_s)
    )
    undated = 0 if undated_count else sum(one.weight for one in group if one.at is None)
    severity, count = _severity(bound, recent, undated)
    last = group[-1]
    where = f" on {device}" if device else ""
    what = f"{bound.meaning}{where}: {count}"
    if severity is Severity.INFO:
        text = (
            f"the kernel log has {what}, too few or older than {window_s / 3600:g} h; the last: {last.text}"
        )
    elif severity is Severity.UNKNOWN:
        text = f"the kernel log has {what} without a time, so it may be old; the last: {last.text}; {_advice(bound)}"
    else:
        text = f"the kernel log has {what} within {window_s / 3600:g} h{_ago(last.at, now)}: {last.text}; {_advice(bound)}"
    return Finding(
        "kernel_log",
        severity,
        text,
        origin=Origin.USER if bound.key == "kernel_log.oom" else Origin.NODE,
        device=device,
        rule=bound.key,
        metric="events",
        value=float(count),
        unit="1",
    )


def _severity(bound: Bound, recent: int, undated: int) -> Tuple[Severity, int]:
    if bound.reached(recent, bound.fail):
        return Severity.CRITICAL, recent
    if undated and bound.reached(recent + undated, bound.fail):
        return Severity.UNKNOWN, recent + undated
    if bound.reached(recent + undated, bound.warn):
        return Severity.WARNING, recent + undated
    return Severity.INFO, recent + undated


def _ago(at: Optional[float], now: float) -> str:
    return "" if at is None else f", the last {(now - at) / 3600:.1f} h ago"


def _advice(bound: Bound) -> str:
    return _ADVICE.get(bound.key, "have the node examined")


CHECKS = (Check.named("kernel_log", _judge),)
