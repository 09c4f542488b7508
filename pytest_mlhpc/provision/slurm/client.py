"""What Slurm alone is asked for, :class:`SlurmClient`, and its dataclasses. ``commands.py`` and ``pyslurm.py`` implement it.

Read ``provision/scheduler/client.py`` for what every scheduler is asked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from pytest_mlhpc.provision.scheduler.client import SchedulerClient


@dataclass(frozen=True)
class PartitionLimits:
    """Limits that ``scontrol show partition`` prints. None: no limit. Times are in seconds."""

    name: str
    up: bool
    max_time_s: float | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
    total_nodes: int = 0
    nodes: tuple[str, ...] = ()
    allow_accounts: frozenset[str] = frozenset()  #: empty: all
    allow_qos: frozenset[str] = frozenset()  #: empty: all
    qos: str = ""  #: the partition's own QoS, whose limits hold for all its jobs


@dataclass(frozen=True)
class QosLimits:
    """Limits of a QoS for one job. None: no limit, or it is unknown to the accounting."""

    name: str
    max_time_s: float | None = None
    max_nodes: int | None = None
    usage_factor: float = 1.0


@dataclass(frozen=True)
class Reservation:
    """One reservation. ``flags`` in upper case (MAINT ...)."""

    name: str
    start_ns: int
    end_ns: int
    nodes: tuple[str, ...] = ()
    partition: str = ""
    users: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()


class SlurmClient(SchedulerClient, Protocol):
    """The calls that only Slurm has."""

    name: str  #: "cli" or "pyslurm"

    def version(self) -> str:
        """Return the version of Slurm, like 24.11.5."""

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes."""

    def resume(self, names: Collection[str]) -> None:
        """Return drained nodes to service."""

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits; SchedulerRefused if there is none of this name."""

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits; None where the accounting does not answer."""

    def reservations(self) -> list[Reservation]:
        """Return all reservations."""
