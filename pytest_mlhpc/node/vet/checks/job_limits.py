"""PAYLOAD. Limits of this process, which ranks inherit: locked memory, open files, processes, stack, core dumps."""

from __future__ import annotations

import math
import re
from typing import Dict, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Outcome
from pytest_mlhpc.node.vet.job_findings import is_number, judged, outcome, size
from pytest_mlhpc.node.vet.job_processes import cgroup
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable
from pytest_mlhpc.node.vet.ports import fabric_of

NAME = "job_limits"

_LINE = re.compile(r"(Max [a-z ]+?) {2,}(\S+) +(\S+)")


def soft_limits(text: str) -> Dict[str, float]:
    """Return the soft limits of a /proc/PID/limits by name, ``Max open files``; infinite where unlimited (proc(5))."""
    found = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and (match[2] == "unlimited" or is_number(match[2])):
            found[match[1]] = math.inf if match[2] == "unlimited" else float(match[2])
    return found


class Limits:
    """Limits that ranks inherit."""

    name = NAME
    level = "quick"
    cost_s = 0.05
    reads = (
        "/proc/self/limits",
        "/proc/self/cgroup",
        "/sys/fs/cgroup/*/pids.max",
        "/proc/sys/kernel/core_pattern",
    )
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Compare the soft limits with what the ranks of this node, and of the job, need."""
        limits = soft_limits(machine.text("/proc/self/limits"))
        if not limits:
            raise Unreadable("/proc/self/limits says nothing that is known")
        ranks = max(1, context.wanted.ranks)
        said = (
            *_memlock(machine, context, limits.get("Max locked memory", math.inf)),
            *_files(context, limits.get("Max open files", math.inf), ranks * max(1, len(context.hosts))),
            *_tasks(machine, context, limits.get("Max processes", math.inf), ranks),
            *_memory(machine, context, limits),
        )
        return outcome(self.name, said, "limits are wide enough")


def _memlock(machine: Machine, context: Context, limit: float) -> Tuple[Finding, ...]:
    fabric = fabric_of(machine) if math.isfinite(limit) else None
    if fabric is not None and not (fabric.own or fabric.ethernet):
        limit = math.inf
    return judged(
        NAME,
        context.policy,
        "job.memlock",
        limit,
        f"only {size(limit)} of memory may be locked, which {fabric.words if fabric else 'a fabric'} needs to send from: "
        "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK; containers: --ulimit memlock=-1)",
    )


def _files(context: Context, limit: float, world: int) -> Tuple[Finding, ...]:
    return (
        *judged(
            NAME,
            context.policy,
            "job.nofile",
            limit,
            f"only {limit:.0f} files may be open in one process: ulimit -n to the hard limit, in the job script",
        ),
        *judged(
            NAME,
            context.policy,
            "job.nofile_per_rank",
            limit / world,
            f"{limit:.0f} open files are too few for the connections of {world} ranks: ulimit -n to the hard limit",
        ),
    )


def _tasks(machine: Machine, context: Context, limit: float, ranks: int) -> Tuple[Finding, ...]:
    where = "ulimit -u"
    pids = _pids_max(machine)
    if pids < limit:
        limit, where = pids, "pids.max of the cgroup (Kubernetes: podPidsLimit)"
    return judged(
        NAME,
        context.policy,
        "job.tasks_per_rank",
        limit / ranks,
        f"{limit:.0f} processes and threads for {ranks} ranks: {where} is too low",
    )


def _pids_max(machine: Machine) -> float:
    """Return the least limit of our cgroup and those above it (cgroups(7)); infinite where there is none."""
    lines = cgroup(machine, "self").splitlines()
    found = math.inf
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "pids"} or ".." in path:
            continue
        root = "/sys/fs/cgroup/pids" if controllers else "/sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            found = min(found, _number(machine, "/".join([root, *parts[:depth], "pids.max"])))
    return found


def _number(machine: Machine, path: str) -> float:
    try:
        text = machine.text(path)
    except Absent:
        return math.inf
    return float(text) if is_number(text) else math.inf


def _memory(machine: Machine, context: Context, limits: Dict[str, float]) -> Tuple[Finding, ...]:
    stack, core = limits.get("Max stack size", math.inf), limits.get("Max core file size", 0.0)
    try:
        pattern = machine.text("/proc/sys/kernel/core_pattern")
    except Absent:
        pattern = "|"
    dumped = 0.0 if pattern.startswith("|") or not pattern else core
    return (
        *judged(
            NAME,
            context.policy,
            "job.stack",
            stack,
            f"the stack may have only {size(stack)}: threads of compilers and libraries overflow it; ulimit -s 65536",
        ),
        *judged(
            NAME,
            context.policy,
            "job.core_dumps",
            dumped,
            f"a crash would write all memory of each rank (limit: {size(core)}) as {pattern!r}: ulimit -c 0",
        ),
    )


CHECKS = (Limits(),)
