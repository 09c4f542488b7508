"""What the kernel has logged: machine checks, memory, disks, PCIe, NVIDIA's Xid and SXid, AMD's RAS.

*Not there and not readable are the same here*: every node has a kernel that logs, in a container as well, so a log that nobody
shows us is UNKNOWN (rule ``kernel_log.closed``; a site where users may never read it sets no stage for that).

Only events of this boot within the window (24 hours) are judged; older ones are mentioned. An event without a time counts if
the node is up for less than the window; else nobody can tell, and what would be CRITICAL is UNKNOWN.
"""

from __future__ import annotations

from collections import defaultdict
from typing import DefaultDict, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.node.vet.kernel_log import KernelEvent, KernelLog, driver_events, events
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, or_else
from pytest_mlhpc.node.vet.policy import Bound

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
