"""Processes that others, or earlier jobs of this user, have left running."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Optional, Set, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Machine, Unreadable, is_number, numbers, or_else, some

#: What /proc counts CPU time in, in ticks a second.
TICKS = float(os.sysconf("SC_CLK_TCK"))

#: The kernel's own processes are all children of this one (kthreadd, since Linux 2.6.24).
KERNEL = 2


@dataclass(frozen=True)
class Process:
    """One process; ``cpu_s`` is what it has computed in all, in seconds, ``started_s`` when it began, after booting."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    cpu_s: float
    started_s: float


def parse(text: str) -> Process:
    """Return a process from its /proc/PID/stat (proc(5)); a name may hold blanks and brackets.

    Raises:
        Unreadable: there is something else in it.
    """
    head, _, tail = text.rpartition(")")
    number, _, name = head.partition("(")
    fields = tail.split()
    try:
        return Process(
            int(number),
            name,
            fields[0],
            int(fields[1]),
            int(fields[3]),
            (int(fields[11]) + int(fields[12])) / TICKS,
            int(fields[19]) / TICKS,
        )
    except (ValueError, IndexError) as error:
        raise Unreadable(f"{text[:40]!r} is no line of /proc/PID/stat") from error


def pids(machine: Machine) -> List[int]:
    """Return the visible processes, in order."""
    folders = machine.names("/proc/[0-9]*")
    return sorted(int(name.rpartition("/")[2]) for name in folders if is_number(name.rpartition("/")[2]))


def processes(machine: Machine) -> Dict[int, Process]:
    """Return all that are visible; those that end meanwhile are left out."""
    every = (_process_of(machine, pid) for pid in pids(machine))
    return {process.pid: process for process in every if process is not None}


def _process_of(machine: Machine, pid: int) -> Optional[Process]:
    try:
        return parse(machine.text(f"/proc/{pid}/stat"))
    except Unreadable:
        return None


def variables(machine: Machine, pid: int) -> Dict[str, str]:
    """Return the environment with which a process was started; empty where it is not ours to see."""
    text = or_else(machine.text, f"/proc/{pid}/environ", "", Unreadable)
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, between, value in pairs if between}


def cgroup(machine: Machine, pid: object) -> str:
    """Return the text of a process's cgroups; empty where it is not visible."""
    return or_else(machine.text, f"/proc/{pid}/cgroup", "", Unreadable)


def ours(machine: Machine, found: Dict[int, Process], me: Process) -> FrozenSet[int]:
    """Return what belongs to this vetting and its job: its session, those above it, all below them, and its Slurm job."""
    above: List[int] = []
    at: Optional[Process] = me
    while at is not None and at.pid > 1 and at.pid not in above:
        above.append(at.pid)
        at = found.get(at.parent)
    roots: Set[int] = set(above[:2])  # this process and the agent that started it
    mark = machine.environ.get("SLURM_JOB_ID", "")
    belongs = set(above)
    for pid, process in found.items():
        near = process.session == me.session or process.parent in roots
        if near or (mark and f"/job_{mark}/" in cgroup(machine, pid) + "/"):
            belongs.add(pid)
    grown = True
    while grown:  # children of children; a tree is a few levels high
        more = {pid for pid, process in found.items() if process.parent in belongs - set(above[2:])} - belongs
        belongs |= more
        grown = bool(more)
    return frozenset(belongs)


#: A process that is running now and has computed so long, in seconds, is no passing command.
BUSY_S = 10.0

#: Users below this number are the system's own. Source: login.defs(5), UID_MIN.
FIRST_USER = 1000

#: Device files of accelerators. Sources: NVIDIA driver's README; amdgpu's and amdkfd's documentation.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")


def _judge(exam: Examination) -> str:
    """Read all visible processes once."""
    machine = exam.machine
    me = parse(machine.text("/proc/self/stat"))
    found = processes(machine)
    mine = ours(machine, found, me)
    others = [
        one
        for one in found.values()
        if one.pid not in mine and KERNEL not in (one.pid, one.parent) and one.pid > 1
    ]
    busy, holders = _busy(machine, others), _holders(machine, others)
    cores = len(machine.names("/sys/devices/system/node/node*/cpu[0-9]*")) or _online(machine)
    text = (
        f"{len(busy)} processes that are none of this job's compute on this node ({some(busy)}): "
        "end them, or ask for nodes of your own (--exclusive)"
    )
    exam.judge("job.leftover_busy", len(busy), text)
    text = f"they take {len(busy)} of {cores} processors"
    exam.judge("job.leftover_share", len(busy) / max(1, cores), text)
    text = f"processes of yours from before hold a device and its memory ({some(holders)}): end them"
    exam.judge("job.leftover_device", len(holders), text)
    return f"none of {len(others)} other processes computes"


def _busy(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    found = []
    for one in others:
        if one.state == "R" and one.cpu_s >= BUSY_S:
            user = machine.status(one.pid, "Uid") or ""
            if not is_number(user) or int(user) >= FIRST_USER:
                found.append(f"{one.pid} {one.name[:20]!r} of user {user or '?'}")
    return tuple(found)


def _holders(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    """Return those that have a device open; only files of one's own processes are visible (proc(5))."""
    found = []
    for one in others:
        targets = (_target(machine, name) for name in machine.names(f"/proc/{one.pid}/fd/*"))
        target = next((target for target in targets if target.startswith(DEVICES)), None)
        if target is not None:
            found.append(f"{one.pid} {one.name[:20]!r} {target}")
    return tuple(found)


def _target(machine: Machine, link: str) -> str:
    try:
        return os.readlink(machine.path(link))  # noqa: PTH115 - the node's own text, never followed
    except OSError:  # closed meanwhile, or another user's
        return ""


def _online(machine: Machine) -> int:
    return len(numbers(machine.text("/sys/devices/system/cpu/online")))


CHECKS = (Check.named("job_processes", _judge),)
