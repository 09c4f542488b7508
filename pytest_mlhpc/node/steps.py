"""PAYLOAD. Job steps that outlive their srun: rare, but then nobody else ends them before the job."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import List, Optional

from pytest_mlhpc.node.processes import say

#: Longest wait for one answer of squeue or scancel, in seconds.
CALL_LIMIT_S = 20.0

#: How long a step may take to vanish, and the time between two looks, in seconds. After SIGKILL of its srun a step's record
#: was seen for 4 s although its tasks were gone at once.
GONE_LIMIT_S, LOOK_S = 15.0, 1.0

#: Names under which OpenMPI 4 and 5 start their daemons by srun.
MPI_DAEMONS = ("orted", "prted")


def end(job_id: str, run_id: str) -> bool:
    """Cancel the steps of one run that are still there; return whether none is left. Never raises."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while True:
        left = find(job_id, run_id)
        if not left:
            return True
        if time.monotonic() > deadline:
            say(f"run {run_id}: these job steps do not end: {', '.join(left)}")
            return False
        if _call("scancel", "--signal=KILL", *left) is None:
            return False  # most likely the whole job is being ended, by Slurm itself
        time.sleep(LOOK_S)  # nothing tells of a step's end but asking again


def find(job_id: str, run_id: str) -> List[str]:
    """Return the ids of the job's steps that carry the run's name, or that of OpenMPI's daemons."""
    said = _call("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i|%j")
    pairs = [line.partition("|") for line in (said or "").splitlines()]
    return [step.strip() for step, _, name in pairs if name.strip() in (run_id, *MPI_DAEMONS)]


def _call(*argv: str) -> Optional[str]:
    """Return what a command printed; None, and a line in the log, if it failed."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_LIMIT_S, check=False
        )
        if done.returncode == 0:
            return done.stdout.decode("utf-8", "replace")
        words = done.stderr.decode("utf-8", "replace").strip()[-300:]
        say(f"{' '.join(argv)} ended with exit code {done.returncode}: {words}")
        return None
    say(f"{' '.join(argv)} could not be started, or did not answer within {CALL_LIMIT_S:g} s")
    return None
