"""The provisioner protocol, by which the queue gets nodes from any scheduler, its events, and its clock.

Read it to add a scheduler. All calls come from one thread per partition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import Plan


@dataclass(frozen=True)
class Handle:
    """One submitted allocation. ``id`` was chosen before submitting; ``native_id`` is the scheduler's own."""

    id: str
    directory: Path
    native_id: str = ""


@dataclass(frozen=True)
class StateChanged:
    """An allocation has a new state. ``reason`` is the scheduler's own text; nodes and native id are as far as known.

    ``since_ns`` is the time of the change (ns UTC), 0: now. ``beside`` names another user of resources that are exclusive.
    """

    handle: Handle
    state: JobState
    reason: str = ""
    nodes: tuple[str, ...] = ()
    native_id: str = ""
    since_ns: int = 0
    beside: str = ""


@dataclass(frozen=True)
class LineArrived:
    """A worker line of one run: started, progress, measurement, failed or end, decoded and checked."""

    handle: Handle
    message: Message


@dataclass(frozen=True)
class AllocationEnded:
    """An allocation has ended. ``error`` is its cause unless it ended as planned.

    ``unsure``: its job may still start, as the scheduler does not answer; it stays in the ledger.
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
            ProvisionError: refused, with the scheduler's own message.
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


@dataclass(frozen=True)
class MonotonicClock:
    """The time of a provisioner; tests and benchmarks replace it."""

    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = lambda event, seconds: event.wait(seconds)
