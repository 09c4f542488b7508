"""From job specs to the plan of one allocation, the vetting of its nodes, and what a run's lines report of that vetting."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_mlhpc.config.build import derived_values, fill, with_values
from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.jobs.job import Attempt
from pytest_mlhpc.jobs.programs import folders_of, resolved_argv
from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec, allocation_time_s, path_kind, uuid7
from pytest_mlhpc.node.batch.vetting import START_S, limit_of
from pytest_mlhpc.node.files import may_be_secret
from pytest_mlhpc.node.protocol.plan import (
    BUDGET_S,
    DELAYS,
    LYING_EXIT,
    SLOW_RANK,
    VETTED,
    BuildPlan,
    Learned,
    MetricPattern,
    Plan,
    PlantedFault,
    RunPlan,
    VetSettings,
)
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.finding import Exit, Fitness, NodeVerdict, Origin, Report, VetVerdict
from pytest_mlhpc.node.vet.policy import Bound, ExpectedNode
from pytest_mlhpc.node.vet.verdict_files import verdict_from_json
from pytest_mlhpc.store.record import RecordedVetting

#: Stands for a program that did nothing and says that all went well.
LIAR = ("true",)
#: Accelerators whose ranks may be forked: a driver must not have been initialised before, of the others nobody has tried.
WARM = frozenset({"cpu", "cuda"})


def plan_of(
    specs: Sequence[tuple[JobSpec, int]],
    runs_dir: Path,
    payload_sha256: str,
    excluded_nodes: Sequence[str] = (),
    vetting: VetSettings | None = None,
    *,
    usual: Callable[[JobSpec], float | None] = lambda _spec: None,
    fault: PlantedFault | None = None,
) -> Plan:
    """Return the plan of one attempt of each of *specs* (spec, number of the attempt), which have the same needs.

    Its directory is a new one below *runs_dir*, not yet made. The ids of runs and allocation are chosen here, before
    anything is submitted; a run that has an allocation for itself shares its id. Spare nodes are asked for where *vetting*
    may find some unfit. *usual* tells how long a run's timed steps take, in seconds.
    *fault* is what a drill plants into the runs that can have it.
    """
    runs = tuple(
        _planted(replace(run_plan(spec, attempt), usual_s=usual(spec)), spec, fault)
        for spec, attempt in specs
    )
    several = specs[0][0].target.partition.scheduler == "local" or sum(run.warm for run in runs) > 1
    if not several or any(_setup(spec) != _setup(specs[0][0]) for spec, _ in specs):
        # A warm process has imported torch in the environment of one side. Beyond `local` none outlives its allocation.
        runs = tuple(replace(run, warm=False) for run in runs)
    first = specs[0][0]
    runs = tuple(_of_its_side(run, spec, first) for run, (spec, _) in zip(runs, specs, strict=True))
    allocation_id = runs[0].run_id if len(runs) == 1 else uuid7()
    return Plan(
        allocation_id=allocation_id,
        payload_sha256=payload_sha256,
        directory=str(runs_dir / allocation_id),
        nodes=first.nodes,
        time_limit_s=allocation_time_s([spec for spec, _ in specs])
        + (limit_of(vetting) + START_S if vetting else 0.0),
        runs=runs,
        spares=_spares(first, len(excluded_nodes)) if vetting else 0,
        excluded_nodes=() if first.node else tuple(excluded_nodes),
        nodelist=(first.node,) if first.node else (),
        vetting=vetting,
        environment=first.target.environment.name,
        modules=first.modules,
        image=first.image,
        scheduler_options=first.scheduler_options,
    )


def can_have(spec: JobSpec, fault: PlantedFault | None) -> bool:
    """Return whether *fault* can be planted into runs of *spec*: delays into steps of our own loop, a slow rank beside others."""
    if fault is None or spec.about_nodes or fault.workload not in {"", spec.workload}:
        return False
    if fault.kind not in DELAYS:
        return fault.kind == LYING_EXIT
    ours = spec.workload != "command" and spec.data != NO_DATA
    own_loop = ours and spec.target.partition.accelerator not in _REMOTE  # others have loops of their own
    return own_loop and (fault.kind != SLOW_RANK or spec.ranks > 1)


def _planted(run: RunPlan, spec: JobSpec, fault: PlantedFault | None) -> RunPlan:
    """Return *run* with *fault*, if it can have it; a program that lies is one that does nothing."""
    if not can_have(spec, fault):
        return run
    planted = replace(run, fault=fault)
    return replace(planted, argv=LIAR) if planted.lies and run.argv else planted


def _of_its_side(run: RunPlan, spec: JobSpec, first: JobSpec) -> RunPlan:
    """Return *run* with the environment and image of *spec*, where they are not those of the plan's *first* one."""
    name, image = spec.target.environment.name, spec.image
    return replace(
        run,
        environment="" if name == first.target.environment.name else name,
        image="" if image == first.image else image,
    )


def _setup(spec: JobSpec) -> tuple[object, ...]:
    """Return what a process inherits of the run's software."""
    return spec.target.environment, spec.env, spec.packages


def _spares(spec: JobSpec, away: int) -> int:
    """Return how many nodes are asked for beyond those that runs need, *away* of the partition's not being wanted."""
    partition = spec.target.partition
    wanted = {**partition.scheduler_options, **spec.scheduler_options}.get("spares", 0)
    return 0 if spec.node else max(0, min(int(wanted), partition.nodes.max - spec.nodes - away))


def run_plan(spec: JobSpec, attempt: int) -> RunPlan:
    """Return the run of one attempt with a new id and nonce."""
    partition, environment = spec.target.partition, spec.target.environment
    source, path, kind = _data_source(spec)
    derived = {**values_of(spec), **folders_of(spec)}
    return RunPlan(
        run_id=uuid7(),
        nonce=secrets.token_hex(8),
        secret=secrets.token_hex(16),
        attempt=attempt,
        workload=spec.workload,
        parameters=spec.parameters,
        nodes=spec.nodes,
        ranks=spec.ranks,
        cores_per_rank=spec.cores_per_rank,
        device_type=partition.accelerator,
        launcher=spec.launcher,
        time_limit_s=spec.time_limit_s,
        steps=spec.steps,
        warmup_steps=spec.warmup_steps,
        python=environment.python,
        variables={
            **_of_environment(spec),
            **{name: with_values(text, derived) for name, text in spec.env.items()},
            **({"MLHPC_WORKLOAD_MODULE": spec.module} if spec.module else {}),
        },
        argv=tuple(with_values(word, derived) for word in resolved_argv(spec)),
        processes=spec.processes,
        files=dict(spec.files),
        artifacts=spec.artifacts,
        sanity=spec.sanity,
        functions=spec.functions,
        checks=spec.checks,
        builds=builds_of(spec),
        needed=spec.needed,
        metrics={name: MetricPattern(**rule) for name, rule in spec.metrics.items()},
        exclusive=spec.exclusive,
        device_ids=_device_ids(spec),
        data_source=source,
        data_path=path,
        data_kind=kind,
        cache=spec.cache,
        calibrate=partition.scheduler == "local" and spec.exclusive,
        cwd=spec.cwd,
        warm=may_be_warm(spec),
        packages=spec.packages,
    )


def values_of(spec: JobSpec) -> dict[str, object]:
    """Return what stands for a word in braces that the controller knows, in runs of *spec*."""
    return {
        **derived_values(
            cores=spec.node_cores,
            memory=spec.node_memory,
            devices=spec.target.partition.nodes.devices,
            nodes=spec.nodes,
            ranks=spec.started,
        )
    }


def _of_environment(spec: JobSpec) -> dict[str, str]:
    values = values_of(spec)
    return {name: fill(text, values) for name, text in spec.target.environment.variables.items()}


def recorded_variables(spec: JobSpec, run: RunPlan) -> dict[str, str]:
    """Return the variables of *run* that are recorded: the test's own, and the environment's into which values were filled.

    They are as the node started the run. A secret has an empty value.
    """
    typed = spec.target.environment.variables
    names = {*spec.env, *(name for name, text in typed.items() if run.variables.get(name, text) != text)}
    return {name: "" if may_be_secret(name) else run.variables.get(name, "") for name in sorted(names)}


def builds_of(spec: JobSpec) -> tuple[BuildPlan, ...]:
    """Return the builds of *spec* with values in place of words in braces, and with the environment's variables.

    A build has none of the test's own variables: tests that differ in these share it.
    """
    values = values_of(spec)
    found = []
    for build in spec.builds:
        argv = tuple(with_values(word, values) for word in build.argv)
        own = {name: with_values(text, values) for name, text in build.variables.items()}
        key = build.key
        if (argv, own) != (build.argv, build.variables):
            text = json.dumps([key, argv, own], sort_keys=True)
            key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[: len(key)]
        found.append(replace(build, argv=argv, variables={**_of_environment(spec), **own}, key=key))
    return tuple(found)


def may_be_warm(spec: JobSpec) -> bool:
    """Return whether ranks of *spec* may be forked by a process that has imported torch (``node/batch/warm.py``).

    Runs of the reference preset take so long that an import is nothing. A rank that is bound to cores chooses them before it
    imports torch, one that compiles imports torch's compiler, and one of MPI starts with MPI's own variables.
    """
    partition = spec.target.partition
    short = spec.preset != "reference" or spec.data == NO_DATA
    ours = spec.workload != "command" and not spec.about_nodes
    here = spec.nodes == 1 and spec.launcher in {"plain", "torchrun"}
    plain = not any(spec.parameters.get(name) for name in ("binding", "compile"))
    mpi = spec.parameters.get("backend") == "mpi"
    able = partition.warm and partition.accelerator in WARM
    return able and short and ours and here and plain and not mpi


def _device_ids(spec: JobSpec) -> tuple[str, ...]:
    """Return the accelerators of one node that a `local` run owns; a scheduler chooses its own."""
    partition = spec.target.partition
    if partition.scheduler != "local" or partition.accelerator == "cpu":
        return ()
    return tuple(str(index) for index in range(spec.ranks // spec.nodes))


def _data_source(spec: JobSpec) -> tuple[str, str | None, str]:
    """Return source (memory, device, files), path, and kind (real, synthetic); three times none where no data is read."""
    if spec.data == NO_DATA:
        return NO_DATA, None, NO_DATA
    if spec.data in {"memory", "device"}:
        return spec.data, None, "synthetic"
    if spec.data == "files":
        return "files", None, "synthetic"
    if dataset := spec.target.datasets.get(spec.data):
        return "files", dataset.path, dataset.kind
    return "files", spec.data, path_kind(spec.data)


#: What a line has of a vetting besides its summary.
_DETAILS = frozenset({"verdict", "report", "probed"})

#: Accelerators that are reached by the network: a node has none to look at.
_REMOTE = frozenset({"ipu", "wse"})


def vetting_settings(spec: JobSpec, learned: Sequence[Learned] = ()) -> VetSettings | None:
    """Return how the nodes of *spec* are vetted; None: not at all.

    Raises:
        ConfigError: the partition's policy file is missing or wrong.
    """
    partition = spec.target.partition
    vet, level = partition.vet, spec.vet_level
    # On `local` a program runs without a batch that could vet; nothing that it says is a figure of the machine's.
    by_nobody = spec.agentless or (partition.scheduler == "local" and spec.workload == "command")
    if level == "off" or by_nobody:
        return None
    # Before a measurement, what has nothing to be compared with is unknown; a test of nodes says whether it is.
    asked = spec.parameters if spec.workload == VETTED else {"require_comparison": True}
    return VetSettings(
        level=level,
        need=int(asked.get("need") or spec.nodes),
        budget_s=vet.budget_s or BUDGET_S[level],
        unknown=str(asked.get("unknown") or vet.unknown),
        require_comparison=bool(asked["require_comparison"]),
        wanted=expected_node(partition, spec.ranks // max(1, spec.nodes)),
        bounds=policy_bounds(vet.policy),
        learned=tuple(learned),
        python=spec.target.environment.python,
    )


def expected_node(partition: Partition, ranks: int = 0) -> ExpectedNode:
    """Return what each node of *partition* should have, for *ranks* of a run.

    A pod sees its share of a node, a Slurm job perhaps fewer cores than there are: what is had there is not less than the node's,
    so sizes are only wanted where jobs have whole nodes.
    """
    node, shared = partition.nodes, partition.scheduler == "kubernetes"
    here = partition.accelerator not in {"cpu", *_REMOTE}
    return ExpectedNode(
        accelerator=partition.accelerator,
        devices=(ranks if shared else node.devices) if here else None,
        device_model=node.device_model if here else "",
        cores=None if shared else node.cores,
        memory=None if shared else node.memory,
        expect=dict(partition.vet.expect),
        ranks=ranks,
    )


def policy_bounds(policy: str) -> tuple[Bound, ...]:
    """Return the bounds of a site's own file; none where there is no such file.

    Raises:
        ConfigError: it is missing or wrong.
    """
    if not policy:
        return ()
    from pytest_mlhpc.config.policy import read_policy

    return tuple(read_policy(Path(policy)))


def vetted_record(
    attempt: Attempt, lost: Sequence[Attempt] = (), away: Mapping[str, str] | None = None
) -> RecordedVetting | None:
    """Return what a record says of the vetting of its nodes; None: they were not vetted, or the line is of another form.

    Nodes for which *lost* attempts were given up are among the unfit ones; *away* are those that it never was to have.
    """
    body = attempt.vetted
    if body is None:
        return None
    try:
        found = from_json(
            RecordedVetting, {name: value for name, value in body.items() if name not in _DETAILS}
        )
    except SchemaError:
        return None
    earlier = [vetted_record(one) for one in lost if one is not attempt]
    unfit = {host: why for one in earlier if one is not None for host, why in one.unfit.items()}
    return replace(found, unfit={**unfit, **found.unfit}, kept_out=dict(away or {}))


def node_verdict(attempt: Attempt) -> VetVerdict | None:
    """Return the whole verdict on the nodes of *attempt*; None where another run has it, or is of another form."""
    data = (attempt.vetted or {}).get("verdict")
    try:
        return verdict_from_json(data).verdict if data is not None else None
    except SchemaError:
        return None


def probe_verdict(attempt: Attempt) -> VetVerdict | None:
    """Return what pods' probes said of nodes that *attempt* was then provisioned without; None: nothing, or another run has it.

    A probe tells an unfit node from a set-up that is wrong on all of them, so whatever it says of one is the node's problem.
    """
    body = attempt.vetted or {}
    probed = body.get("probed")
    if not isinstance(probed, Mapping) or not probed:
        return None
    mark = f"[{Origin.NODE.value}] "
    nodes = tuple(
        NodeVerdict(str(host), Fitness.UNFIT, str(said) if str(said).startswith(mark) else f"{mark}{said}")
        for host, said in probed.items()
    )
    hosts = tuple(node.host for node in nodes)
    return VetVerdict(Exit.TOO_FEW, 1, nodes, (), hosts, level=str(body.get("level", "quick")))


def node_report(attempt: Attempt) -> Report | None:
    """Return all that was measured of the nodes of *attempt*; None as above."""
    data = (attempt.vetted or {}).get("report")
    try:
        return from_json(Report, data, "report") if data is not None else None
    except SchemaError:
        return None
