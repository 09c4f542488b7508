"""A job spec: what one test wants to run, fully resolved, known at collection."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_mlhpc.batch.plan import HELD, VETTED
from pytest_mlhpc.system.model import Target

#: ``data`` of a run that reads none.
NO_DATA = "none"


class JobState(enum.Enum):
    """Where a declared job stands. The words are what the terminal shows."""

    DECLARED = "declared"  #: known, not yet submitted (max_jobs are in the queue already)
    QUEUED = "queued"  #: submitted, waiting for nodes or for a device lock
    VETTING = "vetting"
    RUNNING = "running"
    RERUNNING = "re-running"  #: the gate opened; more attempts are on their way
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class JobSpec:
    """One run that a test declares.

    ``asked`` is what marker and parameters said, ``parameters`` the workload's effective fields after
    parametrize > marker > preset > default. ``nodes`` and ``ranks`` are totals; a rank owns one device, or on CPUs
    a share of the cores. ``data`` is "memory", "device", "files" (a synthetic set made for the run), the name of a
    ``datasets:`` entry, or a path. ``judged`` names the metrics that a baseline is kept for; empty = never judged.
    """

    node_id: str
    name: str
    workload: str
    target: Target
    preset: str
    parameters: Mapping[str, Any]
    asked: Mapping[str, Any]
    nodes: int
    ranks: int
    steps: int
    warmup_steps: int
    time_limit_s: float
    launcher: str  #: one of ours by name, another by its payload module
    data: str = "memory"
    cache: str = "unknown"
    exclusive: bool = True
    judged: tuple[str, ...] = ()
    expected_metrics: tuple[str, ...] = ()  #: metrics that must be reported, or the run has measured nothing
    argv: tuple[str, ...] = ()
    metrics: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  #: `command`: name -> pattern, unit, better
    cwd: str | None = None
    module: str = ""  #: import path of the workload's torch half, for a workload that is not our own
    node: str = ""  #: the one node on which it has to run (--each-node); no part of the benchmark
    features: tuple[str, ...] = ()  #: that the partition must have
    scheduler_options: Mapping[str, Any] = field(
        default_factory=dict
    )  #: put over the partition's, already checked; no part of the benchmark
    benchmark: str = ""  #: canonical text, see :func:`pytest_mlhpc.jobs.key.benchmark_key`

    @property
    def held(self) -> bool:
        """Whether the run only holds its nodes for the test, which is waited for and not measured."""
        return self.workload == HELD

    @property
    def about_nodes(self) -> bool:
        """Whether nothing is measured: nodes are held for the test, or vetted."""
        return self.workload in (HELD, VETTED)

    @property
    def vet_level(self) -> str:
        """How thoroughly its nodes are vetted: off, quick or deep."""
        return str(self.parameters["level"]) if self.workload == VETTED else self.target.partition.vet.level

    @property
    def cores_per_rank(self) -> int:
        """Cores that one rank may use, at least one."""
        return max(1, self.node_cores // max(1, self.ranks // self.nodes))

    @property
    def node_cores(self) -> int:
        """Cores that the run has on each of its nodes."""
        return self.target.partition.share(self.ranks // self.nodes)[0]

    @property
    def node_memory(self) -> int:
        """Bytes of memory that the run has on each of its nodes."""
        return self.target.partition.share(self.ranks // self.nodes)[1]
