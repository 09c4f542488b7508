"""``--mlhpc-each-node``: which nodes of a Slurm partition are measured, and why the others are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.config.model import Partition, Target
from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.jobs.spec import MARGIN_S

if TYPE_CHECKING:
    from pytest_mlhpc.provision.slurm.client import PartitionLimits, Reservation, SlurmClient, SlurmNode

#: Words after --mlhpc-each-node= that are no names.
IDLE, ALL = "idle", "all"


@dataclass(frozen=True)
class NotMeasured:
    """A node that the sweep leaves out. ``reason`` holds Slurm's own words where it has any."""

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
class Choice:
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
        SlurmError: Slurm does not answer.
    """
    found: list[Target] = []
    choices: dict[str, tuple[Partition, Choice]] = {}
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
        words = "; ".join(f"{one.node}: {one.reason}" for one in left_out[:10])
        raise NothingToMeasureError(
            f"--mlhpc-each-node={which}: no node can be measured now: {words or 'there is none'}"
        )
    reservation = next((choice.reservation for _, choice in choices.values()), "")
    nodes = {name: choice.nodes for name, (_, choice) in choices.items()}
    return tuple(found), Sweep(which, nodes, left_out, reservation)


def _choose_in(
    partition: Partition, which: str, client_of: Callable[[Partition], SlurmClient]
) -> tuple[Partition, Choice]:
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
    nodes: Sequence[SlurmNode],
    reservations: Sequence[Reservation],
    *,
    expand: Callable[[str], Sequence[str]],
    now_ns: int,
    longest_s: float,
    own: str = "",
    excluded: Sequence[str] = (),
) -> Choice:
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
    return Choice(tuple(chosen), tuple(left), which if holding is not None else "")


def _named(
    which: str,
    by_name: Iterable[str],
    reservations: Sequence[Reservation],
    expand: Callable[[str], Sequence[str]],
) -> Sequence[str]:
    from pytest_mlhpc.provision.slurm.client import SlurmError

    known = list(by_name)
    there = [IDLE, ALL, *(one.name for one in reservations)]
    try:
        names = expand(which)
    except SlurmError as error:
        raise UsageError(f"--mlhpc-each-node={which}: {error}") from error
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        word = unknown[0] if unknown else which
        hint = nearest(word, [*there, *known])
        meant = f" (did you mean {hint!r}?)" if hint else ""
        raise UsageError(
            f"--mlhpc-each-node={which}: {word!r} is neither idle, all, a reservation nor a node of Slurm{meant}; "
            f"reservations: {', '.join(there[2:]) or 'none'}. Write tests behind it with --mlhpc-each-node=idle"
        )
    return names


def _unfit(node: SlurmNode, *, mine: bool, idle: bool) -> str:
    """Return why a job cannot start on *node*, in Slurm's words; *mine*: our reservation holds it."""
    seen = replace(node, flags=node.flags - {"maintenance", "reserved"}) if mine else node
    base = "idle" if mine and node.state in {"maint", "reserved", "resv"} else node.state
    seen = replace(seen, state=base)
    words = "+".join([node.state, *sorted(node.flags)]) + (f": {node.reason}" if node.reason else "")
    if not seen.usable:
        return words
    if idle and (base != "idle" or seen.flags & {"completing"}):
        return f"busy: {words}"
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
    from pytest_mlhpc.provision.slurm.options import settings_of
    from pytest_mlhpc.provision.slurm.pyslurm import choose_client

    return choose_client(settings_of(partition).client, os.environ)[0]


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
