"""Cancelling jobs until they are gone, however Slurm feels about it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pytest_mlhpc.provision.slurm.client import Job, SlurmClient, SlurmError, State
from pytest_mlhpc.provision.slurm.submitting import me

#: How long cancelled jobs may take to go: KillWait is 30 s by default, and epilogs take their time.
GONE_S = 90.0
#: How long Slurm may not answer before cancelling is left to a later session, in seconds.
SILENT_S = 60.0
#: Time between two looks, first and last.
LOOK_FIRST_S, LOOK_MOST_S = 0.3, 5.0


def cancel_jobs(client: SlurmClient, named: Sequence[tuple[str, str]], *, wait_s: float = GONE_S) -> set[str]:
    """Cancel jobs given as (unique name, id or "") and wait until they are gone; return names of which that is not sure.

    A job without an id may have been submitted without an answer: it is looked for by its name. An id alone is not
    trusted, as Slurm uses them again: the name must fit.
    """
    left = dict(named)
    began = time.monotonic()
    pause, told = LOOK_FIRST_S, False
    while left:
        try:
            jobs = _ours(client, left)
            told = told or not jobs
            if jobs and not told:
                client.cancel([job.id for job in jobs])
                told = True
                if wait_s <= 0:
                    return set()
                jobs = _ours(client, left)
            left = {job.name: job.id for job in jobs}
            limit = wait_s
        except SlurmError:
            limit = min(wait_s, SILENT_S)
        if not left or time.monotonic() - began > limit:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, LOOK_MOST_S)
    return set(left)


def confirm_gone(client: SlurmClient, ids: Sequence[str]) -> None:
    """Wait until jobs whose batch has said that it is over are gone; cancel those that are not soon."""
    if not ids:
        return
    until, pause = time.monotonic() + GONE_S / 3, LOOK_FIRST_S
    try:
        while left := [job for job in client.jobs(ids=ids) if not job.state.ended and job.user in me({})]:
            if time.monotonic() > until:
                client.cancel([job.id for job in left if job.state is not State.COMPLETING])
                return
            time.sleep(pause)
            pause = min(pause * 1.5, LOOK_MOST_S)
    except SlurmError:
        return  # their time limit ends them


def _ours(client: SlurmClient, named: dict[str, str]) -> list[Job]:
    found = client.jobs(names=list(named))
    return [job for job in found if job.name in named and job.user in me({}) and not job.state.ended]
