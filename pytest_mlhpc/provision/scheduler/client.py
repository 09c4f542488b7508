"""The interface to a scheduler of jobs, :class:`SchedulerClient`, with what Slurm alone is asked for, :class:`SlurmClient`.

Clients are those of Slurm (``provision/slurm/``) and those that a definition makes (``commands.py``). Every call blocks for
at most :data:`CALL_LIMIT_S`. Answers are our own dataclasses; reasons are the scheduler's own text. Times are integer ns UTC by
the clock of the scheduler's controller, 0 where it knows none.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_mlhpc.errors import MlhpcError

#: How long a submission that nobody answered may still be under way, in seconds: sbatch(1) tries 15 times, waiting a second
#: longer each time, which makes two minutes; its calls have time limits of their own.
UNDER_WAY_S = 300.0

#: Longest time that one call may take, in seconds. A busy slurmctld answers after MessageTimeout, 10 s by default.
CALL_LIMIT_S = 30.0


class SchedulerError(MlhpcError):
    """A call failed. The text holds the command or function and its own message."""


class SchedulerRefused(SchedulerError):  # noqa: N818 - named for what happened
    """The scheduler refused, and would refuse again: invalid partition, account, QoS, option, permission."""


class SchedulerUnavailable(SchedulerError):  # noqa: N818 - as above
    """The scheduler did not answer in time. The call may succeed later; a submission may have been accepted."""


class SchedulerUnreachable(SchedulerUnavailable):
    """There is no connection to the login node at present, or it broke."""


class SchedulerUnusable(SchedulerUnavailable):
    """A program or the configuration of the scheduler is missing on this machine. No submission was accepted."""


class SchedulerState(enum.Enum):
    """States of jobs and steps, named as in Slurm's squeue(1), "JOB STATE CODES". Unknown names become UNKNOWN, never an error."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    REVOKED = "REVOKED"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs or will run."""
        return self in _ENDED

    @property
    def pending(self) -> bool:
        """Whether it waits for nodes."""
        return self in _PENDING

    @property
    def running(self) -> bool:
        """Whether it has its nodes. A state that we do not know is none of the three."""
        return self in _RUNNING


_ENDED = frozenset(
    {
        SchedulerState.COMPLETED, SchedulerState.CANCELLED, SchedulerState.FAILED, SchedulerState.TIMEOUT, SchedulerState.DEADLINE, SchedulerState.NODE_FAIL,
        SchedulerState.BOOT_FAIL, SchedulerState.OUT_OF_MEMORY, SchedulerState.PREEMPTED, SchedulerState.REVOKED,
    }
)  # fmt: skip
_PENDING = frozenset(
    {
        SchedulerState.PENDING, SchedulerState.CONFIGURING, SchedulerState.REQUEUED, SchedulerState.REQUEUE_FED, SchedulerState.REQUEUE_HOLD, SchedulerState.RESV_DEL_HOLD,
        SchedulerState.SPECIAL_EXIT,
    }
)  # fmt: skip
_RUNNING = frozenset(
    {
        SchedulerState.RUNNING, SchedulerState.SUSPENDED, SchedulerState.STOPPED, SchedulerState.COMPLETING, SchedulerState.RESIZING, SchedulerState.SIGNALING, SchedulerState.STAGE_OUT,
    }
)  # fmt: skip


@dataclass(frozen=True)
class JobStep:
    """One step of a job. ``id`` is "0", "1", ... or "batch", "extern"."""

    id: str
    name: str
    state: SchedulerState
    exit_code: int = 0
    signal: int = 0
    nodes: tuple[str, ...] = ()
    energy_j: float | None = None  #: None where the site does not account it
    start_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True)
class SchedulerJob:
    """One job as the queue or the accounting shows it. ``steps`` are filled by ``accounting`` alone."""

    id: str
    name: str
    user: str
    state: SchedulerState
    reason: str = ""  #: why it waits or ended, in Slurm squeue's %r; "None" becomes ""
    stuck: bool = False  #: pending, and waiting does not end it
    partition: str = ""
    account: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    time_limit_s: float = 0.0
    priority: int = 0
    restarts: int = 0  #: how often it was requeued
    submit_ns: int = 0
    start_ns: int = 0  #: expected start while it is pending
    end_ns: int = 0
    exit_code: int = 0
    signal: int = 0
    steps: tuple[JobStep, ...] = ()


@dataclass(frozen=True)
class SchedulerNode:
    """One node. ``state`` is the base state in lower case (idle, mixed, allocated, down, unknown ...)."""

    name: str
    state: str
    flags: frozenset[str] = (
        frozenset()
    )  #: lower case: drain, completing, not_responding, maintenance, reserved ...
    reason: str = ""
    address: str = ""
    hostname: str = ""
    cpus: int = 0
    memory: int = 0  #: bytes
    gres: str = ""
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()

    @property
    def usable(self) -> bool:
        """Whether jobs may start there now or when it is free."""
        return self.state in {"idle", "mixed", "allocated"} and not self.flags & {
            "drain", "fail", "not_responding", "maintenance", "powering_down", "reboot_requested", "reboot_issued",
        }  # fmt: skip

    @property
    def out_of_service(self) -> bool:
        """Whether ``State=RESUME`` returns it to service; Slurm refuses that for other nodes."""
        return self.state in {"down", "error"} or bool(self.flags & {"drain", "fail"})

    @property
    def failed(self) -> bool:
        """Whether it is down or does not respond: jobs on it are lost."""
        return self.state in {"down", "error", "unknown"} or bool(self.flags & {"not_responding", "fail"})


@dataclass(frozen=True)
class JobSubmission:
    """A job script on disk, all options in its first lines. ``name`` is unique and in there too."""

    name: str
    script: Path
    directory: Path
    environment: dict[str, str] = field(
        default_factory=dict
    )  #: of the submitting process; the job exports none of it


class SchedulerClient(Protocol):
    """The calls. Implementations have no state but how to reach the cluster, and count their calls in ``calls``.

    Raises (every method):
        SchedulerRefused: the scheduler refused.
        SchedulerUnavailable: it did not answer in time.
    """

    title: str  #: the scheduler's name for people
    key: str  #: the mapping of systems.yaml with its options
    calls: dict[str, int]  #: command or function -> how often it was called; for figures and tests

    def submit(self, submission: JobSubmission) -> str:
        """Submit the script and return the job's id."""

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SchedulerJob]:
        """Return jobs that the scheduler still knows, ended ones for a while too; always one query.

        At least one filter is given; unknown ids and names are simply not in the answer. ``user`` is a name or uid.
        """

    def queue(self, partition: str) -> list[SchedulerJob]:
        """Return all users' pending jobs of *partition*, highest priority first. Only id, user and priority are certain."""

    def accounting(self, ids: Collection[str]) -> list[SchedulerJob]:
        """Return jobs with their steps from the accounting; it lags about a second.

        Raises SchedulerUnavailable too where the cluster has no accounting.
        """

    def steps(self, ids: Collection[str]) -> dict[str, tuple[JobStep, ...]]:
        """Return job id -> steps that the scheduler still knows; needs no accounting."""

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs ("12") or steps ("12.0"); with *signal* only send that. Those that have ended are no error."""

    def nodes(self, names: Collection[str] = ()) -> list[SchedulerNode]:
        """Return the named nodes, or all."""

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list like ``node[1-4,7]``, in its order. Needs no query where possible."""


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
