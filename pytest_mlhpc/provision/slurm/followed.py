"""The allocations of one partition that are out, and what there is to tell of them."""

from __future__ import annotations

from collections.abc import Callable

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.base import AllocationEnded, Event, LineArrived
from pytest_mlhpc.provision.reapers import UNDER_WAY_S
from pytest_mlhpc.provision.slurm.allocation import Allocation


class Followed:
    """Allocations by their id, and events that nobody has fetched yet.

    Args:
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.allocations: dict[str, Allocation] = {}
        self.found: list[Event] = []
        #: Unique name and id of jobs whose end was read from files, not yet from Slurm.
        self.ended: list[tuple[str, str]] = []

    def take(self) -> list[Event]:
        """Return the events, and forget them."""
        found, self.found = self.found, []
        return found

    def give_up(self, allocation: Allocation, error: MlhpcError) -> None:
        """Let an allocation end with *error* once its job is surely gone, as the ledger must not forget it before."""
        allocation.cancelling = True
        allocation.given_up = allocation.given_up or error

    def under_way(self, allocation: Allocation) -> bool:
        """Whether a submission without answer may still get through."""
        return allocation.lost_at is not None and self.now() - allocation.lost_at < UNDER_WAY_S

    def end(self, allocation: Allocation, error: MlhpcError | None, *, unsure: bool = False) -> None:
        """Tell that nothing more will come; *unsure*: its job may still be there, or turn up."""
        for message in allocation.conversation.finish() if error is None else []:
            self.found.append(LineArrived(allocation.handle, message))
        del self.allocations[allocation.handle.id]
        if allocation.submit_tries or allocation.submitted:
            self.ended.append((allocation.name, allocation.handle.native_id))
        self.found.append(AllocationEnded(allocation.handle, error, unsure))
