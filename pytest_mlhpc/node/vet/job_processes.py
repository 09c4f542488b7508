"""PAYLOAD. Processes of a node as /proc shows them to any user: whose they are, what they have computed, and which are ours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Optional, Set

from pytest_mlhpc.node.vet.job_findings import is_number
from pytest_mlhpc.node.vet.machine import Machine, Unreadable

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
    words = tail.split()
    try:
        return Process(
            int(number),
            name,
            words[0],
            int(words[1]),
            int(words[3]),
            (int(words[11]) + int(words[12])) / TICKS,
            int(words[19]) / TICKS,
        )
    except (ValueError, IndexError) as error:
        raise Unreadable(f"{text[:40]!r} is no line of /proc/PID/stat") from error


def pids(machine: Machine) -> List[int]:
    """Return the processes that may be seen, in order."""
    folders = machine.names("/proc/[0-9]*")
    return sorted(int(name.rpartition("/")[2]) for name in folders if is_number(name.rpartition("/")[2]))


def processes(machine: Machine) -> Dict[int, Process]:
    """Return all that may be seen; those that end meanwhile are left out."""
    seen = (_seen(machine, pid) for pid in pids(machine))
    return {process.pid: process for process in seen if process is not None}


def _seen(machine: Machine, pid: int) -> Optional[Process]:
    try:
        return parse(machine.text(f"/proc/{pid}/stat"))
    except Unreadable:
        return None


def owner(machine: Machine, pid: int) -> Optional[int]:
    """Return the number of the user whose process it is; None if that cannot be seen."""
    try:
        return int(machine.key_values(f"/proc/{pid}/status").get("Uid", "").split()[0])
    except (Unreadable, ValueError, IndexError):
        return None


def variables(machine: Machine, pid: int) -> Dict[str, str]:
    """Return the environment with which a process was started; empty where it is not ours to see."""
    try:
        text = machine.text(f"/proc/{pid}/environ")
    except Unreadable:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, between, value in pairs if between}


def cgroup(machine: Machine, pid: object) -> str:
    """Return the text of a process's cgroups; empty where it cannot be seen."""
    try:
        return machine.text(f"/proc/{pid}/cgroup")
    except Unreadable:
        return ""


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
