"""Turns what a test declares into a job spec, or into a list of all that is wrong with it. Pure, no pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.batch.plan import HELD, VETTED
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.arguments import with_plain_argv
from pytest_mlhpc.jobs.contradictions import contradictions
from pytest_mlhpc.jobs.fields import SCHEDULERS, UNIVERSAL, choice_like, wrong_value
from pytest_mlhpc.jobs.key import benchmark_key
from pytest_mlhpc.jobs.scheduler_options import checked, without_manifest
from pytest_mlhpc.jobs.sizes import in_bytes
from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec
from pytest_mlhpc.system.model import Partition, Target
from pytest_mlhpc.system.quantities import parse_duration
from pytest_mlhpc.worker.workloads.definitions import Field, Workload
from pytest_mlhpc.worker.workloads.fields.arithmetic import tuned
from pytest_mlhpc.worker.workloads.fields.quality import to_quality

#: Limit of a run that only tells what vetting before it has found, in seconds.
VETTING_RUN_S = 10.0


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
    together = [
        *contradictions(spec, values),
        *workload.contradictions({**values, "accelerator": partition.accelerator}),
    ]
    problems = [Problem(declared.node_id, key, text) for key, text in together]
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
        if text := wrong_value(fields[name], value):
            found.append(Problem(declared.node_id, name, text, choice_like(fields[name], value)))
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


def _check_within(declared: Declaration, workload: Workload, values: Mapping[str, Any]) -> None:
    """Check each field of another workload that a field holds, before they are looked at together.

    Raises:
        SpecError: lists everything that is wrong with them.
    """
    problems = [
        Problem(declared.node_id, holder, f"{name}: {text}", choice_like(known[name], value))
        for holder, fields_of in workload.within.items()
        for known in (fields_of(values),)
        for name, value in values[holder].items()
        if name in known and (text := wrong_value(known[name], value))
    ]
    if problems:
        raise SpecError(problems)
