"""Limits of a job: locked memory, open files, processes, stack, and whether the allocation lasts long enough."""

from __future__ import annotations

import math
import re
from typing import Dict, Optional, Tuple

from pytest_mlhpc.node.vet.checks.job_processes import cgroup, parse
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding
from pytest_mlhpc.node.vet.machine import (
    Absent,
    Context,
    Machine,
    Unreadable,
    is_number,
    judged,
    outcome,
    size,
)
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


class LimitsCheck:
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

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
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


#: Where the manifest of docs/vetting-kubernetes.md mounts the pod's annotations, and the one that says how long it may live.
ANNOTATIONS = "/etc/podinfo/annotations"
DEADLINE = "mlhpc.active-deadline-seconds"

#: How long squeue may take, in seconds; it gives a controller up after 9 s (measured with 22.05), which is too long here.
ASK_S = 4.0

#: [days-]hours:minutes:seconds, hours and minutes left out where they are none (squeue(1), %L).
_LEFT = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{1,6})\Z")

#: What squeue says where there is no end.
ENDLESS = ("UNLIMITED", "NOT_SET", "INVALID")


def left_by_squeue(text: str) -> Optional[float]:
    """Return the seconds left that ``squeue -o %L`` says; None: no limit.

    Raises:
        Unreadable: it says something else.
    """
    if text in ENDLESS:
        return None
    match = _LEFT.match(text)
    if not match:
        raise Unreadable(f"squeue says {text[:40]!r} of the time left")
    days, hours, minutes, seconds = (int(word or 0) for word in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class WallTime:
    """Time left, against what the user said the run needs."""

    name = "job_time"
    level = "quick"
    cost_s = 0.3
    reads = ("SLURM_JOB_END_TIME", "squeue", ANNOTATIONS)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Ask Slurm, or the pod's annotations."""
        if context.wanted.hours <= 0:
            return outcome(self.name, (), "nobody said how long the run takes (--hours)")
        if context.hosts and context.host != context.hosts[0]:
            return outcome(self.name, (), "the first node asks: a controller need not hear it from each")
        left = _left(machine)
        needed = context.wanted.hours * 3600
        if left is None:
            return outcome(self.name, (), "the allocation has no end")
        text = (
            f"{left / 3600:.1f} hours are left, and the run takes {context.wanted.hours:g}: "
            "ask for a longer allocation, or restart from a checkpoint"
        )
        said = judged(self.name, context.policy, "job.wall_time", left / needed, text)
        return outcome(self.name, said, f"{left / 3600:.1f} hours are left")


def _left(machine: Machine) -> Optional[float]:
    end = machine.environ.get("SLURM_JOB_END_TIME", "")
    if is_number(end):
        return int(end) - machine.clock()
    job = machine.environ.get("SLURM_JOB_ID", "")
    if is_number(job):
        done = machine.command(("squeue", "-h", "-j", job, "-o", "%L"), ASK_S)
        if done.code:
            words = (done.errors or done.output).strip()[-200:]
            raise Unreadable(f"squeue does not say how long the job has left: {words}")
        return left_by_squeue(done.output.strip())
    return _of_pod(machine)


def _of_pod(machine: Machine) -> Optional[float]:
    try:
        annotations = machine.key_values(ANNOTATIONS, "=")
    except Absent:
        return None
    deadline = annotations.get(DEADLINE, "").strip('"')
    if not deadline:
        return None
    if not is_number(deadline):
        raise Unreadable(f"{ANNOTATIONS}: {DEADLINE} is {deadline[:40]!r}, not a number of seconds")
    words = machine.text("/proc/uptime").split()
    first = parse(machine.text("/proc/1/stat"))
    try:
        return int(deadline) - (float(words[0]) - first.started_s)
    except (ValueError, IndexError) as error:
        raise Unreadable("/proc/uptime does not say how long the node is up") from error


CHECKS = (
    LimitsCheck(),
    WallTime(),
)
