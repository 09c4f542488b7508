"""Slurm as ``--here`` sees it: submitting starts a child, cancelling ends it, all other questions go to the real one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.provision.guardian import end_processes
from pytest_mlhpc.provision.slurm.client import (
    Job,
    Node,
    PartitionLimits,
    QosLimits,
    Reservation,
    SlurmClient,
    SlurmError,
    SlurmRefused,
    State,
    Step,
    Submission,
)
from pytest_mlhpc.provision.slurm.submitting import me
from pytest_mlhpc.results.foreign import read_json

#: How long a batch that was told to end may take, in seconds: its ranks get 5, job steps vanish within 15 more.
END_LIMIT_S = 25.0

#: How long a batch may live beyond its plan's time limit, in seconds: it keeps the limits of its runs by itself.
BEYOND_S = 30.0


@dataclass
class _Child:
    """A plan that was started: the process that became its batch."""

    submission: Submission
    allocation_id: str
    process: subprocess.Popen[bytes]
    deadline: float
    started_ns: int
    ended: Job | None = None
    cancelled: bool = False
    late: bool = False

    @property
    def run_ids(self) -> frozenset[str]:
        """Names of its job steps: each run has a folder of its own."""
        with contextlib.suppress(OSError):
            return frozenset(path.name for path in self.submission.directory.iterdir() if path.is_dir())
        return frozenset()


class HereClient:
    """A SlurmClient whose jobs are children of this process. It never touches the job around us itself.

    Args:
        real: who is asked of nodes and steps.
        here: what ``here.inside`` wrote: job, nodes, until_ns.
        session_id: the cookie of all that is started.
        runs_dir: where the folders of all allocations of this session lie.
    """

    def __init__(
        self, real: SlurmClient, here: Mapping[str, Any], *, session_id: str, runs_dir: Path
    ) -> None:
        self._real = real
        self._job: str = here["job"]
        self._nodes: tuple[str, ...] = tuple(here["nodes"])
        self._session_id = session_id
        self._runs_dir = runs_dir
        self._children: dict[str, _Child] = {}  #: by the unique name, in the order in which they were started
        self._guardian: subprocess.Popen[bytes] | None = None
        self.name = real.name
        self.calls = real.calls

    def submit(self, submission: Submission) -> str:
        """Start the job script here and return the id of the job around us.

        Raises:
            SlurmRefused: it cannot be started.
        """
        self._guard()
        allocation_id = submission.name.removeprefix("mlhpc-")
        environ = {**os.environ, "MLHPC_SESSION": self._session_id, "MLHPC_ALLOCATION": allocation_id}
        try:
            plan = read_json((submission.directory / "plan.json").read_text(encoding="utf-8"))
            with (submission.directory / "slurm.out").open("ab") as output:
                process = subprocess.Popen(
                    ["/bin/bash", str(submission.script)],
                    env=environ,
                    cwd=submission.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise SlurmRefused(f"bash {submission.script}: {error.strerror}") from error
        deadline = time.monotonic() + float(plan["time_limit_s"]) + BEYOND_S
        self._children[submission.name] = _Child(submission, allocation_id, process, deadline, time.time_ns())
        return self._job

    def jobs(self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = "") -> list[Job]:
        """Return our children: the one that *ids* mean is the last, as all of them have the job's id."""
        del user
        children = list(self._children.values())
        if names:
            wanted = [child for child in children if child.submission.name in set(names)]
        else:
            wanted = children[-1:] if self._job in ids else []
        return [self._seen(child) for child in wanted]

    def queue(self, partition: str) -> list[Job]:
        """Return nothing: nobody waits here."""
        del partition
        return []

    def accounting(self, ids: Collection[str]) -> list[Job]:
        """Return the last child with its own steps, as far as they are accounted."""
        found = [
            job for job in self._real.accounting(ids) if self._children and job.id == self._job
        ]  # nothing is asked of other jobs
        child = next(reversed(self._children.values()), None)
        if not found or child is None:
            return []
        steps = tuple(step for step in found[0].steps if step.name in child.run_ids)
        return [replace(self._seen(child), steps=steps)]

    def steps(self, ids: Collection[str]) -> dict[str, tuple[Step, ...]]:
        """Return the running steps of the last child."""
        child = next(reversed(self._children.values()), None)
        if child is None or self._job not in ids:
            return {}
        mine = child.run_ids
        found = self._real.steps([self._job]).get(self._job, ())
        return {self._job: tuple(step for step in found if step.name in mine)}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """End the children that *ids* mean; returns when nothing of them is left."""
        del signal
        for child in self._children.values():
            if self._job in ids and child.ended is None:
                child.cancelled = True
                self._end(child)

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Ask Slurm."""
        return self._real.nodes(names)

    def drain(self, names: Collection[str], reason: str) -> None:
        """Ask Slurm."""
        self._real.drain(names, reason)

    def resume(self, names: Collection[str]) -> None:
        """Ask Slurm."""
        self._real.resume(names)

    def partition(self, name: str) -> PartitionLimits:
        """Ask Slurm."""
        return self._real.partition(name)

    def qos(self, name: str) -> QosLimits | None:
        """Ask Slurm."""
        return self._real.qos(name)

    def reservations(self) -> list[Reservation]:
        """Ask Slurm."""
        return self._real.reservations()

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Ask Slurm."""
        return self._real.expand(hostlist)

    def version(self) -> str:
        """Ask Slurm."""
        return self._real.version()

    def close(self) -> None:
        """End what is left, and let the guardian go without a look at Slurm. Idempotent."""
        for child in self._children.values():
            if child.ended is None and child.process.poll() is None:
                child.cancelled = True
                self._end(child)
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.write(b"q")
                self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def _guard(self) -> None:
        """Start the guardian if there is none: it ends everything of this session if this process dies."""
        if self._guardian is not None and self._guardian.poll() is None:
            return
        module = "pytest_mlhpc.provision.slurm.here_guardian"
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-P", "-m", module, self._session_id, self._job, str(self._runs_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise SlurmRefused(f"cannot start the guardian: {error}") from error

    def _seen(self, child: _Child) -> Job:
        """Return *child* as a job; the first look after its end clears up what outlived it."""
        code = child.process.poll()
        if child.ended is None and code is None and time.monotonic() > child.deadline:
            child.late = True
            self._end(child)
            code = child.process.returncode
        if code is not None and child.ended is None:
            end_processes("MLHPC_ALLOCATION", child.allocation_id, 0.5)
            child.ended = self._as_job(child, self._end_state(child, code), code)
        return child.ended or self._as_job(child, State.RUNNING, None)

    def _end_state(self, child: _Child, code: int) -> State:
        if child.cancelled:
            return State.CANCELLED
        if child.late:
            return State.TIMEOUT
        if code == 0:
            return State.COMPLETED
        with contextlib.suppress(SlurmError):  # the job around us may be what has ended
            for job in self._real.jobs(ids=[self._job]):
                if job.state.ended:
                    return job.state
        return State.FAILED

    def _as_job(self, child: _Child, state: State, code: int | None) -> Job:
        return Job(
            id=self._job,
            name=child.submission.name,
            user=min(me({})),
            state=state,
            nodes=self._nodes,
            node_count=len(self._nodes),
            submit_ns=child.started_ns,
            start_ns=child.started_ns,
            end_ns=0 if code is None else time.time_ns(),
            exit_code=max(0, code or 0),
            signal=max(0, -(code or 0)),
        )

    def _end(self, child: _Child) -> None:
        """SIGTERM, by which the batch ends its runs in order; then whatever it takes."""
        with contextlib.suppress(ProcessLookupError):
            if child.process.poll() is None:
                os.killpg(child.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(END_LIMIT_S)
        end_processes("MLHPC_ALLOCATION", child.allocation_id, 0.5)
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        with contextlib.suppress(SlurmError):
            left = self._real.steps([self._job]).get(self._job, ())
            mine = [f"{self._job}.{step.id}" for step in left if step.name in child.run_ids]
            if mine:
                self._real.cancel(mine)
