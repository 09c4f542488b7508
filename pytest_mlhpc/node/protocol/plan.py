"""The plan: all that an allocation is to do, vetting included, as one JSON file written by the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Tuple

from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.protocol.schema import SCHEMA, from_json
from pytest_mlhpc.node.vet.policy import Bound, ExpectedNode

#: Longest time that vetting may take, in seconds, by level.
BUDGET_S = {"quick": 60.0, "deep": 600.0}


@dataclass(frozen=True)
class Learned:
    """What this site's history says of one reading: median and 1.4826 x MAD over *count* good nodes and nights.

    With ``host`` the figures are that node's own, and may be few.
    """

    key: str
    model: str
    median: float
    mad: float
    count: int
    host: str = ""


@dataclass(frozen=True)
class VetSettings:
    """One vetting.

    ``need`` is how many nodes must be fit, 0: all. ``budget_s`` is the deadline, by which checks are chosen too; 0: that of the
    level. ``out`` is the folder for the verdict's files, written by the first node alone, empty: none. ``unknown`` is fail or
    warn. ``hosts`` are all nodes in order, empty: as the
    environment says. ``single`` leaves out all that takes several nodes. ``bounds`` replace those of the policy. ``python`` is the
    interpreter that has torch, empty: our own. ``no_load`` leaves out all that computes. ``require_comparison``: a figure that
    has no peers, no floor and no history makes its node unknown; else the node is fit, and the verdict NOT_COMPARED. ``as_json``: the
    verdict is printed for programs.
    """

    level: str = "quick"
    need: int = 0
    budget_s: float = 0.0
    out: str = ""
    unknown: str = "fail"
    wanted: ExpectedNode = field(default_factory=ExpectedNode)
    bounds: Tuple[Bound, ...] = ()
    learned: Tuple[Learned, ...] = ()
    python: str = ""
    hosts: Tuple[str, ...] = ()
    single: bool = False
    no_load: bool = False
    require_comparison: bool = True
    as_json: bool = False


#: Version of the conversation between controller and payload (worker lines and this file).
PROTOCOL = 1

#: The workload whose run only holds its nodes, for programs that its test asks for (``node/batch/program_requests.py``).
HELD = "nodes"

#: The workload whose run is the vetting of its nodes, which its test reads (``node/batch/vetting.py``).
VETTED = "vet"


@dataclass(frozen=True)
class MetricPattern:
    """How the `command` workload takes one metric out of a program's output.

    ``pattern`` is a regular expression with one group; every match is a sample, in ``unit`` once multiplied by ``scale``.
    None: the program itself prints JSON lines ``{"metric": name, "value": x}``. ``reduce`` (node/protocol/schema.py) says how
    samples become the value, ``tolerance`` how far equal runs differ, as a share. ``file`` is searched instead of the output,
    or read for ``key``; ``extract``: a function of the test finds the figure (``RunPlan.functions``).
    """

    unit: str
    better: str
    pattern: Optional[str] = None
    scale: float = 1.0
    reduce: str = "median"
    tolerance: Optional[float] = None
    declared: str = ""  #: the unit as the test names it, where that is not ``unit``
    file: str = ""
    key: str = ""
    extract: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """What a program needs to be built: ``{name}`` in its arguments is the folder of the build.

    ``key`` names that folder: it is a digest of all that the build depends on, so that a later run finds it ready. ``files`` are
    those that ``argv`` finds in its folder, as of a run; ``variables`` are in place of the run's. ``before``: it is made before
    anything is submitted, on the machine of the controller.
    """

    name: str
    key: str
    argv: Tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    before: bool = False


@dataclass(frozen=True)
class FinishedRun:
    """Where a run that has ended left its files, as the controller sees them: its folder, its log, and the names of its artifacts."""

    folder: str
    log: str
    artifacts: Tuple[str, ...] = ()


#: Kinds of faults that `mlhpc alert drill` plants; those with a size take it as a share of a step's time.
SLOW_STEPS, SLOW_READING, SLOW_RANK = "slow-steps", "slow-reading", "slow-rank"
LYING_EXIT, MISSING_NIGHT = "lying-exit", "missing-night"
DELAYS = (SLOW_STEPS, SLOW_READING, SLOW_RANK)
FAULTS = (*DELAYS, LYING_EXIT, MISSING_NIGHT)


@dataclass(frozen=True)
class PlantedFault:
    """A fault that a drill plants where runs measure; a run of any other session has none.

    ``slow-steps``: each step computes longer by ``size``, a share of its time. ``slow-reading``: it waits as much longer for its
    batch. ``slow-rank``: the last of several ranks computes longer. ``lying-exit``: each process of the run ends at once, with
    exit code 0. ``missing-night``: there is no session. Of ``workload`` alone, where it is not empty.
    """

    kind: str
    size: float = 0.0
    workload: str = ""

    def __str__(self) -> str:
        return f"{self.kind}={100 * self.size:.4g}%" if self.kind in DELAYS else self.kind


@dataclass(frozen=True)
class RunPlan:
    """One attempt of one run.

    ``parameters`` are the workload's effective fields as plain JSON (see ``node/worker/workloads/definitions.py``).
    ``ranks`` processes are started on ``nodes`` nodes, one device each. ``python`` is the environment's interpreter.
    ``variables`` are added to the process environment. What follows is for `command` alone: ``argv``, ``metrics``,
    ``processes`` (how many are started in all; of other workloads 0, which means one a rank), ``files`` (path in the run's
    folder -> where it lies for the controller), ``artifacts`` (names or globs of files that the test may read), and
    ``sanity``, regular expressions that must match in the output. ``functions`` says in which test (``/path/test_a.py::test_a``)
    the functions stand that the controller asks for metrics and, with ``checks``, for sanity; empty: there are none.
    ``needed`` are runs that ended before this one was submitted, by the name of their fixture; ``argv`` has their folders.
    ``data_source`` is memory, device or files; with files, ``data_path`` is where they lie, or None: a synthetic set is
    made below the plan's directory. ``data_kind`` is real or synthetic; ``cache`` is cold, warm or unknown.
    ``launcher`` is a name of ``node/launch.py``, or the full name of another payload module.
    An ``exclusive`` run owns ``device_ids`` (empty, or on CPUs: the whole machine) while it lasts.
    ``nonce`` tells attempts apart and stands in all lines; ``secret`` is what processes of the run prove to know, and stands
    in no line. ``launcher_options`` are more arguments of the launcher's own command (srun, mpirun), ``wrapper`` those that go before
    the interpreter or program, such as a container runtime with its options. Ranks of a ``warm`` run may be forked by
    a process that has imported torch (``node/batch/warm.py``). ``environment`` and ``image`` are set where they are not the
    plan's: a comparison runs two sides in one allocation. ``packages`` are folders from which Python imports before all others, also before
    the payload: those of another revision. ``usual_s`` is how long the timed steps take by the baseline, in seconds.
    """

    run_id: str
    nonce: str
    attempt: int
    workload: str
    parameters: Mapping[str, Any]
    nodes: int
    ranks: int
    cores_per_rank: int
    device_type: str
    launcher: str
    time_limit_s: float
    steps: int
    warmup_steps: int
    python: str = "python3"
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)  #: may hold secrets
    argv: Tuple[str, ...] = ()
    metrics: Mapping[str, MetricPattern] = field(default_factory=dict)
    processes: int = 0
    files: Mapping[str, str] = field(default_factory=dict)
    artifacts: Tuple[str, ...] = ()
    sanity: Tuple[str, ...] = ()
    functions: str = ""
    checks: bool = False
    builds: Tuple[BuildPlan, ...] = ()
    needed: Mapping[str, FinishedRun] = field(default_factory=dict)
    device_ids: Tuple[str, ...] = ()
    data_source: str = "memory"
    data_path: Optional[str] = None
    data_kind: str = "synthetic"
    cache: str = "unknown"
    calibrate: bool = False
    cwd: Optional[str] = None
    exclusive: bool = True
    launcher_options: Tuple[str, ...] = ()
    wrapper: Tuple[str, ...] = ()
    secret: str = field(default="", repr=False)
    warm: bool = False
    environment: str = ""
    usual_s: Optional[float] = None
    image: str = ""
    packages: Tuple[str, ...] = ()
    fault: Optional[PlantedFault] = None  #: in a drill alone

    @property
    def lies(self) -> bool:
        """Whether a drill has its processes end at once with exit code 0."""
        return self.fault is not None and self.fault.kind == LYING_EXIT

    @property
    def started(self) -> int:
        """How many processes the launcher starts."""
        return self.processes or self.ranks

    @property
    def once(self) -> bool:
        """Whether it is a program that is started once, on the first node, however many nodes it has."""
        return self.workload == "command" and self.launcher == "plain"


@dataclass(frozen=True)
class JobRules:
    """How a batch learns of its job from a scheduler that a definition describes (``provision/scheduler/definition.py``).

    ``id`` is the variable with the job's id. ``hosts`` is the variable with the job's hosts, or with ``in_file`` that with the name
    of a file that has them; where it is not set, the job has this host alone. ``host`` is a pattern whose group of that name is a host.
    ``start`` are the words before a program's arguments that start it on another host of the job, of which ``{host}`` is its name.
    """

    title: str
    id: str
    hosts: str
    in_file: bool
    host: str
    start: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one allocation is to do: its runs in order, under one time limit.

    ``directory`` is where plan and logs lie, as a path of the nodes; ``environment`` the name of the runs' common one.
    ``scheduler_options`` are those that its tests put over the partition's; they are the controller's matter.
    """

    allocation_id: str
    payload_sha256: str
    directory: str
    nodes: int
    time_limit_s: float
    runs: Tuple[RunPlan, ...]
    spares: int = 0
    excluded_nodes: Tuple[str, ...] = ()
    nodelist: Tuple[str, ...] = ()  #: nodes that the allocation must have
    vetting: Optional[VetSettings] = None  #: how nodes are vetted before the first run; None: not at all
    environment: str = ""
    modules: Tuple[str, ...] = ()  #: that its tests load after the environment's own
    image: str = ""  #: of a container, instead of the environment's
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    on_volume: Mapping[str, str] = field(
        default_factory=dict
    )  #: of a pod's plan: name of a set of files -> its folder on a volume
    job: Optional[JobRules] = None  #: where a definition describes the scheduler
    protocol: int = PROTOCOL
    schema: int = SCHEMA


def read_plan(path: Path, *, own_disk: bool = False) -> Plan:
    """Read plan.json strictly. With *own_disk*, that of a pod, nobody else is there who could have written it.

    Raises:
        OSError: it cannot be read, or is not this user's alone (UnsafeDirectoryError).
        ValueError: it is no JSON, no plan (SchemaError), or of another protocol.
    """
    content = path.read_bytes() if own_disk else read_private(path)
    plan = from_json(Plan, read_json(content.decode("utf-8")), str(path))
    if plan.protocol != PROTOCOL:
        raise ValueError(
            f"protocol_mismatch: the plan speaks protocol {plan.protocol}, this payload {PROTOCOL}"
        )
    return plan
