"""Handing a plan to Slurm: its files, its job script, and a submission that is neither lost nor made twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.jobs.submitted import job_name
from pytest_mlhpc.provision.base import Event
from pytest_mlhpc.provision.local_process import no_room
from pytest_mlhpc.provision.plans import environment_of, write_private
from pytest_mlhpc.provision.slurm.allocation import Allocation
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError, SlurmUnavailable, Submission
from pytest_mlhpc.provision.slurm.environment import launcher_options, wrapper
from pytest_mlhpc.provision.slurm.script import render
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.store import make_directories
from pytest_mlhpc.system.model import Environment, Partition

#: How long a submission is tried again while Slurm does not answer, in seconds.
SUBMIT_LIMIT_S = 600.0


def lines_folder(plan: Plan) -> Path:
    """Return the folder in which the batches of a session write, one look at which serves all."""
    return Path(plan.directory).parent / "lines"


def prepare(plan: Plan, partition: Partition, payload: Path | None) -> Submission:
    """Write plan and job script below the plan's directory and return what is to be submitted.

    Raises:
        ProvisionError: ``disk_full``, they cannot be written.
    """
    directory = Path(plan.directory)
    name = job_name(plan.allocation_id)
    environment = environment_of(plan, partition)
    plan = equipped(plan, partition, environment, payload)
    script = render(
        plan,
        partition,
        environment,
        name=name,
        lines_dir=str(lines_folder(plan)),
        payload=str(payload) if payload else None,
    )
    try:
        make_directories(directory.parent, directory.parent.parent.parent)
        directory.mkdir(parents=True, exist_ok=True)
        lines_folder(plan).mkdir(exist_ok=True)
        for run in plan.runs:
            (directory / run.run_id).mkdir(exist_ok=True)
        write_private(directory / "plan.json", json.dumps(to_json(plan)))
        write_private(directory / "job.sh", script)
    except OSError as error:
        raise ProvisionError("disk_full", no_room(error, directory)) from error
    return Submission(name, directory / "job.sh", directory)


def equipped(plan: Plan, partition: Partition, environment: Environment, payload: Path | None) -> Plan:
    """Return *plan* with the words that this partition's launchers and containers need in each of its runs.

    Raises:
        UsageError: the container's runtime cannot be used here, or a path cannot be told to it.
    """
    runs = []
    for run in plan.runs:
        seen = [str(Path(plan.directory).parent), str(payload.parent) if payload else "", run.data_path or ""]
        binds = [path for path in seen if path]
        options = launcher_options(
            partition,
            environment,
            binds,
            launcher=run.launcher,
            ranks_per_node=-(-run.ranks // run.nodes),
        )
        words = wrapper(environment, binds, partition.accelerator)
        runs.append(replace(run, launcher_options=options, wrapper=words))
    return replace(plan, runs=tuple(runs))


class Submitter:
    """Submits allocations whose files are written.

    Args:
        client: how Slurm is reached.
        backoff: while it waits, nothing is submitted.
        monotonic: the provisioner's clock, in seconds.
    """

    def __init__(self, client: SlurmClient, backoff: Backoff, monotonic: Callable[[], float]) -> None:
        self._client = client
        self._backoff = backoff
        self._monotonic = monotonic

    def submit(self, allocation: Allocation) -> list[Event]:
        """Submit, unless an earlier try without answer got through; without answer it is to be tried again later.

        Raises:
            ProvisionError: ``rejected``, or ``never_scheduled`` as Slurm did not answer for too long.
        """
        if self._backoff.waits():
            return self._later(allocation)
        again, allocation.submit_tries = allocation.submit_tries > 0, allocation.submit_tries + 1
        try:
            if again and (job_id := find_submitted(self._client, allocation.name)):
                allocation.find(job_id)
            else:
                job_id = self._hand_in(allocation)
                allocation.handle = replace(allocation.handle, native_id=job_id)
        except SlurmUnavailable as error:
            self._backoff.failed("submit", error)
            return self._later(allocation)
        except SlurmError as error:
            raise ProvisionError("rejected", str(error)) from error
        self._backoff.answered("submit")
        allocation.since = self._monotonic()
        return []

    def _hand_in(self, allocation: Allocation) -> str:
        directory = allocation.handle.directory
        try:
            return self._client.submit(Submission(allocation.name, directory / "job.sh", directory))
        except SlurmUnavailable:
            allocation.lose(self._monotonic())  # it may have got through all the same, or do so later
            raise

    def _later(self, allocation: Allocation) -> list[Event]:
        trouble = self._backoff.trouble
        if self._monotonic() - allocation.since > SUBMIT_LIMIT_S:
            raise ProvisionError("never_scheduled", f"Slurm did not take the job: {trouble}")
        return allocation.state(JobState.QUEUED, f"not submitted yet: {trouble}")


def find_submitted(client: SlurmClient, name: str) -> str:
    """Return the id of our job called *name*, empty if Slurm knows none: a submission may have got no answer.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    found = client.jobs(names=[name], user=str(os.getuid()))
    ours = [job for job in found if job.name == name and job.user in me(os.environ)]
    return ours[0].id if ours else ""


def me(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names that Slurm may call this user by."""
    del environ  # neither LOGNAME nor USER counts: the kernel's word does
    import pwd

    uid = os.getuid()
    try:
        return frozenset({pwd.getpwuid(uid).pw_name, str(uid)})
    except KeyError:
        return frozenset({str(uid)})
