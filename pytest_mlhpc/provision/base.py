"""The provisioner protocol: how nodes are had, for any scheduler. All calls come from one thread per system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.results.lines import Message


@dataclass(frozen=True)
class Handle:
    """One submitted allocation. ``id`` was chosen before submitting; ``native_id`` is the scheduler's own."""

    id: str
    directory: Path
    native_id: str = ""


@dataclass(frozen=True)
class StateChanged:
    """An allocation moved on. ``reason`` is in the scheduler's own words; ``nodes`` as far as known."""

    handle: Handle
    state: JobState
    reason: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LineArrived:
    """A worker line of one run: started, progress, measurement, failed or end, already checked and joined."""

    handle: Handle
    message: Message


@dataclass(frozen=True)
class AllocationEnded:
    """Nothing more will come from this allocation. ``error`` says why if that was not the plan's own end."""

    handle: Handle
    error: MlhpcError | None = None


Event = StateChanged | LineArrived | AllocationEnded


class Provisioner(Protocol):
    """Gets nodes, runs a plan on them, reports. Implementations: local, slurm, kubernetes, third parties."""

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here (too many nodes, devices, time), or an empty string."""

    def submit(self, plan: Plan) -> Handle:
        """Submit *plan*. Returns at once.

        Raises:
            ProvisionError: refused, in the scheduler's own words.
        """

    def events(self, handles: Sequence[Handle], timeout_s: float) -> Iterable[Event]:
        """Return what happened since the last call, waiting at most *timeout_s* if nothing did."""

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once. The only call that may come from another thread."""

    def cancel(self, handle: Handle) -> None:
        """End the allocation and everything in it; returns when nothing of it is left. Idempotent."""

    def close(self) -> None:
        """Cancel what is left and give back every resource. Idempotent."""
