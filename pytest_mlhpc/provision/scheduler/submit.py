"""Submitting and cancelling: a plan becomes exactly one job, and a cancelled job is followed until it is gone.

Read here what is written for a job, and how a submission without an answer is neither lost nor repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.ledger_entry import job_name, user_name
from pytest_mlhpc.jobs.provisioner import Event
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.files import check_private, make_private, outcome_of
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import stage
from pytest_mlhpc.provision.payload import (
    cannot_write,
    environment_of,
    make_directory,
    no_room,
    write_private,
)
from pytest_mlhpc.provision.scheduler.allocation import JobAllocation
from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerClient,
    SchedulerError,
    SchedulerJob,
    SchedulerState,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.scheduler.poll import GONE_S, Backoff
from pytest_mlhpc.provision.scheduler.script import (
    ScriptRules,
    rank_wrapper,
    render_script,
    with_software,
    without_software,
)

if TYPE_CHECKING:
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns

#: How long a submission is retried while the scheduler does not answer, in seconds.
SUBMIT_LIMIT_S = 600.0
#: How long cancelling is retried while the scheduler does not answer, in seconds; then a later session cancels.
UNANSWERED_LIMIT_S = 60.0
#: Interval between two checks whether jobs are gone, first and longest, in seconds.
FIRST_CHECK_S, MAX_CHECK_S = 0.3, 5.0


def lines_directory(plan: Plan) -> Path:
    """Return the folder of a session's batches; one listing of it serves all."""
    return Path(plan.directory).parent / "lines"


def write_job(
    plan: Plan,
    partition: Partition,
    payload: Path | None,
    rules: ScriptRules,
    runs: RemoteRuns | None = None,
) -> JobSubmission:
    """Write plan and job script into the plan's directory, and return the submission.

    Where *runs* copies them to another file system, they name paths as nodes see them; the plan's directory is the one here.

    Raises:
        ProvisionError: ``disk_full`` or ``not_writable``, they cannot be written; ``unsafe_directory``, another user could change them.
    """
    directory = Path(plan.directory)
    name = job_name(plan.allocation_id)
    partition = replace(
        partition, scheduler_options={**partition.scheduler_options, **plan.scheduler_options}
    )
    environment = environment_of(plan, partition)
    staged, zipped = plan, payload
    if runs is not None:
        plan = runs.plan(plan)
        payload = Path(runs.there(payload)) if payload else None
    plan = replace(with_launch_options(plan, partition, payload, rules), job=rules.job)
    if differing_software(plan, partition):
        environment = without_software(environment)  # each run has its own
    script = render_script(
        plan,
        partition,
        environment,
        rules,
        name=name,
        lines_dir=str(lines_directory(plan)),
        payload=str(payload) if payload else None,
    )
    try:
        make_directory(directory, *(run.run_id for run in plan.runs))
        make_private(lines_directory(staged))
        stage(staged)
        write_private(directory / "plan.json", json.dumps(to_json(replace(plan, directory=staged.directory))))
        write_private(directory / "job.sh", script)
        if zipped:
            check_private(zipped)
    except OSError as error:
        raise cannot_write(error, directory) from error
    return JobSubmission(name, directory / "job.sh", directory)


def differing_software(plan: Plan, partition: Partition) -> bool:
    """Return whether runs of *plan* want different modules, virtual environments or other set-ups."""
    own = [environment_of(plan, partition, run) for run in plan.runs if run.environment]
    software = {tuple(with_software((), one)) for one in (environment_of(plan, partition), *own)}
    return len(software) > 1


def with_launch_options(plan: Plan, partition: Partition, payload: Path | None, rules: ScriptRules) -> Plan:
    """Return *plan* with the arguments of this partition's launchers and containers in each of its runs.

    Raises:
        UsageError: the container's runtime cannot be used here, or cannot take a path.
    """
    runs, differing = [], differing_software(plan, partition)
    for run in plan.runs:
        environment = environment_of(plan, partition, run)
        folders = [
            str(Path(plan.directory).parent),
            str(payload.parent) if payload else "",
            run.data_path or "",
        ]
        binds = [path for path in folders if path]
        options = rules.launcher_options(
            partition,
            environment,
            binds,
            launcher=run.launcher,
            ranks_per_node=-(-run.started // run.nodes),
        )
        arguments = rank_wrapper(environment, binds, partition.accelerator)
        if differing:
            arguments = (*with_software((), environment), *arguments)
        runs.append(replace(run, launcher_options=options, wrapper=arguments))
    return replace(plan, runs=tuple(runs))


class _Caller:
    """What submits or cancels.

    Args:
        client: how the scheduler is reached.
        backoff: while it waits, no job is submitted or cancelled.
        monotonic: the provisioner's clock, in seconds.
    """

    def __init__(self, client: SchedulerClient, backoff: Backoff, monotonic: Callable[[], float]) -> None:
        self._client = client
        self._backoff = backoff
        self._monotonic = monotonic


class Submitter(_Caller):
    """Submits allocations whose files are written."""

    def submit(self, allocation: JobAllocation) -> list[Event]:
        """Submit, unless the scheduler accepted an earlier try without answer. Without an answer the caller tries again later.

        Raises:
            ProvisionError: ``rejected``, or ``never_scheduled`` as there was no answer for too long.
        """
        if self._backoff.waits():
            return self._later(allocation)
        repeated, allocation.submit_tries = allocation.submit_tries > 0, allocation.submit_tries + 1
        try:
            if repeated and (job_id := find_submitted(self._client, allocation.name)):
                allocation.note_job_id(job_id)
            else:
                job_id = self._submit_now(allocation)
                allocation.handle = replace(allocation.handle, native_id=job_id)
        except SchedulerUnavailable as error:
            self._backoff.failed("submit", error)
            return self._later(allocation)
        except SchedulerError as error:
            raise ProvisionError("rejected", str(error)) from error
        self._backoff.answered("submit")
        allocation.since = self._monotonic()
        return []

    def _submit_now(self, allocation: JobAllocation) -> str:
        directory = allocation.handle.directory
        try:
            for name in ("job.sh", "plan.json"):  # time may have passed since they were written
                check_private(directory / name)
        except OSError as error:
            raise ProvisionError(outcome_of(error, "rejected"), no_room(error, directory)) from error
        try:
            return self._client.submit(JobSubmission(allocation.name, directory / "job.sh", directory))
        except SchedulerUnusable:
            raise  # it cannot have been accepted
        except SchedulerUnavailable:
            allocation.note_unanswered(self._monotonic())  # it may have been accepted, or may be later
            raise

    def _later(self, allocation: JobAllocation) -> list[Event]:
        trouble = self._backoff.trouble
        if self._monotonic() - allocation.since > SUBMIT_LIMIT_S:
            raise ProvisionError("never_scheduled", f"{self._client.title} did not take the job: {trouble}")
        return allocation.state_events(JobState.QUEUED, f"not submitted yet: {trouble}")


class Canceller(_Caller):
    """Cancels jobs that were given up and duplicates, by one call without waiting; the poller confirms that they are gone."""

    def cancel(self, allocations: Collection[JobAllocation]) -> None:
        """Cancel the marked jobs and the duplicates that were not cancelled yet; without an answer the next call tries again."""
        submitted = [one for one in allocations if one.submit_tries or one.submitted]
        marked = [one for one in submitted if one.cancelling and one.cancelled_at is None]
        duplicates = [one for one in submitted if one.duplicate and not one.cancelling]
        if not (marked or duplicates) or self._backoff.waits():
            return
        try:
            if marked:
                cancel_now(self._client, [one.name for one in marked])
            if duplicates:
                cancel_duplicates(self._client, {one.name: one.handle.native_id for one in duplicates})
        except SchedulerError as error:
            self._backoff.failed("cancel", error)
            return
        self._backoff.answered("cancel")
        for one in marked:
            one.cancelled_at = self._monotonic()
        for one in duplicates:
            one.duplicate = False


def cancel_now(client: SchedulerClient, names: Collection[str]) -> None:
    """Cancel own jobs of these unique names without waiting until they are gone, by one query and one call.

    Raises:
        SchedulerError: the scheduler does not answer, or refuses.
    """
    jobs = own_jobs(client, names)
    if jobs:
        client.cancel([job.id for job in jobs])


def cancel_jobs(
    client: SchedulerClient,
    names: Collection[str],
    silent_s: float = UNANSWERED_LIMIT_S,
    *,
    cancelled: bool = False,
) -> set[str]:
    """Cancel own jobs of these unique names and wait until they are gone; return names of those that may not be.

    Ids are not used, as schedulers reuse them and a submission without an answer has none. *silent_s*: how long to try while
    the scheduler does not answer, in seconds; once at least. *cancelled*: the scheduler has accepted that before.
    """
    left = set(names)
    began = time.monotonic()
    pause = FIRST_CHECK_S
    while left:
        called_at = time.monotonic()
        try:
            jobs = own_jobs(client, left)
            cancelled = cancelled or not jobs
            if jobs and not cancelled:
                client.cancel([job.id for job in jobs])
                cancelled = True
                jobs = own_jobs(client, left)
            left = {job.name for job in jobs}
            limit = GONE_S
        except SchedulerError:
            # Another try may take as long as this one: it has to end within the limit.
            limit = silent_s - (time.monotonic() - called_at)
        if not left or time.monotonic() - began > limit:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, MAX_CHECK_S)
    return left


def cancel_duplicates(client: SchedulerClient, valid: Mapping[str, str]) -> None:
    """Cancel own jobs that have a name of *valid* (unique name -> id) and another id: repeated submissions.

    Raises:
        SchedulerError: the scheduler does not answer, or refuses.
    """
    others = [job.id for job in own_jobs(client, valid) if job.id != valid[job.name]]
    if others:
        client.cancel(others)


def confirm_ended(client: SchedulerClient, names: Collection[str]) -> None:
    """Wait until jobs whose batch has ended are gone; cancel those that are not after a third of GONE_S.

    They are given by unique names. A pending one is the duplicate of a submission without an answer.
    """
    if not names:
        return
    until, pause = time.monotonic() + GONE_S / 3, FIRST_CHECK_S
    try:
        while left := own_jobs(client, names):
            overdue = time.monotonic() > until
            wrong = [
                job.id
                for job in left
                if job.state.pending or (overdue and job.state is not SchedulerState.COMPLETING)
            ]
            if wrong:
                client.cancel(wrong)
            if overdue:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, MAX_CHECK_S)
    except SchedulerError:
        return  # their time limit ends them


def find_submitted(client: SchedulerClient, name: str) -> str:
    """Return the id of this user's job called *name*, empty if the scheduler knows none.

    Raises:
        SchedulerError: the scheduler does not answer, or refuses.
    """
    return next((job.id for job in own_jobs(client, [name], ended=True)), "")


def own_jobs(client: SchedulerClient, names: Collection[str], *, ended: bool = False) -> list[SchedulerJob]:
    """Return this user's jobs of these names; ended ones only with *ended*."""
    uid = str(os.getuid())
    own = {uid, user_name()}
    found = client.jobs(names=list(names), user=uid)
    return [job for job in found if job.name in names and job.user in own and (ended or not job.state.ended)]
