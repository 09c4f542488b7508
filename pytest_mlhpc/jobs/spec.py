"""A job spec: what one test runs, fully resolved at collection; which specs share an allocation, and where their files are."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Environment, Partition, Target
from pytest_mlhpc.node.protocol.plan import HELD, VETTED

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
    cwd: str | None = None  #: folder that a program starts in; None: a new one of its run
    folder: str = (
        ""  #: of the test's file, as the controller sees it; empty: not known, or nodes do not see it
    )
    module: str = ""  #: import path of the workload's torch half, for a workload that is not our own
    node: str = ""  #: the one node on which it has to run (--mlhpc-each-node); no part of the series
    requires: tuple[str, ...] = ()  #: features that the partition must have, or with a minus must not
    scheduler_options: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  #: put over the partition's, already checked; no part of the definition
    benchmark: str = ""  #: the test's identity: its `name=`, else see :mod:`pytest_mlhpc.session.identity`
    definition: str = ""  #: what is computed, as canonical text (:mod:`pytest_mlhpc.store.definition`)

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


#: Seconds that an allocation has beyond its runs: interpreters start, results are written.
MARGIN_S = 60.0

#: Seconds that each run of an allocation has beyond its own limit: what is left of it is ended, the next step starts.
PER_RUN_S = 15.0


def may_share(spec: JobSpec, *, pack: bool) -> bool:
    """Whether *spec* may share its allocation at all: a vetting does without being asked, as all tests of it look at the same."""
    return pack or spec.workload == VETTED


def same_needs(one: JobSpec, other: JobSpec) -> bool:
    """Whether both want the same nodes in the same way, so that one job script serves both."""
    return _needs(one) == _needs(other)


def allocation_time_s(specs: Sequence[JobSpec]) -> float:
    """Return the time limit of an allocation for the runs of *specs*, in seconds."""
    return sum(spec.time_limit_s for spec in specs) + MARGIN_S + PER_RUN_S * (len(specs) - 1)


def fits_into(packed: Sequence[JobSpec], more: JobSpec, longest_s: float | None) -> bool:
    """Whether *more* may run after *packed* in one allocation of at most *longest_s* seconds; None: any."""
    if packed[0].held or more.held or not same_needs(packed[0], more):
        return False
    # All of one allocation say the same where tests say a time; one beyond *longest_s* is had alone.
    limits = [limit for limit in (longest_s, more.scheduler_options.get("max_time")) if limit is not None]
    return allocation_time_s([*packed, more]) <= min(limits, default=math.inf)


def _needs(spec: JobSpec) -> tuple[object, ...]:
    target = spec.target
    options = json.dumps(spec.scheduler_options, sort_keys=True, default=str)
    vetting = json.dumps(spec.parameters, sort_keys=True) if spec.workload == VETTED else spec.vet_level
    place = (vetting, target.partition.id, target.environment.name, spec.node, options)
    return (*place, spec.nodes, spec.ranks, spec.exclusive)


#: Instead of a payload's hash: the interpreter on the nodes is ours, so it has this package and nothing is shipped.
FROM_SOURCE = "source"


def run_root(partition: Partition, state_dir: Path) -> Path:
    """Return the folder below which runs and payloads of *partition* lie: its ``shared_directory``, or the state's."""
    shared = partition.scheduler_options.get("shared_directory")
    return Path(shared) if shared else state_dir


def has_this_package(environment: Environment) -> bool:
    """Whether runs in *environment* use this very interpreter, which has this package: nothing need be shipped."""
    inside = environment.extra.keys() & {"venv", "conda", "container", "uenv"}
    return not inside and environment.python == sys.executable
