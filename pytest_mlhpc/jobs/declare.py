"""From what a test declares to a job spec, or to a list of all that is wrong with it. Pure, without pytest."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.builds import Build, Needed, Preparation, build_plan, fields_of_run
from pytest_mlhpc.jobs.contradictions import contradictions, unknown_judged
from pytest_mlhpc.jobs.programs import (
    FUNCTION,
    conditions_of,
    references_of,
    staged_files,
    with_plain_values,
    working_directory,
)
from pytest_mlhpc.jobs.software import SoftwareError, for_record, target_with, variables
from pytest_mlhpc.jobs.spec import (
    NO_DATA,
    SCHEDULERS,
    UNIVERSAL,
    JobSpec,
    as_list,
    choice_like,
    definition_of,
    in_bytes,
    wrong_value,
)
from pytest_mlhpc.node.protocol.plan import HELD, VETTED
from pytest_mlhpc.node.worker.workloads.definitions import Workload
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import tuned
from pytest_mlhpc.node.worker.workloads.fields.quality import to_quality
from pytest_mlhpc.store.text import written_out


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
    from pytest_mlhpc.config.yaml import validate

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
    owner: str = ""  #: of the test's file
    needs: Mapping[str, Needed] = field(default_factory=dict)  #: fixtures that must be there before it runs

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
    chosen = str(asked.get("preset") or preset or declared.target.partition.preset)
    if chosen not in workload.presets:
        known = ", ".join(workload.presets)
        text = f"{declared.workload} has no preset {chosen!r}; it has {known}"
        problems.append(Problem(declared.where, "preset", text, nearest(chosen, workload.presets)))
    if problems:
        raise SpecError(problems)
    declared, asked = _with_software(declared, asked)
    partition = declared.target.partition
    asked, options = _scheduler_options(declared, asked, schedulers or {})
    asked = with_plain_values(declared.where, asked) if workload.name == COMMAND else asked
    values = _effective(workload, chosen, asked, partition.accelerator)
    _check_within(declared, workload, values)
    inner = functools.partial(
        resolve, workloads=workloads, preset=preset, launchers=launchers, schedulers=schedulers
    )
    spec = replace(
        _spec(declared, workload, chosen, values, asked),
        scheduler_options=options,
        needs=_runs_needed(declared, inner),
    )
    together = [
        *contradictions(spec, values),
        *unknown_judged(spec, workload, values),
        *workload.contradictions({**values, "accelerator": partition.accelerator}),
    ]
    problems = [
        Problem(declared.where, "devices_per_node" if key == "devices" else key, text)
        for key, text in together
    ]
    if problems:
        raise SpecError(problems)
    module = launchers[spec.launcher]  # one of ours, or a partition's, checked with its file
    if module != "pytest_mlhpc.node.launch":
        spec = replace(spec, launcher=module)
    return replace(spec, definition=definition_of(spec, workload))


def _runs_needed(
    declared: Declaration, resolve_inner: Callable[[Declaration], JobSpec]
) -> dict[str, JobSpec]:
    """Return the specs of the runs that *declared* needs, by the name of their fixture.

    Raises:
        SpecError: what is wrong with one; fields are called ``NAME: FIELD``.
    """
    found = {}
    for name, needed in declared.needs.items():
        if not isinstance(needed.declared, Preparation):
            continue
        inner = Declaration(
            node_id=f"{needed.node_id}[{declared.target.id}]",
            function=name,
            workload=COMMAND,
            target=declared.target,
            marked=fields_of_run(declared.where, name, needed.declared),
            parametrized={},
            folder=needed.folder,
            decorator="program",
            line=declared.where,
            identity=needed.identity,
            needs=needed.needs,
        )
        try:
            found[name] = resolve_inner(inner)
        except SpecError as error:
            problems = [replace(one, key=f"{name}: {one.key}" if one.key else name) for one in error.problems]
            raise SpecError(problems) from None
    return found


def _effective(
    workload: Workload, preset: str, asked: Mapping[str, Any], accelerator: str
) -> Mapping[str, Any]:
    """Return the value of every field: what the test asks for, else the preset's, else the default."""
    fields = {**UNIVERSAL, **workload.fields}
    values = {name: field.default for name, field in fields.items()}
    values.update({k: v for k, v in workload.presets[preset].items() if k in fields})
    values.update({k: in_bytes(fields[k].type, v) for k, v in asked.items()})
    if (each := values.get("ranks_per_node")) and "devices_per_node" not in asked:
        values["devices_per_node"] = each
    values["devices"] = values["nodes"] * values["devices_per_node"]
    if values.get("global_batch", 0) is None:
        per_device = max(workload.device_batch, values.get("gradient_accumulation") or 1)
        values["global_batch"] = per_device * values["devices"]
    return tuned(values, asked, accelerator, workload.name)


#: Of a field that some expect a test to have.
_OF_PARTITION = "a test has no launcher; name it in the partition's entry of systems.yaml"


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
            if key == "launcher":
                found.append(Problem(where, key, _OF_PARTITION))
            else:
                found.append(Problem(where, key, f"{called} has no such field", nearest(key, fields)))
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


def _with_software(declared: Declaration, asked: Mapping[str, Any]) -> tuple[Declaration, dict[str, Any]]:
    """Return *declared* with the environment, modules and image that it asks for, and *asked* fit for a record.

    An image for pods is an option of their scheduler.

    Raises:
        SpecError: what is wrong with them.
    """
    image, modules = str(asked.get("image") or ""), as_list(asked.get("modules") or ())
    found = dict(asked)
    try:
        target = target_with(declared.target, str(asked.get("environment") or ""), modules, image)
        variables(asked.get("env"))
    except SoftwareError as error:
        raise SpecError([Problem(declared.where, error.key, str(error))]) from None
    if image and target.partition.scheduler == "kubernetes":
        found["kubernetes"] = {**(asked.get("kubernetes") or {}), "image": image}
    return replace(declared, target=target), found


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
    model = schedulers.get(partition.scheduler)
    known = getattr(model, "model_fields", partition.scheduler_options)
    found, problems = checked(
        declared.where,
        partition.scheduler,
        given=given,
        options={name: value for name, value in partition.scheduler_options.items() if name in known},
        model=model,
        folder=declared.folder,
    )
    problems += [
        Problem(declared.where, partition.scheduler, f"{name} is the site's to say, in systems.yaml")
        for name in given
        if name in getattr(model, "OF_SITE", ())
    ]
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
    env = variables(values["env"])
    metrics = values.get("metrics") or {} if command else {}
    judged = _judged(values["judge"], workload, metrics)
    about_nodes = workload.name in (HELD, VETTED)
    ranks = _test_node_ranks(values["nodes"], asked, partition) if about_nodes else values["devices"]
    apart = {*UNIVERSAL, "devices", *(_OF_PROGRAM if command else ())}
    exclusive = values["exclusive"]
    return JobSpec(
        node_id=declared.node_id,
        name=values["name"] or declared.function,
        workload=workload.name,
        benchmark=written_out(values["name"] or declared.identity or declared.node_id),
        module="" if workload.module.startswith("pytest_mlhpc.") else workload.module,
        target=declared.target,
        preset=preset,
        parameters={name: value for name, value in values.items() if name not in apart},
        asked={**asked, **({"env": for_record(env)} if env else {})},
        nodes=values["nodes"],
        ranks=ranks,
        steps=1 if to_quality(values) else values["steps"],  # it needs as many as it needs
        warmup_steps=0 if to_quality(values) else values["warmup"],
        time_limit_s=parse_duration(values["time_limit"] or _time_limit(workload, partition)),
        launcher=_test_node_launcher(partition)
        if about_nodes
        else _launcher(partition, values, command=command),
        data=NO_DATA if workload.probe else values["data"],
        cache=values["cache"],
        exclusive=(not command) if exclusive is None else exclusive,
        judged=judged,
        expected_metrics=tuple(metrics) if command else _expected(workload, values, judged),
        env=env,
        modules=as_list(values["modules"]),
        image=values["image"],
        folder="" if partition.apart else str(declared.folder),
        node=declared.target.node,
        requires=as_list(values["requires"]),
        owner=values["owner"].strip() or declared.owner or partition.owner,
        **(_program_fields(declared, values, metrics, judged) if command else {}),
    )


def _program_fields(
    declared: Declaration, values: Mapping[str, Any], metrics: Mapping[str, Any], judged: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of a spec that only programs have.

    Raises:
        SpecError: its files, builds, references or folder cannot be.
    """
    where, folder, partition = declared.where, declared.folder, declared.target.partition
    files_of_metrics = [rule["file"] for rule in metrics.values() if rule.get("file")]
    return {
        "argv": tuple(values["command"]),
        "processes": values["nodes"] * values["ranks_per_node"] if values["ranks_per_node"] else 1,
        "files": staged_files(where, folder, partition, values),
        "artifacts": tuple(dict.fromkeys((*as_list(values["artifacts"]), *files_of_metrics))),
        **_found_by_functions(declared, values, metrics),
        "builds": tuple(
            build_plan(where, name, one.declared, one.folder, declared.target)
            for name, one in declared.needs.items()
            if isinstance(one.declared, Build)
        ),
        "metrics": metrics,
        "references": references_of(where, partition, values["reference"], metrics, judged),
        "cwd": working_directory(where, folder, partition, values["cwd"]),
    }


def _found_by_functions(
    declared: Declaration, values: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return which of its figures a test's own functions find, and where they stand, as fields of a spec.

    Raises:
        SpecError: a parameter holds one.
    """
    conditions = conditions_of(values["sanity"])
    checks = any(one.startswith(FUNCTION) for one in conditions)
    called = {"sanity": checks, "metrics": any(rule.get("extract") for rule in metrics.values())}
    if parametrized := [name for name, has in called.items() if has and name in declared.parametrized]:
        text = "a function stands in the test's decorator, where it is found again; a parameter can hold none"
        raise SpecError([Problem(declared.where, parametrized[0], text)])
    file, _, test = declared.node_id.partition("::")
    place = f"{declared.folder.absolute() / Path(file).name}::{test.partition('[')[0]}"
    return {
        "sanity": tuple(one for one in conditions if not one.startswith(FUNCTION)),
        "checks": checks,
        "functions": place if any(called.values()) else "",
    }


def _time_limit(workload: Workload, partition: Partition) -> float:
    """Return the limit of a run that says none; vetting has its own, beside which its run takes no time."""
    return VETTING_RUN_S if workload.name == VETTED else partition.time_limit_s


def _test_node_ranks(nodes: int, asked: Mapping[str, Any], partition: Partition) -> int:
    """Return how many devices a test reserves: all of each node, unless the test says otherwise; on CPUs one rank a node."""
    each = partition.nodes.devices if partition.accelerator != "cpu" else 1
    return nodes * int(asked.get("devices_per_node", max(1, each)))


def _test_node_launcher(partition: Partition) -> str:
    return "srun" if partition.scheduler == "slurm" else "plain"


def _launcher(partition: Partition, values: Mapping[str, Any], *, command: bool) -> str:
    """Return who starts the processes of a run: of a program without ``ranks_per_node``, the batch itself."""
    if command and not values["ranks_per_node"]:
        return "plain"
    if command and partition.launcher in {"", "auto", "plain"}:
        if partition.scheduler == "slurm":
            return "srun"
        several = "podrun" if partition.scheduler in {"kubernetes", "commands"} else "torchrun"
        return several if values["nodes"] > 1 else "spawn"
    if partition.launcher not in {"", "auto", "plain", "torchrun"}:
        return partition.launcher
    return "plain" if values["devices"] == 1 and not command else "torchrun"


#: Fields of a program that are no parameters of it: a spec has them by themselves.
_OF_PROGRAM = ("command", "metrics", "cwd", "reference", "files", "artifacts", "sanity")


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
