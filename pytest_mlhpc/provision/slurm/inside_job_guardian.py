"""The guardian of ``mlhpc_here``: if pytest dies, it ends all that pytest started in an allocation, but not the allocation.

Started as ``python -P -m pytest_mlhpc.provision.slurm.inside_job_guardian SESSION JOB RUNS_DIR``, a process of its own that
imports little, with a pipe from pytest as standard input. A ``q`` on the pipe means that nothing is left to end. Else it
ends processes of this node by their cookie, and then job steps, which may be on other nodes, by their names: the ids of the
session's runs, which are the folders ``RUNS_DIR/*/*``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pytest_mlhpc.provision.guardian import detach, end_processes, wait_for_harness
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError
from pytest_mlhpc.provision.slurm.commands import CliClient

#: Time between SIGTERM and SIGKILL, in seconds: the batch gives its ranks 5, then waits for their job step.
GRACE_S = 12.0

#: Time limit for job steps to vanish, and the interval between two queries, in seconds.
GONE_LIMIT_S, CHECK_INTERVAL_S = 30.0, 1.0


def main(session_id: str, job_id: str, runs_dir: str) -> int:
    """Wait until pytest ends or sends ``q``; without that, end what it started."""
    detach()
    if wait_for_harness():
        return 0
    end_processes("MLHPC_SESSION", session_id, GRACE_S)
    end_steps(CliClient(), job_id, Path(runs_dir))
    return 0


def end_steps(client: SlurmClient, job_id: str, runs_dir: Path) -> bool:
    """Cancel the job's steps that are runs of this session; return whether none is left."""
    names = frozenset(path.name for path in runs_dir.glob("*/*") if path.is_dir())
    deadline = time.monotonic() + GONE_LIMIT_S
    while time.monotonic() < deadline:
        try:
            left = [step.id for step in client.steps([job_id]).get(job_id, ()) if step.name in names]
            if not left:
                return True
            client.cancel([f"{job_id}.{step}" for step in left], "KILL")
        except SlurmError:
            pass  # the next query may be answered
        time.sleep(CHECK_INTERVAL_S)  # only another query shows a step's end
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
