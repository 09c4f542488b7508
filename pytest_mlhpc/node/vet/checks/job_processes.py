"""PAYLOAD. What others have left running: processes that compute, and such of this user's that hold a device."""

from __future__ import annotations

import os
from typing import List, Tuple

from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.job_findings import judged, numbers, outcome, some
from pytest_mlhpc.node.vet.job_processes import KERNEL, Process, ours, owner, parse, processes
from pytest_mlhpc.node.vet.machine import Context, Machine

#: A process that is running now and has computed so long, in seconds, is no passing command.
BUSY_S = 10.0

#: Users below this number are the system's own. Source: login.defs(5), UID_MIN.
FIRST_USER = 1000

#: Device files of accelerators. Sources: NVIDIA driver's README; amdgpu's and amdkfd's documentation.
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")


class Leftovers:
    """Processes that are none of this job's."""

    name = "job_processes"
    level = "quick"
    cost_s = 0.3
    reads = ("/proc/*/stat", "/proc/*/status", "/proc/*/cgroup", "/proc/*/fd")
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Look once at all processes that may be seen."""
        me = parse(machine.text("/proc/self/stat"))
        found = processes(machine)
        mine = ours(machine, found, me)
        others = [
            one
            for one in found.values()
            if one.pid not in mine and KERNEL not in (one.pid, one.parent) and one.pid > 1
        ]
        busy = _busy(machine, others)
        cores = len(machine.names("/sys/devices/system/node/node*/cpu[0-9]*")) or _online(machine)
        said = judged(
            self.name,
            context.policy,
            "job.leftover_busy",
            len(busy),
            f"{len(busy)} processes that are none of this job's compute on this node ({some(busy)}): "
            "end them, or ask for nodes of your own (--exclusive)",
        )
        said += judged(
            self.name,
            context.policy,
            "job.leftover_share",
            len(busy) / max(1, cores),
            f"they take {len(busy)} of {cores} processors",
        )
        held = _holders(machine, others)
        said += judged(
            self.name,
            context.policy,
            "job.leftover_device",
            len(held),
            f"processes of yours from before hold a device and its memory ({some(held)}): end them",
        )
        return outcome(self.name, said, f"none of {len(others)} other processes computes")


def _busy(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    found = []
    for one in others:
        if one.state == "R" and one.cpu_s >= BUSY_S:
            user = owner(machine, one.pid)
            if user is None or user >= FIRST_USER:
                found.append(f"{one.pid} {one.name[:20]!r} of user {'?' if user is None else user}")
    return tuple(found)


def _holders(machine: Machine, others: List[Process]) -> Tuple[str, ...]:
    """Return those that have a device open; only files of one's own processes may be seen (proc(5))."""
    found = []
    for one in others:
        targets = (_target(machine, name) for name in machine.names(f"/proc/{one.pid}/fd/*"))
        target = next((target for target in targets if target.startswith(DEVICES)), None)
        if target is not None:
            found.append(f"{one.pid} {one.name[:20]!r} {target}")
    return tuple(found)


def _target(machine: Machine, link: str) -> str:
    try:
        return os.readlink(machine.path(link))  # noqa: PTH115 - the node's own words, never followed
    except OSError:  # closed meanwhile, or another user's
        return ""


def _online(machine: Machine) -> int:
    return len(numbers(machine.text("/sys/devices/system/cpu/online")))


CHECKS = (Leftovers(),)
