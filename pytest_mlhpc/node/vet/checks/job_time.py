"""PAYLOAD. Whether the allocation lasts as long as the run needs."""

from __future__ import annotations

import re
from typing import Optional

from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.job_findings import is_number, judged, outcome
from pytest_mlhpc.node.vet.job_processes import parse
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable

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

    def examine(self, machine: Machine, context: Context) -> Outcome:
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


CHECKS = (WallTime(),)
