"""The interface to Slurm, :class:`SlurmClient`, and its dataclasses. ``commands.py`` and ``pyslurm.py`` implement it.

Every call blocks for at most :data:`CALL_LIMIT_S`. Answers are our own dataclasses; reasons are Slurm's own text.
Times are integer ns UTC by the clock of Slurm's controller, 0 where it knows none.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pytest_mlhpc.errors import MlhpcError

#: Longest time that one call may take, in seconds. A busy slurmctld answers after MessageTimeout, 10 s by default.
CALL_LIMIT_S = 30.0


class SlurmError(MlhpcError):
    """A call failed. The text holds the command or function and its own message."""


class SlurmRefused(SlurmError):  # noqa: N818 - named for what happened
    """Slurm refused, and would refuse again: invalid partition, account, QoS, option, permission."""


class SlurmUnavailable(SlurmError):  # noqa: N818 - as above
    """Slurm did not answer in time. The call may succeed later; a submission may have been accepted."""


class SlurmUnreachable(SlurmUnavailable):
    """There is no connection to the login node at present, or it broke."""


class SlurmUnusable(SlurmUnavailable):
    """A program or the configuration of Slurm is missing on this machine. No submission was accepted."""


class SlurmState(enum.Enum):
    """States of jobs and steps, named as in squeue(1), "JOB STATE CODES". Unknown names become UNKNOWN, never an error."""

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
        SlurmState.COMPLETED, SlurmState.CANCELLED, SlurmState.FAILED, SlurmState.TIMEOUT, SlurmState.DEADLINE, SlurmState.NODE_FAIL,
        SlurmState.BOOT_FAIL, SlurmState.OUT_OF_MEMORY, SlurmState.PREEMPTED, SlurmState.REVOKED,
    }
)  # fmt: skip
_PENDING = frozenset(
    {
        SlurmState.PENDING, SlurmState.CONFIGURING, SlurmState.REQUEUED, SlurmState.REQUEUE_FED, SlurmState.REQUEUE_HOLD, SlurmState.RESV_DEL_HOLD,
        SlurmState.SPECIAL_EXIT,
    }
)  # fmt: skip
_RUNNING = frozenset(
    {
        SlurmState.RUNNING, SlurmState.SUSPENDED, SlurmState.STOPPED, SlurmState.COMPLETING, SlurmState.RESIZING, SlurmState.SIGNALING, SlurmState.STAGE_OUT,
    }
)  # fmt: skip


@dataclass(frozen=True)
class SlurmStep:
    """One step of a job. ``id`` is "0", "1", ... or "batch", "extern"."""

    id: str
    name: str
    state: SlurmState
    exit_code: int = 0
    signal: int = 0
    nodes: tuple[str, ...] = ()
    energy_j: float | None = None  #: None where the site does not account it
    start_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True)
class SlurmJob:
    """One job as the queue or the accounting shows it. ``steps`` are filled by ``accounting`` alone."""

    id: str
    name: str
    user: str
    state: SlurmState
    reason: str = ""  #: squeue's %r: why it waits or ended; "None" becomes ""
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
    steps: tuple[SlurmStep, ...] = ()


@dataclass(frozen=True)
class SlurmNode:
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


@dataclass(frozen=True)
class SlurmSubmission:
    """A job script on disk, all options in its ``#SBATCH`` lines. ``name`` is unique and in there too."""

    name: str
    script: Path
    directory: Path
    environment: dict[str, str] = field(
        default_factory=dict
    )  #: of the submitting process; the job exports none of it


class SlurmClient(Protocol):
    """The calls. Implementations have no state but how to reach the cluster, and count their calls in ``calls``.

    Raises (every method):
        SlurmRefused: Slurm refused.
        SlurmUnavailable: Slurm did not answer in time.
    """

    name: str  #: "cli" or "pyslurm"
    calls: dict[str, int]  #: command or function -> how often it was called; for figures and tests

    def version(self) -> str:
        """Return the version of Slurm, like 24.11.5."""

    def submit(self, submission: SlurmSubmission) -> str:
        """Submit the script and return the job's id."""

    def jobs(
        self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = ""
    ) -> list[SlurmJob]:
        """Return jobs that slurmctld still knows, ended ones (until MinJobAge) too; always one query.

        At least one filter is given; unknown ids and names are simply not in the answer. ``user`` is a name or uid.
        """

    def queue(self, partition: str) -> list[SlurmJob]:
        """Return all users' pending jobs of *partition*, highest priority first. Only id, user and priority are certain."""

    def accounting(self, ids: Collection[str]) -> list[SlurmJob]:
        """Return jobs with their steps from the accounting (slurmdbd, else jobcomp); it lags about a second.

        Raises SlurmUnavailable too where the cluster has no accounting.
        """

    def steps(self, ids: Collection[str]) -> dict[str, tuple[SlurmStep, ...]]:
        """Return job id -> steps that slurmctld still knows; needs no accounting."""

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs ("12") or steps ("12.0"); with *signal* only send that. Those that have ended are no error."""

    def nodes(self, names: Collection[str] = ()) -> list[SlurmNode]:
        """Return the named nodes, or all."""

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes."""

    def resume(self, names: Collection[str]) -> None:
        """Return drained nodes to service."""

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits; SlurmRefused if there is none of this name."""

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits; None where the accounting does not answer."""

    def reservations(self) -> list[Reservation]:
        """Return all reservations."""

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list like ``node[1-4,7]``, in its order. Needs no query where possible."""
