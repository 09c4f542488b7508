"""Cancelling jobs until they are gone, however Slurm feels about it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence

from pytest_mlhpc.provision.slurm.client import Job, SlurmClient, SlurmError, State
from pytest_mlhpc.provision.slurm.submitting import me

#: How long cancelled jobs may take to go: KillWait is 30 s by default, and epilogs take their time.
GONE_S = 90.0
#: How long Slurm may not answer before cancelling is left to a later session, in seconds.
SILENT_S = 60.0
#: Time between two looks, first and last.
LOOK_FIRST_S, LOOK_MOST_S = 0.3, 5.0


def cancel_now(client: SlurmClient, names: Collection[str]) -> None:
    """Cancel our jobs of these unique names without waiting until they are gone: one query, one call.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    jobs = _ours(client, names)
    if jobs:
        client.cancel([job.id for job in jobs])


def cancel_jobs(
    client: SlurmClient, named: Sequence[tuple[str, str]], silent_s: float = SILENT_S
) -> set[str]:
    """Cancel jobs given as (unique name, id or "") and wait until they are gone; return names of which that is not sure.

    A job without an id may have been submitted without an answer: it is looked for by its name. An id alone is not
    trusted, as Slurm uses them again: the name must fit. *silent_s*: how long to try while Slurm does not answer, once at least.
    """
    left = dict(named)
    began = time.monotonic()
    pause, told = LOOK_FIRST_S, False
    while left:
        took = time.monotonic()
        try:
            jobs = _ours(client, left)
            told = told or not jobs
            if jobs and not told:
                client.cancel([job.id for job in jobs])
                told = True
                jobs = _ours(client, left)
            left = {job.name: job.id for job in jobs}
            limit = GONE_S
        except SlurmError:
            # Another try may take as long as this one: nobody waits for that beyond the limit.
            limit = silent_s - (time.monotonic() - took)
        if not left or time.monotonic() - began > limit:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, LOOK_MOST_S)
    return set(left)


def cancel_others(client: SlurmClient, kept: Mapping[str, str]) -> None:
    """Cancel our jobs that have one of the names of *kept* (unique name -> id) and another id: submitted once too often.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    others = [job.id for job in _ours(client, kept) if job.id != kept[job.name]]
    if others:
        client.cancel(others)


def confirm_gone(client: SlurmClient, named: Sequence[tuple[str, str]]) -> None:
    """Wait until jobs whose batch has said that it is over are gone; cancel those that are not soon.

    They are given as for :func:`cancel_jobs`. One that still waits for nodes is the second of a submission without answer.
    """
    if not named:
        return
    names = dict(named)
    until, pause = time.monotonic() + GONE_S / 3, LOOK_FIRST_S
    try:
        while left := _ours(client, names):
            overdue = time.monotonic() > until
            wrong = [
                job.id for job in left if job.state.pending or (overdue and job.state is not State.COMPLETING)
            ]
            if wrong:
                client.cancel(wrong)
            if overdue:
                return
            time.sleep(pause)
            pause = min(pause * 1.5, LOOK_MOST_S)
    except SlurmError:
        return  # their time limit ends them


def _ours(client: SlurmClient, named: Collection[str]) -> list[Job]:
    found = client.jobs(names=list(named), user=str(os.getuid()))
    return [job for job in found if job.name in named and job.user in me({}) and not job.state.ended]
