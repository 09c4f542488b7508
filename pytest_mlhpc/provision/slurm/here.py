"""``--here``: inside an allocation that somebody made with salloc or sbatch. Nothing is submitted.

The job script of each plan is run as a child of this process: its ``#SBATCH`` lines are comments to bash, and what it ends
with, the batch, finds the nodes of the job around it. All else is done as for a job of one's own: only who "submits" and
who "cancels" differs (:class:`HereClient`). Whatever ends pytest ends all that it started here, but not the allocation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError, UsageError
from pytest_mlhpc.jobs.packing import time_of
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.base import Event, Handle
from pytest_mlhpc.provision.slurm.client import Job, SlurmClient
from pytest_mlhpc.provision.slurm.here_client import HereClient
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.system.model import Partition, Target

if TYPE_CHECKING:
    from pytest_mlhpc.options import Settings


def place(
    targets: Sequence[Target],
    environ: Mapping[str, str],
    client_of: Callable[[Partition], SlurmClient],
    settings: Settings,
) -> tuple[Target, ...]:
    """Return the targets that are the partition of the job around us, with what is known of that job.

    Raises:
        UsageError: there is no job around us, or it is in another partition than was selected.
        SlurmError: Slurm does not answer.
    """
    for option, asked in (
        ("--detach", settings.detach),
        ("--wait", settings.wait_s is not None),
        ("--resume", settings.resume is not None),
    ):
        if asked:
            raise UsageError(
                f"--here and {option}: nothing in an allocation outlives the pytest that runs in it"
            )
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise UsageError(
            "--here: there is no allocation around this pytest (SLURM_JOB_ID is not set); start it by salloc or sbatch, "
            "or leave --here out, so that jobs are submitted"
        )
    slurm = [target for target in targets if target.partition.scheduler == "slurm"]
    if not slurm:
        raise UsageError(f"--here: {targets[0].partition.id} is no partition of Slurm")
    job = next(iter(client_of(slurm[0].partition).jobs(ids=[job_id])), None)
    if job is None or job.state.ended or job.state.pending:
        state = job.state.value.lower() if job else "unknown to Slurm"
        raise UsageError(f"--here: job {job_id} (SLURM_JOB_ID) is {state}; it has to be running")
    ours = [target for target in slurm if settings_of(target.partition).partition in {"", job.partition}]
    named = [one for one in targets if one.partition.id in settings.systems and one not in ours]
    if named or not ours:
        others = ", ".join(
            f"{one.partition.id} is {settings_of(one.partition).partition!r}"
            if one.partition.scheduler == "slurm"
            else f"{one.partition.id} has scheduler {one.partition.scheduler}"
            for one in named or slurm
        )
        raise UsageError(f"--here: job {job_id} is in Slurm's partition {job.partition!r}, but {others}")
    names = sorted({target.partition.id for target in ours})
    if len(names) > 1:
        raise UsageError(
            f"--here: several partitions fit to job {job_id}: {', '.join(names)}; select one of them"
        )
    return tuple(replace(one, partition=inside(one.partition, job)) for one in ours)


def inside(partition: Partition, job: Job) -> Partition:
    """Return *partition* as its provisioner reads it when all is to run in *job*."""
    until_ns = job.end_ns or (job.start_ns + int(job.time_limit_s * 1e9) if job.time_limit_s else 0)
    here = {"job": job.id, "nodes": list(job.nodes), "until_ns": until_ns}
    return replace(partition, scheduler_options={**partition.scheduler_options, "here": here})


def beyond_job(spec: JobSpec, here: Mapping[str, Any], now_ns: int) -> str:
    """Return why *spec* cannot run in the job that *here* describes, or an empty string."""
    count = len(here["nodes"])
    if spec.nodes > count:
        return f"{spec.nodes} nodes are asked for, job {here['job']} has {count} (--here)"
    left_s = (here["until_ns"] - now_ns) / 1e9
    if here["until_ns"] and time_of([spec]) > left_s:
        return (
            f"{time_of([spec]):.0f} s are needed (time_limit and margin), but job {here['job']} ends in {max(0.0, left_s):.0f} s "
            "(--here); a shorter limit is set by --set slurm.time=5m or time_limit="
        )
    return ""


class HereProvisioner:
    """Runs plans in the allocation around us, one after the other. Everything ends with this object, or this process.

    Args:
        partition: as :func:`inside` made it.
        client: how Slurm is asked of the job's steps and nodes.
        payload: sha256 -> where the zip lies.
        session_id: goes as ``MLHPC_SESSION`` into the environment of all that is started.
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
        self._client = HereClient(client, self._here, session_id=session_id, runs_dir=runs_dir)
        self._inner = SlurmProvisioner(partition, self._client, payload)

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* does not fit into what is left of the allocation, or an empty string."""
        return beyond_job(spec, self._here, time.time_ns())

    def longest(self) -> float | None:
        """Return None: what does not fit into the rest of the job is refused by itself."""
        return None

    def submit(self, plan: Plan) -> Handle:
        """Start *plan* as a child of this process. Raises ProvisionError like :class:`SlurmProvisioner`."""
        return self._inner.submit(plan)

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Refuse: nothing outlives the session that started it here.

        Raises:
            ProvisionError: always.
        """
        del native_id
        raise ProvisionError("rejected", f"{plan.allocation_id}: --here takes over no jobs")

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        return self._inner.events(handles, timeout_s)

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._inner.wake()

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Leave a note for the batch, which looks for it before it starts a run."""
        self._inner.skip(handle, run_ids)

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """End plans and everything in them, but not the allocation."""
        return self._inner.cancel(handles)

    def close(self) -> None:
        """End what is left, and the guardian."""
        try:
            self._inner.close()
        finally:
            self._client.close()
