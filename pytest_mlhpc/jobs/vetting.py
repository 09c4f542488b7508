"""How the nodes of a job are vetted: what its partition says, put into the terms of the nodes' own half."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_mlhpc.batch.plan import VETTED
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.results.record import Vetted
from pytest_mlhpc.results.schema import SchemaError, from_json
from pytest_mlhpc.system.model import Partition
from pytest_mlhpc.vet.check import Wanted
from pytest_mlhpc.vet.finding import Origin
from pytest_mlhpc.vet.policy import Bound
from pytest_mlhpc.vet.report import Report
from pytest_mlhpc.vet.settings import BUDGET_S, Learned, Settings
from pytest_mlhpc.vet.verdict import Exit, Fitness, NodeVerdict, Verdict
from pytest_mlhpc.vet.verdict_json import verdict_from_json

#: What a line has of a vetting besides its summary.
_WHOLE = frozenset({"verdict", "report", "probed"})

#: Accelerators that are reached by the network: a node has none to look at.
_REMOTE = frozenset({"ipu", "wse"})


def settings_of(spec: JobSpec, learned: Sequence[Learned] = ()) -> Settings | None:
    """Return how the nodes of *spec* are vetted; None: not at all.

    Raises:
        ConfigError: the partition's policy file is missing or wrong.
    """
    partition = spec.target.partition
    vet, level = partition.vet, spec.vet_level
    # On `local` a program runs without a batch that could vet; nothing that it says is a figure of the machine's.
    if level == "off" or (partition.scheduler == "local" and spec.workload == "command"):
        return None
    return Settings(
        level=level,
        need=int(spec.parameters.get("need") or spec.nodes) if spec.workload == VETTED else spec.nodes,
        budget_s=vet.budget_s or BUDGET_S[level],
        unknown=str(spec.parameters.get("unknown") or vet.unknown)
        if spec.workload == VETTED
        else vet.unknown,
        wanted=wanted_of(partition, spec.ranks // max(1, spec.nodes)),
        bounds=bounds_of(vet.policy),
        learned=tuple(learned),
        python=spec.target.environment.python,
    )


def wanted_of(partition: Partition, ranks: int = 0) -> Wanted:
    """Return what each node of *partition* should have, for *ranks* of a run.

    A pod sees its share of a node, a Slurm job perhaps fewer cores than there are: what is had there is not less than the node's,
    so sizes are only wanted where jobs have whole nodes.
    """
    node, shared = partition.nodes, partition.scheduler == "kubernetes"
    here = partition.accelerator not in {"cpu", *_REMOTE}
    return Wanted(
        accelerator=partition.accelerator,
        devices=(ranks if shared else node.devices) if here else None,
        device_model=node.device_model if here else "",
        cores=None if shared else node.cores,
        memory=None if shared else node.memory,
        expect=dict(partition.vet.expect),
        ranks=ranks,
    )


def bounds_of(policy: str) -> tuple[Bound, ...]:
    """Return the bounds of a site's own file; none where there is no such file.

    Raises:
        ConfigError: it is missing or wrong.
    """
    if not policy:
        return ()
    from pytest_mlhpc.vet.command.policy_file import read_policy

    return tuple(read_policy(Path(policy)))


def vetted_of(
    attempt: Attempt, lost: Sequence[Attempt] = (), away: Mapping[str, str] | None = None
) -> Vetted | None:
    """Return what a record says of the vetting of its nodes; None: they were not vetted, or the line is of another form.

    Nodes for which *lost* attempts were given up are among the unfit ones; *away* are those that it never was to have.
    """
    body = attempt.vetted
    if body is None:
        return None
    try:
        found = from_json(Vetted, {name: value for name, value in body.items() if name not in _WHOLE})
    except SchemaError:
        return None
    earlier = [vetted_of(one) for one in lost if one is not attempt]
    unfit = {host: why for one in earlier if one is not None for host, why in one.unfit.items()}
    return replace(found, unfit={**unfit, **found.unfit}, kept_out=dict(away or {}))


def verdict_of(attempt: Attempt) -> Verdict | None:
    """Return the whole verdict on the nodes of *attempt*; None where it was told to another run, or is of another form."""
    data = (attempt.vetted or {}).get("verdict")
    try:
        return verdict_from_json(data).verdict if data is not None else None
    except SchemaError:
        return None


def probed_of(attempt: Attempt) -> Verdict | None:
    """Return what pods' probes said of nodes that *attempt* was then provisioned without; None: nothing, or it was told to another.

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
    return Verdict(Exit.TOO_FEW, 1, nodes, (), hosts, level=str(body.get("level", "quick")))


def report_of(attempt: Attempt) -> Report | None:
    """Return all that was measured of the nodes of *attempt*; None as above."""
    data = (attempt.vetted or {}).get("report")
    try:
        return from_json(Report, data, "report") if data is not None else None
    except SchemaError:
        return None
