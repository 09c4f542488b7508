"""``mlhpc_here``: runs inside an allocation that salloc or sbatch made. No job is submitted.

The job script of each plan is run as a child of this process: its ``#SBATCH`` lines are comments to bash, and the batch at
its end finds the nodes of the surrounding job. Only submitting and cancelling differ from a job of its own
(:class:`InsideJobClient`). Whatever ends pytest ends all that it started here, but not the allocation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.provisioner import Handle
from pytest_mlhpc.jobs.spec import JobSpec, allocation_time_s
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.processes import copy_of, start_in_new_session
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.guardian import detach, end_processes, wait_for_harness
from pytest_mlhpc.provision.scheduler.client import (
    JobStep,
    JobSubmission,
    SchedulerError,
    SchedulerJob,
    SchedulerRefused,
    SchedulerState,
    SlurmClient,
)
from pytest_mlhpc.provision.slurm.commands import CliClient
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner

#: Time limit of a batch after SIGTERM, in seconds: its ranks get 5, and job steps vanish within 15 more.
END_LIMIT_S = 25.0

#: How long a batch may exceed its plan's time limit, in seconds: it enforces the limits of its runs itself.
OVERTIME_S = 30.0


def select_own_partition(
    targets: Sequence[Target],
    environ: Mapping[str, str],
    client_of: Callable[[Partition], SlurmClient],
    systems: Collection[str],
    outliving: Sequence[str] = (),
) -> tuple[Target, ...]:
    """Return the targets of the surrounding job's partition, with the job's id, nodes and end as option ``here``.

    *systems* are the names that were selected. *outliving* are given options by which jobs would outlive this pytest.

    Raises:
        UsageError: this process runs in no job, or the job is in another partition than the selected one.
        SchedulerError: Slurm does not answer.
    """
    if outliving:
        raise UsageError(
            f"mlhpc_here and {outliving[0]}: nothing in an allocation outlives the pytest that runs in it"
        )
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise UsageError(
            "mlhpc_here: there is no allocation around this pytest (SLURM_JOB_ID is not set); start it by salloc or sbatch, "
            "or leave it out, so that jobs are submitted"
        )
    slurm = [target for target in targets if target.partition.scheduler == "slurm"]
    if not slurm:
        raise UsageError(f"mlhpc_here: {targets[0].partition.id} is no partition of Slurm")
    job = next(iter(client_of(slurm[0].partition).jobs(ids=[job_id])), None)
    if job is None or job.state.ended or job.state.pending:
        state = job.state.value.lower() if job else "unknown to Slurm"
        raise UsageError(f"mlhpc_here: job {job_id} (SLURM_JOB_ID) is {state}; it has to be running")
    ours = [target for target in slurm if settings_of(target.partition).partition in {"", job.partition}]
    named = [one for one in targets if one.partition.id in systems and one not in ours]
    if named or not ours:
        others = ", ".join(
            f"{one.partition.id} is {settings_of(one.partition).partition!r}"
            if one.partition.scheduler == "slurm"
            else f"{one.partition.id} has scheduler {one.partition.scheduler}"
            for one in named or slurm
        )
        raise UsageError(f"mlhpc_here: job {job_id} is in Slurm's partition {job.partition!r}, but {others}")
    names = sorted({target.partition.id for target in ours})
    if len(names) > 1:
        raise UsageError(
            f"mlhpc_here: several partitions fit to job {job_id}: {', '.join(names)}; select one of them"
        )
    return tuple(replace(one, partition=with_job(one.partition, job)) for one in ours)


def with_job(partition: Partition, job: SchedulerJob) -> Partition:
    """Return *partition* with the option ``here``, by which its provisioner runs all plans in *job*."""
    until_ns = job.end_ns or (job.start_ns + int(job.time_limit_s * 1e9) if job.time_limit_s else 0)
    here = {"job": job.id, "nodes": list(job.nodes), "until_ns": until_ns}
    return replace(partition, scheduler_options={**partition.scheduler_options, "here": here})


def beyond_job(spec: JobSpec, here: Mapping[str, Any], now_ns: int) -> str:
    """Return why *spec* cannot run in the job of the option *here*, or an empty string."""
    count = len(here["nodes"])
    if spec.nodes > count:
        return f"{spec.nodes} nodes are asked for, job {here['job']} has {count} (mlhpc_here)"
    left_s = (here["until_ns"] - now_ns) / 1e9
    if here["until_ns"] and allocation_time_s([spec]) > left_s:
        return (
            f"{allocation_time_s([spec]):.0f} s are needed (time_limit and margin), but job {here['job']} ends in {max(0.0, left_s):.0f} s "
            "(mlhpc_here); a shorter limit is set by --mlhpc-set slurm.time=5m or time_limit="
        )
    return ""


class InsideJobProvisioner(SlurmProvisioner):
    """Runs plans in the surrounding allocation, one after the other. All of them end with this object, or this process.

    Args:
        partition: as :func:`with_job` made it.
        client: for queries about the job's steps and nodes.
        payload: sha256 -> path of the zip.
        session_id: goes as ``MLHPC_SESSION`` into the environment of all processes.
        runs_dir: the folder of all allocations of this session.
    """

    def __init__(
        self,
        partition: Partition,
        client: SlurmClient,
        payload: Callable[[str], Path | None],
        *,
        session_id: str,
        runs_dir: Path,
    ) -> None:
        self._here = settings_of(partition).here
        self._children = InsideJobClient(client, self._here, session_id=session_id, runs_dir=runs_dir)
        super().__init__(partition, self._children, payload)

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* does not fit into the rest of the allocation, or an empty string."""
        return beyond_job(spec, self._here, time.time_ns())

    def longest(self) -> float | None:
        """Return None: :meth:`validate` refuses what exceeds the rest of the job."""
        return None

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Refuse: no plan outlives the session that started it.

        Raises:
            ProvisionError: always.
        """
        del native_id
        raise ProvisionError("rejected", f"{plan.allocation_id}: mlhpc_here takes over no jobs")

    def close(self) -> None:
        """End the remaining plans, and the guardian."""
        try:
            super().close()
        finally:
            self._children.close()


@dataclass
class _Child:
    """A started plan: the process of its job script, which becomes its batch."""

    submission: JobSubmission
    allocation_id: str
    process: subprocess.Popen[bytes]
    deadline: float
    started_ns: int
    ended: SchedulerJob | None = None
    cancelled: bool = False
    late: bool = False

    @property
    def run_ids(self) -> frozenset[str]:
        """Names of its job steps: each run has a folder of its own."""
        with contextlib.suppress(OSError):
            return frozenset(path.name for path in self.submission.directory.iterdir() if path.is_dir())
        return frozenset()


class InsideJobClient:
    """A SlurmClient whose jobs are children of this process. It never changes the surrounding job itself.

    Args:
        real: for queries about nodes and steps.
        here: what :func:`with_job` set: job, nodes, until_ns.
        session_id: the value of ``MLHPC_SESSION`` of all processes.
        runs_dir: the folder of all allocations of this session.
    """

    def __init__(
        self, real: SlurmClient, here: Mapping[str, Any], *, session_id: str, runs_dir: Path
    ) -> None:
        self._real = real
        self._job: str = here["job"]
        self._nodes: tuple[str, ...] = tuple(here["nodes"])
        self._session_id = session_id
        self._runs_dir = runs_dir
        self._children: dict[str, _Child] = {}  #: by unique name, in the order of their start
        self._guardian: subprocess.Popen[bytes] | None = None
        self.title, self.name, self.calls, self.version = real.title, real.name, real.calls, real.version
        self.key, self.expand = real.key, real.expand
        self.nodes, self.drain, self.resume, self.reservations = (
            real.nodes,
            real.drain,
            real.resume,
            real.reservations,
        )
        self.partition, self.qos = real.partition, real.qos

    def submit(self, submission: JobSubmission) -> str:
        """Start the job script and return the id of the surrounding job.

        Raises:
            SchedulerRefused: it cannot be started.
        """
        self._guard()
        allocation_id = submission.name.removeprefix("mlhpc-")
        environ = {
            **copy_of(os.environ),
            "MLHPC_SESSION": self._session_id,
            "MLHPC_ALLOCATION": allocation_id,
        }
        try:
            plan = read_json(read_private(submission.directory / "plan.json"))
            with (submission.directory / "slurm.out").open("ab") as output:
                process = start_in_new_session(
                    ["/bin/bash", str(submission.script)],
                    env=environ,
                    cwd=submission.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            raise SchedulerRefused(f"bash {submission.script}: {error.strerror}") from error
        deadline = time.monotonic() + float(plan["time_limit_s"]) + OVERTIME_S
        self._children[submission.name] = _Child(submission, allocation_id, process, deadline, time.time_ns())
        return self._job

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return children by *names*; by *ids* the last one, as all of them have the surrounding job's id."""
        del user
        children = list(self._children.values())
        if names:
            selected = [child for child in children if child.submission.name in set(names)]
        else:
            selected = children[-1:] if self._job in ids else []
        return [self._as_observed(child) for child in selected]

    def queue(self, partition: str) -> list[SchedulerJob]:
        """Return no jobs: none waits here."""
        del partition
        return []

    def accounting(self, ids: Collection[str]) -> list[SchedulerJob]:
        """Return the last child with its own steps from the accounting."""
        found = [job for job in self._real.accounting(ids) if self._children and job.id == self._job]
        child = next(reversed(self._children.values()), None)
        if not found or child is None:
            return []
        steps = tuple(step for step in found[0].steps if step.name in child.run_ids)
        return [replace(self._as_observed(child), steps=steps)]

    def steps(self, ids: Collection[str]) -> dict[str, tuple[JobStep, ...]]:
        """Return the running steps of the last child."""
        child = next(reversed(self._children.values()), None)
        if child is None or self._job not in ids:
            return {}
        mine = child.run_ids
        found = self._real.steps([self._job]).get(self._job, ())
        return {self._job: tuple(step for step in found if step.name in mine)}

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """End all children if *ids* has the surrounding job; returns when no process of them is left."""
        del signal
        for child in self._children.values():
            if self._job in ids and child.ended is None:
                child.cancelled = True
                self._end(child)

    def close(self) -> None:
        """End the remaining children, and the guardian, which then does nothing. Idempotent."""
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
        """Start the guardian if none runs: it ends all processes of this session if this process dies."""
        if self._guardian is not None and self._guardian.poll() is None:
            return
        module = "pytest_mlhpc.provision.slurm.inside_job"
        try:
            self._guardian = start_in_new_session(
                [sys.executable, "-P", "-m", module, self._session_id, self._job, str(self._runs_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise SchedulerRefused(f"cannot start the guardian: {error}") from error

    def _as_observed(self, child: _Child) -> SchedulerJob:
        """Return *child* as a job; the first call after its end ends the processes that outlived it."""
        code = child.process.poll()
        if child.ended is None and code is None and time.monotonic() > child.deadline:
            child.late = True
            self._end(child)
            code = child.process.returncode
        if code is not None and child.ended is None:
            end_processes("MLHPC_ALLOCATION", child.allocation_id, 0.5)
            child.ended = self._as_job(child, self._end_state(child, code), code)
        return child.ended or self._as_job(child, SchedulerState.RUNNING, None)

    def _end_state(self, child: _Child, code: int) -> SchedulerState:
        if child.cancelled:
            return SchedulerState.CANCELLED
        if child.late:
            return SchedulerState.TIMEOUT
        if code == 0:
            return SchedulerState.COMPLETED
        with contextlib.suppress(SchedulerError):  # the surrounding job may have ended
            for job in self._real.jobs(ids=[self._job]):
                if job.state.ended:
                    return job.state
        return SchedulerState.FAILED

    def _as_job(self, child: _Child, state: SchedulerState, code: int | None) -> SchedulerJob:
        return SchedulerJob(
            id=self._job,
            name=child.submission.name,
            user=str(os.getuid()),
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
        """End a child: SIGTERM, by which the batch ends its runs in order, then SIGKILL, then its job steps."""
        with contextlib.suppress(ProcessLookupError):
            if child.process.poll() is None:
                os.killpg(child.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(END_LIMIT_S)
        end_processes("MLHPC_ALLOCATION", child.allocation_id, 0.5)
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
        with contextlib.suppress(SchedulerError):
            left = self._real.steps([self._job]).get(self._job, ())
            mine = [f"{self._job}.{step.id}" for step in left if step.name in child.run_ids]
            if mine:
                self._real.cancel(mine)


#: Time between SIGTERM and SIGKILL, in seconds: the batch gives its ranks 5, then waits for their job step.
GUARDIAN_GRACE_S = 12.0

#: Time limit for job steps to vanish, and the interval between two queries, in seconds.
STEPS_LIMIT_S, CHECK_INTERVAL_S = 30.0, 1.0


def guard(session_id: str, job_id: str, runs_dir: str) -> int:
    """Wait until pytest ends or sends ``q``, which means that nothing is left; without that, end what it started.

    A process of its own (``python -P -m pytest_mlhpc.provision.slurm.inside_job SESSION JOB RUNS_DIR``), whose standard input
    is a pipe from pytest. It ends processes of this node by their cookie, and then job steps, which may be on other nodes, by
    their names: the ids of the session's runs, which are the folders ``RUNS_DIR/*/*``. The allocation goes on.
    """
    detach()
    if wait_for_harness():
        return 0
    end_processes("MLHPC_SESSION", session_id, GUARDIAN_GRACE_S)
    end_steps(CliClient(), job_id, Path(runs_dir))
    return 0


def end_steps(client: SlurmClient, job_id: str, runs_dir: Path) -> bool:
    """Cancel the job's steps that are runs of this session; return whether none is left."""
    names = frozenset(path.name for path in runs_dir.glob("*/*") if path.is_dir())
    deadline = time.monotonic() + STEPS_LIMIT_S
    while time.monotonic() < deadline:
        try:
            left = [step.id for step in client.steps([job_id]).get(job_id, ()) if step.name in names]
            if not left:
                return True
            client.cancel([f"{job_id}.{step}" for step in left], "KILL")
        except SchedulerError:
            pass  # the next query may be answered
        time.sleep(CHECK_INTERVAL_S)  # only another query shows a step's end
    return False


if __name__ == "__main__":
    sys.exit(guard(*sys.argv[1:4]))
