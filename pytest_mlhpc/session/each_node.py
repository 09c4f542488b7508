"""``--mlhpc-each-node``: which nodes of a Slurm partition are measured, and how each compares with the median of its peers."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.errors import StoreError, UsageError, did_you_mean
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import MARGIN_S
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, drop
from pytest_mlhpc.node.files import make_private
from pytest_mlhpc.session.check_measurement import check_job
from pytest_mlhpc.store.locations import make_directories
from pytest_mlhpc.store.text import figure, one_line, quantity, table

if TYPE_CHECKING:
    from pytest_mlhpc.provision.scheduler.client import (
        PartitionLimits,
        Reservation,
        SchedulerNode,
        SlurmClient,
    )


#: Values of --mlhpc-each-node= that are no names.
IDLE, ALL = "idle", "all"


@dataclass(frozen=True)
class NotMeasured:
    """A node that the sweep leaves out. ``reason`` is Slurm's own where it gives one."""

    partition: str  #: system:partition
    node: str
    reason: str


@dataclass(frozen=True)
class Sweep:
    """What --mlhpc-each-node became. ``nodes`` are partition id -> nodes that are measured."""

    which: str
    nodes: dict[str, tuple[str, ...]]
    left_out: tuple[NotMeasured, ...]
    reservation: str = ""  #: that *which* names


@dataclass(frozen=True)
class NodeChoice:
    """Nodes of one partition: those to measure, those left out with the reason, and the reservation that holds them."""

    nodes: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    reservation: str = ""


class NothingToMeasureError(UsageError):
    """Not one node can be measured now: the machine's matter, not the user's."""


def expand(
    targets: Sequence[Target], which: str, client_of: Callable[[Partition], SlurmClient]
) -> tuple[tuple[Target, ...], Sweep]:
    """Return a target for each node that *which* means, and what to say of the others.

    Raises:
        UsageError: *which* means nothing here, or a target is not Slurm's. NothingToMeasureError: no node is fit now.
        SchedulerError: Slurm does not answer.
    """
    found: list[Target] = []
    choices: dict[str, tuple[Partition, NodeChoice]] = {}
    for target in targets:
        partition = target.partition
        if partition.id not in choices:
            choices[partition.id] = _choose_in(partition, which, client_of)
        chosen, choice = choices[partition.id]
        found += [replace(target, partition=chosen, node=node) for node in choice.nodes]
    left_out = tuple(
        NotMeasured(name, node, reason)
        for name, (_, choice) in choices.items()
        for node, reason in choice.left_out
    )
    if not found:
        reasons = "; ".join(f"{one.node}: {one.reason}" for one in left_out[:10])
        raise NothingToMeasureError(
            f"--mlhpc-each-node={which}: no node can be measured now: {reasons or 'there is none'}"
        )
    reservation = next((choice.reservation for _, choice in choices.values()), "")
    nodes = {name: choice.nodes for name, (_, choice) in choices.items()}
    return tuple(found), Sweep(which, nodes, left_out, reservation)


def _choose_in(
    partition: Partition, which: str, client_of: Callable[[Partition], SlurmClient]
) -> tuple[Partition, NodeChoice]:
    if partition.scheduler != "slurm":
        raise UsageError(
            f"--mlhpc-each-node: {partition.id} has scheduler {partition.scheduler}; only Slurm's nodes can be chosen one by one"
        )
    from pytest_mlhpc.provision.slurm.options import settings_of

    settings = settings_of(partition)
    if not settings.partition:
        raise UsageError(
            f"--mlhpc-each-node: {partition.id} does not say which partition of Slurm it is (slurm: partition)"
        )
    if settings.nodelist:
        raise UsageError(
            f"--mlhpc-each-node chooses the nodes itself, but slurm.nodelist is {settings.nodelist!r}; "
            f"write --mlhpc-each-node={settings.nodelist} instead"
        )
    client = client_of(partition)
    reservations = client.reservations()
    choice = choose(
        which,
        client.partition(settings.partition),
        client.nodes(),
        reservations,
        expand=client.expand,
        own=settings.reservation,
        excluded=client.expand(settings.exclude) if settings.exclude else (),
        now_ns=time.time_ns(),
        longest_s=partition.time_limit_s + MARGIN_S,
    )
    if choice.reservation and settings.reservation and choice.reservation != settings.reservation:
        raise UsageError(
            f"--mlhpc-each-node={which} is a reservation, but slurm.reservation is {settings.reservation!r}; leave one out"
        )
    if choice.reservation:
        options = {**partition.scheduler_options, "reservation": choice.reservation}
        partition = replace(partition, scheduler_options=options)
    return partition, choice


def choose(
    which: str,
    limits: PartitionLimits,
    nodes: Sequence[SchedulerNode],
    reservations: Sequence[Reservation],
    *,
    expand: Callable[[str], Sequence[str]],
    now_ns: int,
    longest_s: float,
    own: str = "",
    excluded: Sequence[str] = (),
) -> NodeChoice:
    """Return which of *nodes* are measured. Pure but for *expand*.

    *which* is idle (free now), all (that are in service), the name of a reservation, or a host list; *limits* are those of
    Slurm's partition; *own* is the reservation that the jobs will use. A node that somebody else's reservation takes within
    *longest_s* seconds is left out.

    Raises:
        UsageError: *which* is none of these.
    """
    by_name = {node.name: node for node in nodes}
    holding = next((one for one in reservations if one.name == which), None)
    if which in {IDLE, ALL}:
        wanted: Sequence[str] = limits.nodes
    elif holding is not None:
        wanted, own = holding.nodes, which
    else:
        wanted = _named(which, by_name, reservations, expand)
    chosen: list[str] = []
    left: list[tuple[str, str]] = []
    mine = {name for one in reservations if one.name in own.split(",") for name in one.nodes}
    others = [one for one in reservations if one.name not in own.split(",")]
    for name in dict.fromkeys(wanted):
        reason = ""
        if name not in limits.nodes:
            reason = f"not in Slurm's partition {limits.name}"
        elif own and name not in mine:
            reason = f"not in reservation {own}"
        elif name in excluded:
            reason = "left out by slurm: exclude"
        elif name not in by_name:
            reason = "Slurm does not know it"
        else:
            reason = _unfit(by_name[name], mine=name in mine, idle=which == IDLE) or _taken(
                name, others, now_ns, now_ns + int(longest_s * 1e9)
            )
        if reason:
            left.append((name, reason))
        else:
            chosen.append(name)
    return NodeChoice(tuple(chosen), tuple(left), which if holding is not None else "")


def _named(
    which: str,
    by_name: Iterable[str],
    reservations: Sequence[Reservation],
    expand: Callable[[str], Sequence[str]],
) -> Sequence[str]:
    from pytest_mlhpc.provision.scheduler.client import SchedulerError

    known = list(by_name)
    there = [IDLE, ALL, *(one.name for one in reservations)]
    try:
        names = expand(which)
    except SchedulerError as error:
        raise UsageError(f"--mlhpc-each-node={which}: {error}") from error
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        word = unknown[0] if unknown else which
        meant = did_you_mean(word, [*there, *known])
        raise UsageError(
            f"--mlhpc-each-node={which}: {word!r} is neither idle, all, a reservation nor a node of Slurm{meant}; "
            f"reservations: {', '.join(there[2:]) or 'none'}. Write tests behind it with --mlhpc-each-node=idle"
        )
    return names


def _unfit(node: SchedulerNode, *, mine: bool, idle: bool) -> str:
    """Return why a job cannot start on *node*, by Slurm's own reason; *mine*: our reservation has it."""
    usable = replace(node, flags=node.flags - {"maintenance", "reserved"}) if mine else node
    base = "idle" if mine and node.state in {"maint", "reserved", "resv"} else node.state
    usable = replace(usable, state=base)
    reasons = "+".join([node.state, *sorted(node.flags)]) + (f": {node.reason}" if node.reason else "")
    if not usable.usable:
        return reasons
    if idle and (base != "idle" or usable.flags & {"completing"}):
        return f"busy: {reasons}"
    return ""


def _taken(name: str, reservations: Sequence[Reservation], now_ns: int, until_ns: int) -> str:
    """Return which reservation of somebody else's keeps a job from *name* that starts now and ends at *until_ns*."""
    from pytest_mlhpc.store.text import minutes

    for one in reservations:
        if name in one.nodes and one.start_ns < until_ns and one.end_ns > now_ns:
            what = "maintenance" if "MAINT" in one.flags else "reserved"
            return f"{what} from {minutes(one.start_ns)} until {minutes(one.end_ns)} (reservation {one.name})"
    return ""


def client_of(partition: Partition) -> SlurmClient:
    """Return the client by which *partition*'s Slurm is asked."""
    from pytest_mlhpc.provision.slurm import client_of as client_and_note

    return client_and_note(partition, os.environ)[0]


def refuse(settings: Any) -> None:
    """Refuse what makes no sense together with --mlhpc-each-node.

    Raises:
        UsageError: it is asked for.
    """
    if settings.each_node is None:
        return
    if settings.baseline == "update":
        raise UsageError(
            "--mlhpc-each-node and --mlhpc-baseline=update: one node's figure is no baseline for all; take it from a run without --mlhpc-each-node"
        )
    if settings.here:
        raise UsageError(
            "--mlhpc-each-node and mlhpc_here: a sweep submits a job for each node; leave one out"
        )


SCHEMA: Final = 1
#: A node is marked beyond so many robust sigmas of its peers, and never below the second figure.
SIGMAS, SMALLEST = 3.5, 0.03
#: With fewer nodes, or more than this share of them beyond the bound, the median may itself be that of unfit nodes.
FEWEST, SHARE = 4, 1 / 3
#: Most rows of a table on the terminal; marked nodes are always shown.
MOST_ROWS = 40
#: Most metrics of a test that are shown where it names none.
MOST_METRICS = 3


@dataclass(frozen=True)
class NodeFigure:
    """``deviation`` is relative to the peers' median, None where that is zero; ``mark`` is worse, better or empty."""

    node: str
    value: float
    deviation: float | None
    mark: str = ""


@dataclass(frozen=True)
class NodeComparison:
    """One metric of one test over all nodes, worst first. ``limit`` is relative; ``note`` says why nothing is marked."""

    metric: str
    unit: str
    better: str
    median: float
    sigma: float
    limit: float
    nodes: tuple[NodeFigure, ...]
    note: str = ""


@dataclass(frozen=True)
class TestTable:
    """All metrics of one test on one partition."""

    __test__ = False  # for pytest, whose tests' names begin like this

    partition: str
    environment: str
    name: str
    benchmark: str
    metrics: tuple[NodeComparison, ...]


def compare(metric: str, unit: str, better: str, values: Mapping[str, float]) -> NodeComparison:
    """Return *values* (node -> value, at least one) against their median, worst first. Pure."""
    median = statistics.median(values.values())
    if not median > 0:
        figures = tuple(NodeFigure(node, value, None) for node, value in values.items())
        return NodeComparison(
            metric, unit, better, median, 0.0, SMALLEST, figures, "the median is not positive"
        )
    mad = statistics.median(abs(value - median) for value in values.values())
    sigma = MAD_TO_SIGMA * mad / median
    limit = max(SIGMAS * sigma, SMALLEST)
    beyond = [node for node, value in values.items() if abs(value - median) / median > limit]
    note = ""
    if len(values) < FEWEST:
        note = f"fewer than {FEWEST} nodes: none is marked"
    elif len(beyond) > len(values) * SHARE:
        note = f"{len(beyond)} of {len(values)} nodes are far from the median: who is right is not known"
    figures = tuple(
        NodeFigure(
            node,
            value,
            value / median - 1,
            "" if node not in beyond or len(values) < FEWEST else _mark(value, median, better),
        )
        for node, value in sorted(values.items(), key=lambda pair: -_badness(pair[1], median, better))
    )
    return NodeComparison(metric, unit, better, median, sigma, limit, figures, note)


def _badness(value: float, median: float, better: str) -> float:
    return abs(value - median) / median if better == "none" else drop(value, median, better)


def _mark(value: float, median: float, better: str) -> str:
    if better == "none":
        return "differs"
    return "worse" if drop(value, median, better) > 0 else "better"


def tables_of(jobs: Iterable[Job]) -> tuple[TestTable, ...]:
    """Return a table for each test that was measured on any node."""
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        target = job.spec.target
        groups.setdefault((target.partition.id, target.environment.name, job.spec.benchmark), []).append(job)
    return tuple(
        TestTable(partition, environment, group[0].spec.name, benchmark, _comparisons(group))
        for (partition, environment, benchmark), group in groups.items()
        if any(_figures(job) for job in group)
    )


def _comparisons(group: Sequence[Job]) -> tuple[NodeComparison, ...]:
    spec = group[0].spec
    by_node = {job.spec.node: _figures(job) for job in group}
    described = {name: one for figures in by_node.values() for name, one in figures.items()}
    names = list(spec.judged or spec.expected_metrics) or list(described)[:MOST_METRICS]
    found = []
    for name in names:
        if name in described:
            _, unit, better = described[name]
            values = {node: figures[name][0] for node, figures in by_node.items() if name in figures}
            found.append(compare(name, unit, better, values))
    return tuple(found)


def _figures(job: Job) -> dict[str, tuple[float, str, str]]:
    """Return metric -> value (median of the attempts), unit, better, of attempts without a fault."""
    values: dict[str, list[float]] = {}
    described: dict[str, tuple[str, str]] = {}
    for measurement in check_job(job).measurements:
        for metric in measurement.metrics:
            values.setdefault(metric.name, []).append(metric.value)
            described[metric.name] = (metric.unit, metric.better)
    return {name: (statistics.median(all_), *described[name]) for name, all_ in values.items()}


def not_measured(sweep: Sweep, jobs: Iterable[Job]) -> tuple[NotMeasured, ...]:
    """Return nodes that were left out, then those whose runs gave no figure, with the reason."""
    failed = []
    for job in jobs:
        failure = job.outcome.failure if job.outcome else None
        sound = job.outcome is not None and failure is None  # nodes were reserved, for the test to use
        if not _figures(job) and not sound:
            reasons = one_line(f"{failure.outcome}: {failure.text}") if failure else "no result"
            failed.append(
                NotMeasured(job.spec.target.partition.id, job.spec.node, f"{job.spec.name}: {reasons}")
            )
    return (*sweep.left_out, *failed)


def lines_of(tables: Sequence[TestTable], missing: Sequence[NotMeasured]) -> list[str]:
    """Return what the terminal shows."""
    lines: list[str] = []
    for one in tables:
        lines.append(f"{one.name} on {one.partition}, each node against the median of all:")
        lines += [f"  {line}" for line in _rows(one)]
        for metric in one.metrics:
            bound = f"median {quantity(metric.median, metric.unit)}, bound {metric.limit:.1%}"
            lines.append(f"  {metric.metric}: {bound}" + (f"; {metric.note}" if metric.note else ""))
    if missing:
        lines.append("nodes not measured:")
        lines += [f"  {one.node} ({one.partition}): {one.reason}" for one in missing]
    return lines


def _rows(one: TestTable) -> list[str]:
    by_node: dict[str, dict[str, NodeFigure]] = {}
    for metric in one.metrics:
        for found in metric.nodes:
            by_node.setdefault(found.node, {})[metric.metric] = found

    def worst(item: tuple[str, dict[str, NodeFigure]]) -> float:
        found = [(item[1].get(m.metric), m) for m in one.metrics if m.median > 0]
        return max((_badness(f.value, m.median, m.better) for f, m in found if f is not None), default=0.0)

    ordered = sorted(by_node.items(), key=worst, reverse=True)
    marked = [item for item in ordered if any(found.mark for found in item[1].values())]
    shown = [item for item in ordered if item in marked or item in ordered[:MOST_ROWS]]
    head = ["node"]
    for metric in one.metrics:
        head += [f"{metric.metric} [{metric.unit}]", "vs peers"]
    rows = [[*head, ""]]
    for node, figures in shown:
        row = [node]
        for metric in one.metrics:
            row += _cells(figures.get(metric.metric))
        rows.append([*row, ", ".join(f"{n}: {f.mark}" for n, f in figures.items() if f.mark)])
    lines = table(rows).splitlines()
    if len(shown) < len(ordered):
        lines.append(f"... and {len(ordered) - len(shown)} more nodes within the bound")
    return lines


def _cells(found: NodeFigure | None) -> list[str]:
    if found is None:
        return ["-", "-"]
    return [
        figure(found.value),
        "-" if found.deviation is None else f"{round(found.deviation, 3) + 0.0:+.1%}",
    ]


def write(
    folder: Path,
    sweep: Sweep,
    tables: Sequence[TestTable],
    *,
    state_dir: Path,
    missing: Sequence[NotMeasured],
    overrides: Mapping[str, str],
) -> Path:
    """Write ``sweep.json`` below *folder* and return its path; an earlier one is replaced whole.

    Raises:
        StoreError: it cannot be written.
    """
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "created_ns": time.time_ns(),
        "which": sweep.which,
        "overrides": dict(overrides),
        "nodes": sweep.nodes,
        "tests": [asdict(one) for one in tables],
        "not_measured": [asdict(one) for one in missing],
    }
    path, new = folder / "sweep.json", folder / "sweep.json.new"
    try:
        make_directories(folder.parent, state_dir)
        make_private(folder)
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror}") from error
    return path
