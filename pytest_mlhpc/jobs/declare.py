"""From what a test declares to a job spec, or to a list of all that is wrong with it. Pure, without pytest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.contradictions import contradictions, unknown_judged
from pytest_mlhpc.jobs.metrics import wrong_metrics
from pytest_mlhpc.jobs.spec import (
    NO_DATA,
    SCHEDULERS,
    UNIVERSAL,
    JobSpec,
    choice_like,
    definition_of,
    in_bytes,
    wrong_value,
)
from pytest_mlhpc.node.protocol.plan import HELD, VETTED
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import tuned
from pytest_mlhpc.node.worker.workloads.fields.quality import to_quality


def with_plain_values(where: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return *asked*, the fields of a program, fit for a record: ``command`` is a list of texts, ``metrics`` hold rules.

    Raises:
        SpecError: names each word that is neither text nor number nor path, and each metric that cannot be.
    """
    found, problems = dict(asked), []
    if isinstance(command := asked.get("command"), str):
        try:
            found["command"] = shlex.split(command)
        except ValueError as error:
            problems.append(Problem(where, "command", f"{str(error).lower()} in {command!r}"))
    elif command is not None:
        problems += [Problem(where, "command", text) for text in _wrong(command)]
        found["command"] = [_text(value) for value in command] if not problems else []
    if "metrics" in asked:
        wrong = wrong_metrics(asked["metrics"])
        problems += [Problem(where, "metrics", text) for text in wrong]
        found["metrics"] = {} if wrong else {metric.name: metric.rule() for metric in asked["metrics"]}
    if problems:
        raise SpecError(problems)
    return found


def beside_test(spec: JobSpec) -> tuple[str, ...]:
    """Return the program and its arguments as nodes are told them.

    A program by a relative path, such as ``./bench``, is the file of that name beside the test, where there is one. A spec
    has it as it was typed: another checkout declares the same run.
    """
    name = next(iter(spec.argv), "")
    if spec.cwd is not None or not spec.folder or "/" not in name or name.startswith("/"):
        return spec.argv
    path = Path(os.path.normpath(Path(spec.folder).absolute() / name))
    return (str(path), *spec.argv[1:]) if path.is_file() else spec.argv


def _text(value: Any) -> str:
    return str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)


def _wrong(command: Sequence[Any]) -> list[str]:
    """Return a text for each word that is no argument: ``str()`` of any object would start something unmeant."""
    return [
        f"word {index} is {value!r}, expected text, a number or a path"
        for index, value in enumerate(command)
        if isinstance(value, bool)
        or not isinstance(value, (str, int, float, os.PathLike))
        or (isinstance(value, os.PathLike) and not isinstance(os.fspath(value), str))
    ]


def checked(
    node_id: str,
    scheduler: str,
    *,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
    model: type[Any] | None,
    folder: Path,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return *given* as *model* understands it, and what is wrong with it.

    It is checked together with the partition's *options*, as they have to fit; *folder* is that of the test's file, to which
    names of files are relative.
    """
    if model is None:
        return {}, [Problem(node_id, scheduler, "no installed package takes options of it")]
    from pytest_mlhpc.config.validation import validate

    try:
        node = _node({**options, **given}, node_id, scheduler)
    except (TypeError, RecursionError) as error:
        return {}, [Problem(node_id, scheduler, str(error))]
    found, problems = validate(model, node, folder=folder)
    if found is None:
        return {}, problems
    effective = found.model_dump()
    return {name: effective[name] for name in given}, []


def without_manifest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return *options* for records and reports: of a manifest, in which a secret may stand, the hash alone."""
    said = {name: value for name, value in options.items() if name != "manifest"}
    if manifest := options.get("manifest"):
        text = json.dumps(manifest, sort_keys=True)
        said["manifest"] = f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return said


def _node(value: Any, where: str, key: str) -> Any:
    """Return *value* as a reader of files would: each part with the place that a problem names.

    Raises:
        TypeError: it holds what no file can, such as an object of Python's.
    """
    from pytest_mlhpc.config.yaml import YamlNode

    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"{key}: the key {name!r:.80} should be text")
        return YamlNode({name: _node(one, where, f"{key}.{name}") for name, one in value.items()}, where, key)
    if isinstance(value, (list, tuple)):
        return YamlNode([_node(one, where, f"{key}[{index}]") for index, one in enumerate(value)], where, key)
    if isinstance(value, Path):
        value = str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return YamlNode(value, where, key)
    raise TypeError(f"{key}: {type(value).__name__} is neither text nor number, list or mapping")


COMMAND = "command"

#: Workload -> the decorator by which alone it is declared.
_DECORATORS = {COMMAND: "program", HELD: "nodes", VETTED: "nodes"}

#: Limit of a run that only tells what vetting before it has found, in seconds.
VETTING_RUN_S = 10.0


@dataclass(frozen=True)
class Declaration:
    """What one test says: its decorator's fields (``marked``) and those of its parameters that name fields."""

    node_id: str
    function: str
    workload: str
    target: Target
    marked: Mapping[str, Any]
    parametrized: Mapping[str, Any]
    folder: Path = Path()  #: of the test's file
    decorator: str = ""  #: that declares it; unset: any
    line: str = ""  #: file:line of the test, for messages; unset: its node id
    identity: str = ""  #: of the test (pytest_mlhpc/session/collection.py); unset: its node id

    @property
    def where(self) -> str:
        """Where its problems are."""
        return self.line or self.node_id


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
    asked = {**declared.marked, **declared.parametrized}
    problems = misdeclared(declared.where, declared.decorator, declared.workload, workloads, asked)
    workload = workloads.get(declared.workload)
    if workload is None:
        raise SpecError(problems)
    fields = {**UNIVERSAL, **workload.fields}
    partition = declared.target.partition
    chosen = preset or partition.preset
    if chosen not in workload.presets:
        known = ", ".join(workload.presets)
        text = f"{declared.workload} has no preset {chosen!r}; it has {known}"
        problems.append(Problem(declared.where, "preset", text, nearest(chosen, workload.presets)))
    if problems:
        raise SpecError(problems)
    asked, options = _scheduler_options(declared, asked, schedulers or {})
    asked = with_plain_values(declared.where, asked) if workload.name == COMMAND else asked
    values = {name: field.default for name, field in fields.items()}
    values.update({k: v for k, v in workload.presets[chosen].items() if k in fields})
    values.update({k: in_bytes(fields[k].type, v) for k, v in asked.items()})
    values["devices"] = values["nodes"] * values["devices_per_node"]
    if values.get("global_batch", 0) is None:
        per_device = max(workload.device_batch, values.get("gradient_accumulation") or 1)
        values["global_batch"] = per_device * values["devices"]
    values = tuned(values, asked, partition.accelerator, workload.name)
    _check_within(declared, workload, values)
    spec = _spec(declared, workload, chosen, values, asked)
    together = [
        *contradictions(spec, values),
        *unknown_judged(spec, workload, values),
        *workload.contradictions({**values, "accelerator": partition.accelerator}),
    ]
    problems = [
        Problem(declared.where, "devices_per_node" if key == "devices" else key, text)
        for key, text in together
    ]
    module = launchers.get(spec.launcher)
    if module is None:
        text = f"unknown launcher {spec.launcher!r}; there are {', '.join(sorted(launchers))}"
        problems.append(Problem(declared.where, "launcher", text, nearest(spec.launcher, launchers)))
    elif not module.startswith("pytest_mlhpc.node.launch."):
        spec = replace(spec, launcher=module)
    if problems:
        raise SpecError(problems)
    return replace(spec, scheduler_options=options, definition=definition_of(spec, workload))


#: Of a field that many expect a test to have.
_OF_SESSION = (
    "a test has no preset; choose one for the session by --mlhpc-preset, or for a partition in systems.yaml"
)


def misdeclared(
    where: str, decorator: str, name: str, workloads: Mapping[str, Workload], asked: Mapping[str, Any]
) -> list[Problem]:
    """Return what is wrong with a test whatever it runs on: each field that it sets, looked at alone."""
    workload = workloads.get(name)
    if workload is None:
        named = sorted(known for known in workloads if known not in _DECORATORS)
        text = f"unknown workload {name!r}; there are {', '.join(named)}"
        return [Problem(where, "", text, nearest(str(name), named))]
    fields, called = {**UNIVERSAL, **workload.fields}, "program" if name == COMMAND else name
    found = _wrong_decorator(where, decorator, workload)
    for key, value in asked.items():
        if key not in fields:
            text = _OF_SESSION if key == "preset" else f"{called} has no such field"
            found.append(Problem(where, key, text, nearest(key, fields)))
            continue
        if key in workload.without:
            found.append(Problem(where, key, f"means nothing for {called}"))
        if text := wrong_value(fields[key], value):
            found.append(Problem(where, key, text, choice_like(fields[key], value)))
    if not found and name == COMMAND:
        try:
            with_plain_values(where, asked)
        except SpecError as error:
            found += error.problems
    return found


def _wrong_decorator(where: str, decorator: str, workload: Workload) -> list[Problem]:
    """Return whether the test's decorator is that of another kind of workload."""
    right = _DECORATORS.get(workload.name)
    if decorator == "train" and right is None and workload.probe:
        right = (
            workload.name if workload.name in {"storage", "collective"} else f"workload({workload.name!r})"
        )
    if not decorator or right in (None, decorator) or decorator == "roofline":
        return []
    return [Problem(where, "", f"{workload.name!r} is declared by @{right}, not by @{decorator}")]


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
        declared.where,
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
    command = workload.name == COMMAND
    metrics = values.get("metrics") or {} if command else {}
    judged = _judged(values["judge"], workload, metrics)
    about_nodes = workload.name in (HELD, VETTED)
    ranks = _held_ranks(values["nodes"], asked, partition) if about_nodes else values["devices"]
    apart = {*UNIVERSAL, "devices", *(("command", "metrics", "cwd", "reference") if command else ())}
    exclusive = values["exclusive"]
    return JobSpec(
        node_id=declared.node_id,
        name=values["name"] or declared.function,
        workload=workload.name,
        benchmark=values["name"] or declared.identity or declared.node_id,
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
        argv=tuple(values["command"]) if command else (),
        metrics=metrics,
        references=_references(declared, values["reference"], metrics, judged) if command else {},
        cwd=_working_directory(declared, values["cwd"]) if command else None,
        folder="" if partition.scheduler == "kubernetes" else str(declared.folder),
        node=declared.target.node,
        requires=split_words(values["requires"]),
    )


def _references(
    declared: Declaration,
    given: Mapping[str, Any] | None,
    metrics: Mapping[str, Mapping[str, Any]],
    judged: Sequence[str],
) -> dict[str, float]:
    """Return metric -> what it promises on this target, in base units.

    Raises:
        SpecError: a value is no positive number, or it is not clear of which metric it is.
    """
    partition = declared.target.partition
    nested = bool(given) and all(isinstance(value, Mapping) for value in (given or {}).values())
    named = dict(given or {}) if nested else {name: given for name in judged[:1] if given}
    problems = []
    if given and not nested and len(judged) != 1:
        example = f"{{{next(iter(metrics), 'rate')!r}: {{{partition.system!r}: 180}}}}"
        problems.append(f"does not say of which metric it is, as {len(judged)} are judged; write {example}")
    for name, values in named.items():
        if name not in judged:
            known = nearest(str(name), judged)
            problems.append(
                f"{name!r} is no judged metric" + (f" (did you mean {known!r}?)" if known else "")
            )
        problems += [
            f"{place}: expected a positive number in the unit of {name}, found {value!r}"
            for place, value in values.items()
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf
        ]
    if problems:
        raise SpecError([Problem(declared.where, "reference", text) for text in problems])
    here = {
        name: next((values[place] for place in (partition.id, partition.system) if place in values), None)
        for name, values in named.items()
    }
    return {
        name: value * metrics[name].get("scale", 1.0) for name, value in here.items() if value is not None
    }


def _working_directory(declared: Declaration, given: str | None) -> str | None:
    """Return the folder that a program starts in: one that is not a whole path is relative to the test's file.

    Raises:
        SpecError: it is relative, and pods do not have the folder of the test's file.
    """
    if given is None or given.startswith("/"):
        return given
    if declared.target.partition.scheduler == "kubernetes":
        text = f"{given!r} is relative to the test's file, which pods do not have; write the whole path of a folder there"
        raise SpecError([Problem(declared.where, "cwd", text)])
    return os.path.normpath(declared.folder / given)


def split_words(given: str | Sequence[Any]) -> tuple[str, ...]:
    """Return the words of a field that is a text with blanks, or a list."""
    return tuple(given.split() if isinstance(given, str) else map(str, given))


def _time_limit(workload: Workload, partition: Partition) -> float:
    """Return the limit of a run that says none; vetting has its own, beside which its run takes no time."""
    return VETTING_RUN_S if workload.name == VETTED else partition.time_limit_s


def _held_ranks(nodes: int, asked: Mapping[str, Any], partition: Partition) -> int:
    """Return how many devices are held: all of each node, unless the test says otherwise; on CPUs one rank a node."""
    each = partition.nodes.devices if partition.accelerator != "cpu" else 1
    return nodes * int(asked.get("devices_per_node", max(1, each)))


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
    if workload.name != COMMAND:
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
        Problem(declared.where, holder, f"{name}: {text}", choice_like(known[name], value))
        for holder, fields_of in workload.within.items()
        for known in (fields_of(values),)
        for name, value in values[holder].items()
        if name in known and (text := wrong_value(known[name], value))
    ]
    if problems:
        raise SpecError(problems)
