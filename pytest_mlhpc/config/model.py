"""What the rest of the program knows of a system: frozen dataclasses, validated and interpolated before they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

#: How the name of a cluster begins that is reached by ssh (:attr:`Partition.cluster`).
BY_SSH: Final = "ssh:"

#: Longest text that names an owner, in characters.
MOST_OWNER: Final = 200


@dataclass(frozen=True)
class Maintenance:
    """A time in which nothing runs on a partition, as systems.yaml says; ns UTC."""

    start_ns: int
    end_ns: int
    reason: str


@dataclass(frozen=True)
class NodeType:
    """What one node of a partition has. ``memory`` is in bytes; ``max`` is the most nodes one job may ask for."""

    cores: int
    memory: int
    max: int = 1
    devices: int = 0  #: accelerators of a node; 0 where ranks own shares of the cores
    device_model: str = ""
    device_memory: int = 0  #: bytes of one accelerator; 0: not said


@dataclass(frozen=True)
class Environment:
    """A named software set-up of a partition. ``variables`` may hold ``{cores_per_rank}`` and the like, and secrets."""

    name: str
    python: str
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    #: venv, conda, container, uenv: read by launch and provision
    extra: Mapping[str, Any] = field(default_factory=dict)

    def with_software(self, modules: Sequence[str], image: str) -> Environment:
        """Return this environment with more *modules*, and another *image* in its container, as a test asks for them."""
        container = {"container": {**(self.extra.get("container") or {}), "image": image}} if image else {}
        if not modules and not image:
            return self
        return replace(self, modules=(*self.modules, *modules), extra={**self.extra, **container})


@dataclass(frozen=True)
class Dataset:
    """An entry of ``datasets:``: files of one workload on this system."""

    name: str
    path: str
    kind: str  #: "real" or "synthetic"
    files: int | None = None
    bytes: int | None = None
    digest: str | None = None
    licence: str = ""


@dataclass(frozen=True)
class Vet:
    """How nodes are vetted before anything is measured on them.

    ``level`` is off, quick or deep; ``unknown`` (fail or warn) what becomes of a node that cannot be judged. ``budget_s`` is
    the longest time for it, 0: that of the level. ``exclude_for_s`` is how long later jobs keep away from unfit nodes.
    ``expect`` are further properties that each node must have; ``policy`` is the path of a file with other bounds, or empty.
    """

    level: str = "off"
    unknown: str = "fail"
    budget_s: float = 0.0
    exclude_for_s: float = 86400.0
    expect: Mapping[str, str] = field(default_factory=dict)
    policy: str = ""


@dataclass(frozen=True)
class Partition:
    """One kind of node under one scheduler.

    ``accelerator`` is cpu, cuda, rocm, xpu, ipu or wse. ``scheduler_options`` is the mapping under the scheduler's own
    name (``slurm:``, ``kubernetes:``), validated by that scheduler's own model. ``preset`` is what ``--mlhpc-preset``
    overrides. ``max_jobs`` is the most jobs in the queue at a time. ``owner`` is asked about its nodes, and about tests that
    have no owner of their own.
    """

    system: str
    name: str
    scheduler: str
    launcher: str
    accelerator: str
    nodes: NodeType
    environments: tuple[Environment, ...]
    features: frozenset[str] = frozenset()
    max_jobs: int = 8
    preset: str = "reference"
    preset_is_default: bool = False  #: the systems file names none
    vet: Vet = Vet()
    time_limit_s: float = 3600.0
    budget: str = ""
    owner: str = ""
    maintenance: tuple[Maintenance, ...] = ()
    #: smallest loss that fails a test, a share of the level; None: the usual one
    matters: float | None = None
    warm: bool = False  #: ranks of short runs may be forked (``node/batch/warm.py``)
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  #: may hold secrets
    ssh: str = ""  #: where the scheduler's commands are, as for ssh(1); empty: on this machine

    @property
    def apart(self) -> bool:
        """Whether its nodes see no folder of this machine: what they need is sent, what they write is fetched."""
        return self.scheduler == "kubernetes" or bool(self.ssh)

    @property
    def cluster(self) -> str:
        """The name in the ledger of a cluster that is reached by ssh: ``ssh:user@login:/shared``; else empty."""
        return f"{BY_SSH}{self.ssh}:{self.scheduler_options['shared_directory']}" if self.ssh else ""

    @property
    def id(self) -> str:
        """``system:partition``, as typed after --system and as the first parameter of a node id."""
        return f"{self.system}:{self.name}"

    def share(self, devices: int) -> tuple[int, int]:
        """Return cores and bytes of memory of a node that a run with *devices* of its accelerators has.

        A job has its nodes with all that they have; a pod asks for the part that its devices are of them, where they are
        in the node: IPUs and wafers are reached by the network.
        """
        node, whole = self.nodes, self.accelerator in {"cpu", "ipu", "wse"}
        if self.scheduler != "kubernetes" or whole or not 0 < devices < node.devices:
            return node.cores, node.memory
        return max(1, node.cores * devices // node.devices), node.memory * devices // node.devices


@dataclass(frozen=True)
class System:
    """An entry of systems.yaml. Archived systems render and compare, but never run."""

    name: str
    description: str
    partitions: tuple[Partition, ...]
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    status: str = "live"  #: live or archived
    as_of: str = ""
    source: str = ""  #: the file it came from


@dataclass(frozen=True)
class Target:
    """Where one parametrised test runs: a partition with one of its environments."""

    partition: Partition
    environment: Environment
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    fingerprint: str = ""  #: part of the series key on `local` only
    node: str = ""  #: with --mlhpc-each-node, the node on which its tests run; no part of any series

    @property
    def id(self) -> str:
        """The node-id text: the partition, the environment where the partition has several, and the node if one was chosen."""
        several = len(self.partition.environments) > 1
        place = f"{self.partition.id}+{self.environment.name}" if several else self.partition.id
        return f"{place}-{self.node}" if self.node else place
