"""Turns what a test declares into a job spec, or into a list of all that is wrong with it. Pure, no pytest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.batch.plan import HELD, VETTED
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.arguments import with_plain_argv
from pytest_mlhpc.jobs.key import benchmark_key
from pytest_mlhpc.jobs.patterns import wrong_pattern
from pytest_mlhpc.jobs.scheduler_options import checked, without_manifest
from pytest_mlhpc.jobs.sizes import in_bytes, wrong_sizes
from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec
from pytest_mlhpc.results.schema import BETTER, UNITS
from pytest_mlhpc.system.model import Partition, Target
from pytest_mlhpc.system.quantities import parse_duration
from pytest_mlhpc.worker.workloads.definitions import Field, Workload
from pytest_mlhpc.worker.workloads.fields.arithmetic import tuned
from pytest_mlhpc.worker.workloads.fields.quality import WINDOW, to_quality

#: Fields that every workload has. ``time_limit`` is in seconds; ``devices`` is the total, one for each rank.
UNIVERSAL: Mapping[str, Field] = {
    "nodes": Field(1, "nodes of the run", minimum=1),
    "devices": Field(1, "accelerators of the run, all nodes together; each is owned by one rank", minimum=1),
    "steps": Field(20, "steps that are timed", minimum=0),
    "warmup": Field(3, "steps before the timed ones", minimum=0),
    "data": Field("memory", "memory, device, files, a data set of the system, or a path", "str"),
    "cache": Field("unknown", "state of the page cache", "str", ("unknown", "cold", "warm")),
    "exclusive": Field(None, "whether nothing else may run beside it on its devices", "bool"),
    "judge": Field(default=True, help="False, or the names of the metrics to judge", type="judge"),
    "name": Field("", "name in the key, default: the test function's", "str"),
    "time_limit": Field(None, "30m, 1h30m, or seconds", "duration", minimum=0.001),
    "features": Field((), "words that the partition must have among its features", "list"),
    "launcher": Field("", "launcher instead of the partition's", "str"),
    "kubernetes": Field(
        None, "options put over the partition's, where its scheduler is kubernetes", "mapping"
    ),
}

#: Limit of a run that only tells what vetting before it has found, in seconds.
VETTING_RUN_S = 10.0

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "list": (list, tuple),
    "mapping": (Mapping,), "judge": (bool, list, tuple), "duration": (int, float, str), "size": (int, str),
    "sizes": (list, tuple),
}  # fmt: skip
_KINDS = {"judge": "True, False or a list of metrics", "duration": "a time like '30m', or seconds",
          "size": "bytes, or a size like '64MiB'", "sizes": "a list of sizes like ['8B', '64MiB']"}  # fmt: skip
#: Fields that say how a run is measured; the workload `nodes` measures nothing.
_NOT_HELD = ("steps", "warmup", "data", "cache", "launcher")
#: Fields that are called like a scheduler, and hold options of it.
SCHEDULERS = frozenset({"kubernetes"})
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
#: Shown in tables, file names and keys: one line without control characters.
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}\Z")


@dataclass(frozen=True)
class Declaration:
    """What one test says: its marker (``marked``) and those of its parameters that name fields (``parametrized``)."""

    node_id: str
    function: str
    workload: str
    target: Target
    marked: Mapping[str, Any]
    parametrized: Mapping[str, Any]
    folder: Path = Path()  #: of the test's file


def field_names(workload: Workload | None) -> frozenset[str]:
    """Return the names that a test may set for *workload*."""
    return frozenset(UNIVERSAL) | frozenset(workload.fields if workload else ())


def resolve(
    declared: Declaration,
    workloads: Mapping[str, Workload],
    preset: str | None,
    launchers: Mapping[str, str],
    schedulers: Mapping[str, type[Any] | None] | None = None,
) -> JobSpec:
    """Return the job spec: parametrize > marker > preset > the workload's default. *launchers*: name -> module.

    *schedulers*: name -> the model of its options, by which those of the test are checked.

    Raises:
        SpecError: lists everything that is wrong.
    """
    workload = workloads.get(declared.workload)
    if workload is None:
        text = f"unknown workload {declared.workload!r}; there are {', '.join(sorted(workloads))}"
        hint = nearest(str(declared.workload), workloads)
        raise SpecError([Problem(declared.node_id, "", text, hint)])
    fields = {**UNIVERSAL, **workload.fields}
    asked = {**declared.marked, **declared.parametrized}
    partition = declared.target.partition
    chosen = preset or partition.preset
    problems = _wrong_asked(declared, workload, fields, asked)
    if chosen not in workload.presets:
        known = ", ".join(workload.presets)
        text = f"{declared.workload} has no preset {chosen!r}; it has {known}"
        problems.append(Problem(declared.node_id, "preset", text, nearest(chosen, workload.presets)))
    if problems:
        raise SpecError(problems)
    asked, options = _scheduler_options(declared, asked, schedulers or {})
    asked = with_plain_argv(declared.node_id, asked) if workload.name == "command" else asked
    values = {name: field.default for name, field in fields.items()}
    values.update({k: v for k, v in workload.presets[chosen].items() if k in fields})
    values.update({k: in_bytes(fields[k].type, v) for k, v in asked.items()})
    if values.get("global_batch", 0) is None:
        per_device = max(workload.device_batch, values.get("gradient_accumulation") or 1)
        values["global_batch"] = per_device * values["devices"]
    values = tuned(values, asked, partition.accelerator, workload.name)
    _check_within(declared, workload, values)
    spec = _spec(declared, workload, chosen, values, asked)
    contradictions = [
        *_contradictions(spec, values),
        *workload.contradictions({**values, "accelerator": partition.accelerator}),
    ]
    problems = [Problem(declared.node_id, key, text) for key, text in contradictions]
    module = launchers.get(spec.launcher)
    if module is None:
        text = f"unknown launcher {spec.launcher!r}; there are {', '.join(sorted(launchers))}"
        problems.append(Problem(declared.node_id, "launcher", text, nearest(spec.launcher, launchers)))
    elif not module.startswith("pytest_mlhpc.launch."):
        spec = replace(spec, launcher=module)
    if problems:
        raise SpecError(problems)
    return replace(spec, scheduler_options=options, benchmark=benchmark_key(spec, workload))


def _wrong_asked(
    declared: Declaration, workload: Workload, fields: Mapping[str, Field], asked: Mapping[str, Any]
) -> list[Problem]:
    """Return what is wrong with each field that the test sets, looked at alone."""
    found = []
    for name, value in asked.items():
        if name not in fields:
            text = f"{declared.workload} has no such field"
            found.append(Problem(declared.node_id, name, text, nearest(name, fields)))
            continue
        if name in workload.without:
            found.append(Problem(declared.node_id, name, f"means nothing for {workload.name}"))
        if text := _wrong(fields[name], value):
            found.append(Problem(declared.node_id, name, text, _hint(fields[name], value)))
    return found


def _scheduler_options(
    declared: Declaration, asked: Mapping[str, Any], schedulers: Mapping[str, type[Any] | None]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return *asked* without options of schedulers that this target has not, and those of its own, checked.

    Raises:
        SpecError: what is wrong with them.
    """
    partition = declared.target.partition
    rest = {name: value for name, value in asked.items() if name not in SCHEDULERS}
    given = asked.get(partition.scheduler) if partition.scheduler in SCHEDULERS else None
    if not given:
        return rest, {}
    found, problems = checked(
        declared.node_id,
        partition.scheduler,
        given=given,
        options=partition.scheduler_options,
        model=schedulers.get(partition.scheduler),
        folder=declared.folder,
    )
    if problems:
        raise SpecError(problems)
    return {**rest, partition.scheduler: without_manifest(found)}, found


def lacking(spec: JobSpec) -> str:
    """Return what the partition does not have although *spec* asks for it, or an empty string."""
    partition = spec.target.partition
    if spec.node and spec.nodes > 1:
        return f"--each-node runs tests of one node, {spec.nodes} asked"
    if missing := sorted(set(spec.features) - partition.features):
        return f"{partition.id} has no feature {', '.join(map(repr, missing))}"
    if spec.nodes > partition.nodes.max:
        return f"{partition.id} gives at most {partition.nodes.max} nodes, {spec.nodes} asked"
    one_node = spec.ranks // spec.nodes
    if partition.accelerator == "cpu":
        if one_node > partition.nodes.cores:
            return f"a node of {partition.id} has {partition.nodes.cores} cores, {one_node} ranks asked"
    elif one_node > partition.nodes.devices:
        return f"a node of {partition.id} has {partition.nodes.devices} devices, {one_node} asked"
    return ""


def duplicates(specs: Sequence[JobSpec]) -> list[Problem]:
    """Return a problem for every two tests that would share one series."""
    seen: dict[tuple[str, str, str, str], str] = {}
    problems = []
    for spec in specs:
        if spec.about_nodes:
            continue  # it is never compared with anything
        target = spec.target
        series = (target.partition.id, target.environment.name, spec.node, spec.benchmark)
        first = seen.setdefault(series, spec.node_id)
        if first != spec.node_id:
            text = f"has the same key as {first}: {spec.benchmark}; give one of them another name="
            problems.append(Problem(spec.node_id, "name", text))
    return problems


def _spec(
    declared: Declaration,
    workload: Workload,
    preset: str,
    values: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> JobSpec:
    partition = declared.target.partition
    command = workload.name == "command"
    metrics = values.get("metrics") or {} if command else {}
    judged = _judged(values["judge"], workload, metrics)
    about_nodes = workload.name in (HELD, VETTED)
    ranks = _held_ranks(values["nodes"], asked, partition) if about_nodes else values["devices"]
    apart = {*UNIVERSAL, "argv", "metrics", "cwd"} if command else set(UNIVERSAL)
    exclusive = values["exclusive"]
    return JobSpec(
        node_id=declared.node_id,
        name=values["name"] or declared.function,
        workload=workload.name,
        module="" if workload.module.startswith("pytest_mlhpc.") else workload.module,
        target=declared.target,
        preset=preset,
        parameters={name: value for name, value in values.items() if name not in apart},
        asked=dict(asked),
        nodes=values["nodes"],
        ranks=ranks,
        steps=1 if to_quality(values) else values["steps"],  # it needs as many as it needs
        warmup_steps=0 if to_quality(values) else values["warmup"],
        time_limit_s=parse_duration(values["time_limit"] or _time_limit(workload, partition)),
        launcher=_held_launcher(partition)
        if about_nodes
        else values["launcher"] or _launcher(partition.launcher, values["devices"], command=command),
        data=NO_DATA if workload.probe else values["data"],
        cache=values["cache"],
        exclusive=(not command) if exclusive is None else exclusive,
        judged=judged,
        expected_metrics=tuple(metrics) if command else _expected(workload, values, judged),
        argv=tuple(values["argv"]) if command else (),
        metrics=metrics,
        cwd=values["cwd"] if command else None,
        node=declared.target.node,
        features=tuple(map(str, values["features"])),
    )


def _time_limit(workload: Workload, partition: Partition) -> float:
    """Return the limit of a run that says none; vetting has its own, beside which its run takes no time."""
    return VETTING_RUN_S if workload.name == VETTED else partition.time_limit_s


def _held_ranks(nodes: int, asked: Mapping[str, Any], partition: Partition) -> int:
    """Return how many devices are held: all of each node, unless the test says otherwise; on CPUs one rank a node."""
    each = partition.nodes.devices if partition.accelerator != "cpu" else 1
    return int(asked.get("devices", nodes * max(1, each)))


def _held_launcher(partition: Partition) -> str:
    return "srun" if partition.scheduler == "slurm" else "plain"


def _launcher(partitions: str, ranks: int, *, command: bool) -> str:
    if partitions not in {"", "auto", "plain", "torchrun"}:
        return partitions
    return "plain" if command or ranks == 1 else "torchrun"


def _judged(judge: Any, workload: Workload, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    if judge is False:
        return ()
    if judge is not True:
        return tuple(judge)
    if workload.name != "command":
        return tuple(workload.judged)
    return tuple(n for n, m in metrics.items() if isinstance(m, Mapping) and m.get("better") != "none")


def _expected(workload: Workload, values: Mapping[str, Any], judged: Sequence[str]) -> tuple[str, ...]:
    """Return what the run must report: what its workload always does, what its values add, what is judged."""
    fixed = (*workload.expected, *workload.expected_of(values))
    return tuple(dict.fromkeys((*fixed, *judged)))


def _wrong(field: Field, value: Any) -> str:
    """Return why *value* cannot be the value of *field*, or an empty string."""
    if value is None:
        return "" if field.default is None else "cannot be None"
    if not isinstance(value, _TYPES[field.type]) or (
        isinstance(value, bool) and field.type in {"int", "float", "duration"}
    ):
        kind = _KINDS.get(field.type, field.type)
        return f"expected {kind}, found {value!r}"
    if field.type in {"duration", "size", "sizes"}:
        return _wrong_duration(value) if field.type == "duration" else wrong_sizes(value, field.minimum)
    if field.choices and value not in field.choices:
        return f"{value!r} is not one of {', '.join(map(repr, field.choices))}"
    if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= field.minimum):
        return f"{value} is less than {field.minimum:g}" if math.isfinite(value) else f"{value} is not finite"
    return ""


def _check_within(declared: Declaration, workload: Workload, values: Mapping[str, Any]) -> None:
    """Check each field of another workload that a field holds, before they are looked at together.

    Raises:
        SpecError: lists everything that is wrong with them.
    """
    problems = [
        Problem(declared.node_id, holder, f"{name}: {text}", _hint(known[name], value))
        for holder, fields_of in workload.within.items()
        for known in (fields_of(values),)
        for name, value in values[holder].items()
        if name in known and (text := _wrong(known[name], value))
    ]
    if problems:
        raise SpecError(problems)


def _wrong_duration(value: Any) -> str:
    try:
        parse_duration(value)
    except ValueError as error:
        return str(error)
    return ""


def _hint(field: Field, value: Any) -> str:
    return nearest(str(value), [str(choice) for choice in field.choices])


def _contradictions(spec: JobSpec, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (field, text) for values that are fine alone but not together."""
    found = []
    if not _NAME.match(spec.name):
        found.append(("name", f"{spec.name!r} is empty, too long or holds control characters"))
    if spec.ranks % spec.nodes:
        found.append(("devices", f"{spec.ranks} devices do not divide over {spec.nodes} nodes"))
    if spec.workload == "command":
        found += _wrong_command(spec)
    elif spec.about_nodes:
        found += [
            (key, "is nothing that nodes of a test's own have") for key in _NOT_HELD if key in spec.asked
        ]
    elif spec.steps < 1:
        found.append(("steps", "a run of no steps measures nothing"))
    if to_quality(values):
        text = "means nothing with until='quality', which ends where the target is reached (see max_epochs, max_seconds)"
        found += [(key, text) for key in WINDOW if key in spec.asked]
    known = ["memory", "device", "files", *spec.target.datasets]
    data = values["data"]
    # a test that lacks a feature here is skipped, with what it lacks
    skipped = not spec.target.partition.features.issuperset(spec.features)
    if data not in known and "/" not in data and not skipped:
        hint = nearest(data, known)
        text = f"{data!r} is neither a data set of {spec.target.partition.system} nor a path"
        found.append(("data", text + (f" (did you mean {hint!r}?)" if hint else "")))
    unknown = [name for name in spec.judged if name not in spec.expected_metrics]
    if isinstance(values["judge"], (list, tuple)) and unknown:
        found.append(("judge", f"not among the metrics: {', '.join(map(str, unknown))}"))
    return found


def _wrong_command(spec: JobSpec) -> list[tuple[str, str]]:
    found = []
    if not spec.argv or not spec.argv[0]:
        found.append(("argv", "names no program; give a list such as ['./bench', '-n', '4']"))
    if any("\0" in argument for argument in spec.argv):
        found.append(("argv", "holds a NUL character"))
    if not spec.metrics:
        found.append(("metrics", "names no metric, so nothing would be measured"))
    for name, rule in spec.metrics.items():
        found += [(f"metrics.{name}", text) for text in _wrong_metric(name, rule)]
    return found


def _wrong_metric(name: Any, rule: Any) -> list[str]:
    if not isinstance(name, str) or not _METRIC_NAME.match(name):
        return ["a metric's name is snake_case of at most 64 characters"]
    if not isinstance(rule, Mapping):
        return [f"expected a mapping of pattern, unit and better, found {rule!r}"]
    texts = []
    for key in rule:
        if key not in {"pattern", "unit", "better"}:
            hint = nearest(str(key), ("pattern", "unit", "better"))
            texts.append(f"unknown key {key!r}" + (f" (did you mean {hint!r}?)" if hint else ""))
    if rule.get("unit") not in UNITS:
        texts.append(f"unit {rule.get('unit')!r} is not one of {', '.join(UNITS)}")
    if rule.get("better") not in BETTER:
        texts.append(f"better {rule.get('better')!r} is not one of {', '.join(BETTER)}")
    if rule.get("pattern") is not None and (text := wrong_pattern(rule["pattern"])):
        texts.append(text)
    return texts
