"""PAYLOAD. Further tasks of a node stay while the first one looks at how all of them are bound: /proc forgets who has ended."""

from __future__ import annotations

import os
import select
import time
from typing import Mapping, Optional

from pytest_mlhpc.node.vet.job_processes import pids, variables
from pytest_mlhpc.node.vet.machine import Machine

#: How long the first task may take to appear, and how often it is looked for, in seconds: srun starts all at once.
APPEARS_S, LOOK_S = 5.0, 0.1


def first_task(machine: Machine) -> Optional[int]:
    """Return the process of our job step's first task on this node, None where there is none (any more)."""
    environ = machine.environ
    step = (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID"))
    for pid in pids(machine):
        theirs = variables(machine, pid)
        if theirs.get("SLURM_LOCALID") == "0" and step == (
            theirs.get("SLURM_JOB_ID"),
            theirs.get("SLURM_STEP_ID"),
        ):
            return pid
    return None


def stay(environ: Mapping[str, str], most_s: float, machine: Optional[Machine] = None) -> bool:
    """Wait until the first task of this node has ended, *most_s* seconds at most; return whether there was one.

    Without pidfd_open(2) (Linux 5.3, Python 3.9) there is no waiting.
    """
    if not environ.get("SLURM_STEP_ID") or not hasattr(os, "pidfd_open"):
        return False
    machine = machine or Machine(environ=environ)
    deadline = time.monotonic() + min(APPEARS_S, most_s)
    pid = first_task(machine)
    while pid is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # nothing tells when another process begins
        pid = first_task(machine)
    if pid is None:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is old
        return True
    try:
        select.select([descriptor], [], [], max(0.0, most_s))
    finally:
        os.close(descriptor)
    return True
