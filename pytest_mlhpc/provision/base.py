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
    """An allocation moved on. ``reason`` is in the scheduler's own words; nodes and native id as far as known.

    ``since_ns`` is when that was (ns UTC), 0: now.
    """

    handle: Handle
    state: JobState
    reason: str = ""
    nodes: tuple[str, ...] = ()
    native_id: str = ""
    since_ns: int = 0


@dataclass(frozen=True)
class LineArrived:
    """A worker line of one run: started, progress, measurement, failed or end, already checked and joined."""

    handle: Handle
    message: Message


@dataclass(frozen=True)
class AllocationEnded:
    """Nothing more will come from this allocation. ``error`` says why if that was not the plan's own end.

    ``unsure``: it may still come to life, as nobody answers; it stays in the ledger.
    """

    handle: Handle
    error: MlhpcError | None = None
    unsure: bool = False


Event = StateChanged | LineArrived | AllocationEnded


class Provisioner(Protocol):
    """Gets nodes, runs a plan on them, reports. Implementations: local, slurm, kubernetes, third parties."""

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here (too many nodes, devices, time), or an empty string."""

    def longest(self) -> float | None:
        """Return the longest allocation that can be had, in seconds; None: any."""

    def submit(self, plan: Plan) -> Handle:
        """Submit *plan*. Returns at once.

        Raises:
            ProvisionError: refused, in the scheduler's own words.
        """

    def events(self, handles: Sequence[Handle], timeout_s: float) -> Iterable[Event]:
        """Return what happened since the last call, waiting at most *timeout_s* if nothing did."""

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once. The only call that may come from another thread."""

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over an allocation that an earlier session submitted; its events come as if it were ours."""

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Tell an allocation that some of its runs are no longer wanted: a courtesy, they may run all the same."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """End allocations and everything in them; returns when nothing of them is left. Idempotent.

        Returns those of which that is not sure as the scheduler does not answer; they stay in the ledger, for a later
        session to clear up.
        """

    def close(self) -> None:
        """Give back every resource of this process. What runs on this machine ends; jobs elsewhere go on."""
