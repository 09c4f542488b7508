"""A job spec: what one test runs, fully resolved at collection; its fields, its definition as canonical text, which specs share an allocation, and short names of tests."""

from __future__ import annotations

import collections
import enum
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.model import MOST_OWNER, Environment, Partition, Target
from pytest_mlhpc.config.quantities import parse_duration, parse_size
from pytest_mlhpc.errors import nearest
from pytest_mlhpc.node.files import may_be_secret
from pytest_mlhpc.node.protocol.plan import HELD, VETTED, BuildPlan, FinishedRun
from pytest_mlhpc.node.worker.data.dataset_files import DataError, read_manifest
from pytest_mlhpc.node.worker.workloads.definitions import Field, Workload
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import MANNER
from pytest_mlhpc.node.worker.workloads.fields.parallel import ALL_RANKS
from pytest_mlhpc.node.worker.workloads.fields.quality import to_quality
from pytest_mlhpc.store.definition import text_of

#: ``data`` of a run that reads none.
NO_DATA = "none"


class JobState(enum.Enum):
    """Where a declared job stands. The values are what the terminal shows."""

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
    ``datasets:`` entry, or a path. ``judged`` names the metrics that have a baseline; empty: never judged.
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
    #: `command`: name -> pattern, unit, better
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: metric -> what it promises here, in base units
    references: Mapping[str, float] = field(default_factory=dict)
    processes: int = 0  #: that the launcher starts in all; of all but programs 0, which means one a rank
    #: over the environment's variables; may hold secrets
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    modules: tuple[str, ...] = ()  #: to load after the environment's own
    image: str = ""  #: of a container, instead of the environment's
    #: path in the run's folder -> what is copied there
    files: Mapping[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()  #: names or globs of files that the test may read
    sanity: tuple[str, ...] = ()  #: regular expressions that must match in the output
    checks: bool = False  #: functions of the test say, too, whether the run is sound
    functions: str = ""  #: ``file::test`` in which functions of metrics and sanity stand; no part of the job
    builds: tuple[BuildPlan, ...] = ()  #: what has to be built before it runs
    needs: Mapping[str, JobSpec] = field(default_factory=dict)  #: runs that end before it is submitted
    #: what they left, once they have ended; no part of the job
    needed: Mapping[str, FinishedRun] = field(default_factory=dict)
    cwd: str | None = None  #: folder that a program starts in; None: a new one of its run
    #: of the test's file, as the controller sees it; empty: not known, or nodes do not see it
    folder: str = ""
    module: str = ""  #: import path of the workload's torch half, for a workload that is not our own
    session: str = ""  #: the only one that may have its runs: of a comparison no later session adopts a part
    node: str = ""  #: the one node on which it has to run (--mlhpc-each-node); no part of the series
    requires: tuple[str, ...] = ()  #: features that the partition must have, or with a minus must not
    #: put over the partition's, already checked; no part of the definition
    scheduler_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    packages: tuple[str, ...] = ()  #: folders of another revision from which Python imports before all others
    at_revision: JobSpec | None = None  #: the same test with what another revision has; no part of the job
    #: who is asked about the test; several are one text with commas; no part of the definition
    owner: str = ""
    benchmark: str = ""  #: the test's identity: its `name=`, else see :mod:`pytest_mlhpc.session.collection`
    definition: str = ""  #: what is computed, as canonical text (:mod:`pytest_mlhpc.store.definition`)

    @property
    def holds_nodes(self) -> bool:
        """Whether the run only holds its nodes for the test, which is waited for and not measured."""
        return self.workload == HELD

    @property
    def about_nodes(self) -> bool:
        """Whether nothing is measured: nodes are reserved for the test, or vetted."""
        return self.workload in (HELD, VETTED)

    @property
    def is_training(self) -> bool:
        """Whether it trains a workload: it is no program, no probe, and not about nodes."""
        return self.workload != "command" and self.data != NO_DATA and not self.about_nodes

    @property
    def agentless(self) -> bool:
        """Whether no agent of ours is beside the program: it is the command of its container (``kubernetes: {agent: false}``)."""
        partition = self.target.partition
        options = {**partition.scheduler_options, **self.scheduler_options}
        return partition.scheduler == "kubernetes" and options.get("agent") is False

    @property
    def vet_level(self) -> str:
        """How thoroughly its nodes are vetted: off, quick or deep."""
        return str(self.parameters["level"]) if self.workload == VETTED else self.target.partition.vet.level

    @property
    def started(self) -> int:
        """How many processes the launcher starts."""
        return self.processes or self.ranks

    @property
    def cores_per_rank(self) -> int:
        """Cores that one process may use, at least one."""
        return max(1, self.node_cores // max(1, self.started // self.nodes))

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
    alone = packed[0].holds_nodes or more.holds_nodes or more.agentless
    if alone or not same_needs(packed[0], more):
        return False
    return allocation_time_s([*packed, more]) <= longest_allocation_s(more, longest_s)


def longest_allocation_s(spec: JobSpec, longest_s: float | None) -> float:
    """Return how long an allocation with *spec* and others may last where the partition allows *longest_s* seconds; None: any time."""
    # All of one allocation say the same where tests say a time; one beyond *longest_s* is had alone.
    limits = [limit for limit in (longest_s, spec.scheduler_options.get("max_time")) if limit is not None]
    return min(limits, default=math.inf)


def _needs(spec: JobSpec) -> tuple[object, ...]:
    target = spec.target
    options = json.dumps(spec.scheduler_options, sort_keys=True, default=str)
    vetting = json.dumps(spec.parameters, sort_keys=True) if spec.workload == VETTED else spec.vet_level
    place = (vetting, target.partition.id, target.environment.name, spec.node, options)
    return (*place, spec.modules, spec.image, spec.nodes, spec.ranks, spec.exclusive)


#: Instead of a payload's hash: the interpreter on the nodes is ours, so it has this package and nothing is shipped.
FROM_SOURCE = "source"


def run_root(partition: Partition, state_dir: Path) -> Path:
    """Return the folder below which runs and payloads of *partition* lie here: its ``shared_directory``, or the state's."""
    shared = partition.scheduler_options.get("shared_directory")
    return Path(shared) if shared and not partition.apart else state_dir


def has_this_package(environment: Environment) -> bool:
    """Whether runs in *environment* use this very interpreter, which has this package: nothing need be shipped."""
    inside = environment.extra.keys() & {"venv", "conda", "container", "uenv"}
    return not inside and environment.python == sys.executable


def in_bytes(kind: str, value: Any) -> Any:
    """Return *value* of a field of type *kind* as plain JSON, sizes in bytes; *value* was checked before."""
    if kind == "size":
        return parse_size(value)
    if kind == "sizes":
        return [parse_size(one) for one in value]
    return list(value) if isinstance(value, tuple) else value


def wrong_sizes(value: Any, minimum: float) -> str:
    """Return why *value* is no size, or no list of different sizes, of at least *minimum* bytes; or an empty string."""
    if isinstance(value, str | int):
        return _wrong(value, minimum)
    if not value:
        return "is an empty list"
    if found := next((text for one in value if (text := _wrong(one, minimum))), ""):
        return found
    if len({parse_size(one) for one in value}) < len(value):
        return f"{value!r} names a size twice"
    return ""


def _wrong(value: Any, minimum: float) -> str:
    try:
        size = parse_size(value)
    except ValueError as error:
        return str(error)
    return f"{value} is less than {minimum:g} bytes" if size < minimum else ""


#: Fields that every workload has. ``time_limit`` is in seconds.
UNIVERSAL: Mapping[str, Field] = {
    "nodes": Field(1, "nodes of the run", minimum=1),
    "devices_per_node": Field(
        1, "accelerators of each node; one rank owns each, on CPUs a share of the cores", minimum=1
    ),
    "preset": Field("", "smoke, small or reference, instead of the session's or the partition's", "str"),
    "steps": Field(20, "steps that are timed", minimum=0),
    "warmup": Field(3, "steps before the timed ones", minimum=0),
    "data": Field("memory", "memory, device, files, a data set of the system, or a path", "str"),
    "cache": Field("unknown", "state of the page cache", "str", ("unknown", "cold", "warm")),
    "exclusive": Field(None, "whether nothing else may run beside it on its devices", "bool"),
    "judge": Field(default=True, help="False, or the names of the metrics to judge", type="judge"),
    "name": Field("", "the test's identity, default: its node id without the target", "str"),
    "owner": Field("", "who is asked about the test, default: as CODEOWNERS or the partition says", "line"),
    "time_limit": Field(None, "30m, 1h30m, or seconds", "duration", minimum=0.001),
    "requires": Field(
        (), "features that the partition must have, with a minus must not: '+cuda -hip'", "words"
    ),
    "env": Field(None, "variables over those of the environment", "mapping"),
    "environment": Field("", "environment of the partition, by its name", "str"),
    "modules": Field((), "modules to load after those of the environment", "words"),
    "image": Field("", "container image instead of the environment's", "str"),
    "kubernetes": Field(
        None, "options put over the partition's, where its scheduler is kubernetes", "mapping"
    ),
    "slurm": Field(None, "options put over the partition's, where its scheduler is slurm", "mapping"),
}

#: Fields that are called like a scheduler, and hold options of it.
SCHEDULERS = frozenset({"kubernetes", "slurm"})

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "list": (list, tuple),
    "mapping": (Mapping,), "judge": (bool, list, tuple), "duration": (int, float, str), "size": (int, str),
    "sizes": (list, tuple), "words": (str, list, tuple), "line": (str,), "ranks": (int, str),
    "sanity": (str, list, tuple, Callable),  # type: ignore[dict-item]  # it is a class, whatever typing says
}  # fmt: skip
_KINDS = {"line": "a text", "judge": "True, False or a list of metrics", "duration": "a time like '30m', or seconds",
          "ranks": "a number of ranks or 'all'", "words": "a text or a list of words", "sanity": "a pattern, a function of the run, or a list of them", "size": "bytes, or a size like '64MiB'", "sizes": "a list of sizes like ['8B', '64MiB']"}  # fmt: skip


def as_list(given: str | Sequence[Any]) -> tuple[str, ...]:
    """Return the items of a field that is a list, or a text in which blanks separate them."""
    return tuple(given.split() if isinstance(given, str) else map(str, given))


def field_names(workload: Workload | None) -> frozenset[str]:
    """Return the names that a test may set for *workload*."""
    return frozenset(UNIVERSAL) | frozenset(workload.fields if workload else ())


def wrong_value(field: Field, value: Any) -> str:
    """Return why *value* cannot be the value of *field*, or an empty string."""
    if value is None:
        return "" if field.default is None else "cannot be None"
    if (
        not isinstance(value, _TYPES[field.type])
        or (isinstance(value, bool) and field.type in {"int", "float", "duration", "ranks"})
        or (field.type == "ranks" and isinstance(value, str) and value != ALL_RANKS)
    ):
        kind = _KINDS.get(field.type, field.type)
        return f"expected {kind}, found {value!r}"
    names = value if field.type == "judge" and isinstance(value, (list, tuple)) else ()
    if not all(isinstance(name, str) for name in names):
        return f"expected {_KINDS['judge']}, found {value!r}"
    if field.type in {"duration", "line", "size", "sizes"}:
        return _wrong_form(field, value)
    if field.choices and value not in field.choices:
        return f"{value!r} is not one of {', '.join(map(repr, field.choices))}"
    return _out_of_range(field, value) if isinstance(value, (int, float)) else ""


def _wrong_form(field: Field, value: Any) -> str:
    if field.type == "line":
        return _wrong_line(value)
    return _wrong_duration(value) if field.type == "duration" else wrong_sizes(value, field.minimum)


def _wrong_line(value: str) -> str:
    if not value.isprintable():
        return f"{value!r:.80} is not one line of printable text"
    return f"is longer than {MOST_OWNER} characters" if len(value) > MOST_OWNER else ""


def _out_of_range(field: Field, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "does not fit into 64 bits"
    if value < field.minimum:
        return f"{value} is less than {field.minimum:g}"
    return f"{value} is more than {field.maximum:g}" if value > field.maximum else ""


def choice_like(field: Field, value: Any) -> str:
    """Return the choice of *field* that *value* may have meant, or an empty string."""
    return nearest(str(value), [str(choice) for choice in field.choices])


def _wrong_duration(value: Any) -> str:
    try:
        parse_duration(value)
    except ValueError as error:
        return str(error)
    return ""


#: A path that says where something lies on one machine: a whole word, or what follows an option.
_ABSOLUTE: Final = re.compile(r"(^|=)(/[^=]+)")


def definition_of(spec: JobSpec, workload: Workload) -> str:
    """Return the canonical text: the workload's fields that count, scale, and of trainings preset, steps and data.

    A path counts by what lies there (see :func:`data_kind`), the cache by what was asked for: cold figures compare with cold
    ones only. What ``tuning`` chose counts where it changes what is computed (precision), and not where it is the device's
    manner of doing so.
    """
    chosen = set(MANNER) - set(spec.asked) if spec.parameters.get("tuning") else set()
    fields: dict[str, Any] = {
        name: value
        for name, value in spec.parameters.items()
        if name in workload.fields
        and workload.fields[name].identity
        and value is not None
        and name not in chosen
    }
    fields |= {"nodes": spec.nodes, "devices": spec.ranks, **_software(spec)}
    if spec.workload == "command":
        return text_of("program", {**fields, **_program(spec)})
    fields["preset"] = spec.preset
    if not spec.about_nodes and not to_quality(spec.parameters):
        fields |= {"steps": spec.steps, "warmup": spec.warmup_steps}
    if not spec.about_nodes and spec.data != NO_DATA:
        fields["data"] = data_kind(spec)
    if spec.cache != "unknown":
        fields["cache"] = spec.cache
    return text_of(spec.workload, fields)


def _software(spec: JobSpec) -> dict[str, Any]:
    """Return what the test says of its software, where it says something. A secret counts by its name alone."""
    env = {name: "" if may_be_secret(name) else text for name, text in sorted(spec.env.items())}
    said = {"env": env, "modules": list(spec.modules), "image": spec.image}
    return {name: value for name, value in said.items() if value}


def _program(spec: JobSpec) -> dict[str, Any]:
    """Return what counts of a program: its arguments, of paths only the name, and how samples become a figure."""
    reduced = {name: rule["reduce"] for name, rule in spec.metrics.items() if rule.get("reduce")}
    command = [_ABSOLUTE.sub(lambda found: found[1] + Path(found[2]).name, word) for word in spec.argv]
    built = {one.name: list(one.argv) for one in spec.builds}
    return {
        "command": command,
        **({"reduce": reduced} if reduced else {}),
        **({"build": built} if built else {}),
        **({"needs": {name: one.definition for name, one in spec.needs.items()}} if spec.needs else {}),
    }


def with_needs(specs: Iterable[JobSpec]) -> list[JobSpec]:
    """Return *specs* with all that they need: each once, before the first that needs it."""
    found: dict[str, JobSpec] = {}
    for spec in specs:
        for one in with_needs(spec.needs.values()):
            found.setdefault(one.node_id, one)
        found.setdefault(spec.node_id, spec)
    return list(found.values())


def data_kind(spec: JobSpec) -> str:
    """Return memory, device, synthetic (files), or the kind of the named set with its name.

    A path gives ``path``, or ``path-synthetic`` where a set of ours lies: it shares no series with real data.
    """
    if spec.data in {"memory", "device"}:
        return spec.data
    if spec.data == "files":
        return "synthetic"
    if dataset := spec.target.datasets.get(spec.data):
        return f"{dataset.kind}-{dataset.name}"
    return "path" if path_kind(spec.data) == "real" else "path-synthetic"


def path_kind(path: str) -> str:
    """Return the kind of the set at *path*: as its manifest says if it is one of ours, else real.

    Searches the folders that the worker searches (node/worker/data/source.py). What cannot be read here is left to the worker, which says why.
    """
    try:
        manifest = read_manifest(Path(path)) or read_manifest(Path(path).parent)
    except (DataError, OSError):
        return "real"
    return manifest.kind if manifest is not None else "real"


def uuid7(time_ns: int | None = None, bits: bytes | None = None) -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 other bits; sorts by time.

    Args:
        time_ns: in ns UTC; None: now.
        bits: ten bytes of which the other bits are taken. None: the first 12 are the fraction of the millisecond
            (section 6.2, method 3), as runs of one plan are made within one; the rest are random.
    """
    milliseconds, rest_ns = divmod(time.time_ns() if time_ns is None else time_ns, 1_000_000)
    random = int.from_bytes(os.urandom(10) if bits is None else bits, "big")
    upper = rest_ns * (1 << 12) // 1_000_000 if bits is None else random >> 64 & 0xFFF
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | upper << 64
    value |= 0b10 << 62 | random & (1 << 62) - 1
    return str(uuid.UUID(int=value))


#: Stands for what was cut out of a name.
_CUT = "..."


def short_names(specs: Sequence[JobSpec]) -> list[str]:
    """Return the node ids of *specs* without what all have in common or nothing needs: ``test_copy[16]``.

    The target goes where all have the same one. The file stays only where two files have a test of that name.
    """
    one_target = len({spec.target.id for spec in specs}) == 1
    ids = [_without_target(spec) if one_target else spec.node_id for spec in specs]
    names = [name.partition("::")[2] or name for name in ids]
    counts = collections.Counter(names)
    return [whole if counts[name] > 1 else name for whole, name in zip(ids, names, strict=True)]


def cut_names(names: Sequence[str], width: int) -> list[str]:
    """Return *names* cut in the middle to at most *width* characters, where those that differ still differ if they can."""
    cut = [_cut_middle(name, width) for name in names]
    for text in {one for one in cut if cut.count(one) > 1}:
        same = [number for number, one in enumerate(cut) if one == text]
        columns = enumerate(zip(*[names[number] for number in same], strict=False))
        common = next((at for at, letters in columns if len(set(letters)) > 1), 0)
        for number in same:
            rest = names[number][max(0, common - width // 3) :]
            cut[number] = _cut_end(_CUT + rest if len(names[number]) > width else names[number], width)
    return cut


def _without_target(spec: JobSpec) -> str:
    """Return the node id of *spec* without its target, which is the first of its parameters."""
    test, bracket, parameters = spec.node_id.partition("[")
    if not bracket or not parameters.startswith(spec.target.id):
        return spec.node_id
    rest = parameters[len(spec.target.id) :]
    return test if rest == "]" else f"{test}[{rest.removeprefix('-')}"


def _cut_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = min(max(len(text) - text.find("["), width // 3), 2 * width // 3)
    return f"{text[: width - tail - len(_CUT)]}{_CUT}{text[len(text) - tail :]}"


def _cut_end(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - len(_CUT)]}{_CUT}"
