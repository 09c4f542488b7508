"""The guardian of ``--here``: ends all that a pytest started in an allocation if that pytest dies, but not the allocation.

``python -P -m pytest_mlhpc.provision.slurm.here_guardian SESSION JOB RUNS_DIR`` with a pipe from the harness as standard
input. A ``q`` on it says that all is over. It ends processes of this node by their cookie, and then job steps, which may
be on other nodes, by their names: those are the ids of the session's runs, which are the folders ``RUNS_DIR/*/*``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from pytest_mlhpc.provision.guardian import end_processes
from pytest_mlhpc.provision.slurm.cli import CliClient
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError

#: Time between SIGTERM and SIGKILL, in seconds: the batch gives its ranks 5 and then waits for their job step.
GRACE_S = 12.0

#: How long job steps may take to vanish, and the time between two looks, in seconds.
GONE_LIMIT_S, LOOK_S = 30.0, 1.0


def main(session_id: str, job_id: str, runs_dir: str) -> int:
    """Wait for the harness to end; if it did not say that all is over, end what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # whoever ends the harness by these must not end its guardian before it
    os.chdir("/")
    if _said_over():
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
            pass  # asked again: nobody else ends them before the job
        time.sleep(LOOK_S)  # nothing tells of a step's end but asking again
    return False


def _said_over() -> bool:
    """Return whether the harness said ``q``; False once it is gone without a word."""
    watched = [0]
    try:
        # A process forked by the harness may hold the pipe open beyond its death.
        watched.append(os.pidfd_open(os.getppid()))
    except OSError:
        watched.append(0)
    while True:
        ready = select.select(watched, [], [])[0]
        if 0 in ready:
            said = os.read(0, 4096)
            if b"q" in said:
                return True
            if not said:
                return False
        elif watched[1] in ready:
            return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
