"""What we ask of Slurm: one narrow protocol, served by its commands (``cli.py``) or by pyslurm (``pyslurm.py``).

All calls block, each at most :data:`CALL_LIMIT_S`. Answers are our own dataclasses; reasons stay in Slurm's own words.
Times are integer ns UTC as the controller of Slurm tells them, 0 where it knows none.
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
    """A call failed. The text holds the command or function and its own words."""


class SlurmRefused(SlurmError):  # noqa: N818 - what happened, in the words of the flow
    """Slurm answered and said no: it would say so again (invalid partition, account, QoS, option, permission)."""


class SlurmUnavailable(SlurmError):  # noqa: N818 - as above
    """Nobody answered, or not in time: the call may succeed later, and a submission may have got through."""


class State(enum.Enum):
    """States of jobs and steps, named as in squeue(1), "JOB STATE CODES". Unknown words become UNKNOWN, never an error."""

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
        State.COMPLETED, State.CANCELLED, State.FAILED, State.TIMEOUT, State.DEADLINE, State.NODE_FAIL,
        State.BOOT_FAIL, State.OUT_OF_MEMORY, State.PREEMPTED, State.REVOKED,
    }
)  # fmt: skip
_PENDING = frozenset(
    {
        State.PENDING, State.CONFIGURING, State.REQUEUED, State.REQUEUE_FED, State.REQUEUE_HOLD, State.RESV_DEL_HOLD,
        State.SPECIAL_EXIT,
    }
)  # fmt: skip
_RUNNING = frozenset(
    {
        State.RUNNING, State.SUSPENDED, State.STOPPED, State.COMPLETING, State.RESIZING, State.SIGNALING, State.STAGE_OUT,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of a job. ``id`` is "0", "1", ... or "batch", "extern"."""

    id: str
    name: str
    state: State
    exit_code: int = 0
    signal: int = 0
    nodes: tuple[str, ...] = ()
    energy_j: float | None = None  #: None where the site does not account it
    start_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True)
class Job:
    """One job as the queue or the accounting shows it. ``steps`` are filled by ``accounting`` alone."""

    id: str
    name: str
    user: str
    state: State
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
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Node:
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
    def failed(self) -> bool:
        """Whether it is down or does not respond: jobs on it are lost."""
        return self.state in {"down", "error", "unknown"} or bool(self.flags & {"not_responding", "fail"})


@dataclass(frozen=True)
class PartitionLimits:
    """What scontrol show partition says. None: no limit. Times in seconds."""

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
    """Limits of a QoS for one job. None: no limit, or accounting does not tell."""

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
class Submission:
    """A job script on disk, all options in its ``#SBATCH`` lines. ``name`` is unique and in there too."""

    name: str
    script: Path
    directory: Path
    environment: dict[str, str] = field(
        default_factory=dict
    )  #: of the submitting process; the job exports none of it


class SlurmClient(Protocol):
    """The calls. Implementations keep no state but how to reach the cluster, and count their calls in ``calls``.

    Raises (every method):
        SlurmRefused: Slurm said no.
        SlurmUnavailable: no answer in time.
    """

    name: str  #: "cli" or "pyslurm"
    calls: dict[str, int]  #: command or function -> how often it was called; for figures and tests

    def version(self) -> str:
        """Return the version of Slurm, like 24.11.5."""

    def submit(self, submission: Submission) -> str:
        """Submit the script and return the job's id."""

    def jobs(self, *, ids: Collection[str] = (), names: Collection[str] = (), user: str = "") -> list[Job]:
        """Return jobs that slurmctld still knows, ended ones (until MinJobAge) too; one query whatever is asked.

        At least one filter is given; unknown ids and names are simply not in the answer. ``user`` is a name or uid.
        """

    def queue(self, partition: str) -> list[Job]:
        """Return all users' pending jobs of *partition*, highest priority first (only id, user, priority are sure)."""

    def accounting(self, ids: Collection[str]) -> list[Job]:
        """Return jobs with their steps from the accounting (slurmdbd, else jobcomp); it lags about a second.

        Raises SlurmUnavailable too where the cluster keeps no accounting.
        """

    def steps(self, ids: Collection[str]) -> dict[str, tuple[Step, ...]]:
        """Return job id -> steps that slurmctld still knows; needs no accounting."""

    def cancel(self, ids: Collection[str], signal: str = "") -> None:
        """Cancel jobs ("12") or steps ("12.0"); with *signal* only send that. Those that have ended are no error."""

    def nodes(self, names: Collection[str] = ()) -> list[Node]:
        """Return the named nodes, or all."""

    def drain(self, names: Collection[str], reason: str) -> None:
        """Let no new job start on the nodes."""

    def resume(self, names: Collection[str]) -> None:
        """Return drained nodes to service."""

    def partition(self, name: str) -> PartitionLimits:
        """Return a partition's limits; SlurmRefused if there is none of this name."""

    def qos(self, name: str) -> QosLimits | None:
        """Return a QoS's limits; None where the accounting cannot be asked."""

    def reservations(self) -> list[Reservation]:
        """Return all reservations."""

    def expand(self, hostlist: str) -> tuple[str, ...]:
        """Return the nodes of a host list like ``node[1-4,7]``, in its order. Needs no query where that is possible."""
