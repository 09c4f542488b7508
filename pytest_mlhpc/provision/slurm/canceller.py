"""Cancelling jobs that are still followed: those that were given up, and those that were submitted once too often."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pytest_mlhpc.provision.slurm.allocation import Allocation
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.cancelling import cancel_now, cancel_others
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError


class Canceller:
    """Cancels by one call for all, without waiting: whoever asks about the jobs sees when they are gone.

    Args:
        client: how Slurm is reached.
        backoff: while it waits, nothing is cancelled.
        monotonic: the provisioner's clock, in seconds.
    """

    def __init__(self, client: SlurmClient, backoff: Backoff, monotonic: Callable[[], float]) -> None:
        self._client = client
        self._backoff = backoff
        self._monotonic = monotonic

    def cancel(self, allocations: Collection[Allocation]) -> None:
        """Cancel what is marked so and was not cancelled yet; without answer that is tried again."""
        ours = [one for one in allocations if one.submit_tries or one.submitted]
        marked = [one for one in ours if one.cancelling and one.cancelled_at is None]
        twins = [one for one in ours if one.twin and not one.cancelling]
        if not (marked or twins) or self._backoff.waits():
            return
        try:
            if marked:
                cancel_now(self._client, [one.name for one in marked])
            if twins:
                cancel_others(self._client, {one.name: one.handle.native_id for one in twins})
        except SlurmError as error:
            self._backoff.failed("cancel", error)
            return
        self._backoff.answered("cancel")
        for one in marked:
            one.cancelled_at = self._monotonic()
        for one in twins:
            one.twin = False
