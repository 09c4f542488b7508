"""pyslurm's objects as ours: attribute names as in pyslurm 25.11, which has those of 22.5 and 24.11 too. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pytest_mlhpc.provision.slurm import entities, hostlist, text
from pytest_mlhpc.provision.slurm.client import Job, Node, PartitionLimits, Reservation, Step


def job(job: Any) -> Job:
    """Return a job of slurmctld."""
    reason = text.word(job.state_reason or "")
    return Job(
        id=str(job.id),
        name=job.name or "",
        user=job.user_name or str(job.user_id),
        state=text.state(job.state or ""),
        reason=reason,
        partition=job.partition or "",
        account=job.account or "",
        nodes=hostlist.nodes(job.allocated_nodes or ""),
        node_count=job.num_nodes or 0,
        time_limit_s=_seconds(job.time_limit) or 0.0,
        priority=job.priority or 0,
        restarts=job.requeue_count or 0,
        submit_ns=_ns(job.submit_time),
        start_ns=_ns(job.start_time),
        end_ns=_ns(job.end_time),
        exit_code=job.exit_code or 0,
        signal=job.exit_code_signal or 0,
    )


def accounted(job: Any) -> Job:
    """Return a job of slurmdbd with its steps."""
    return Job(
        id=str(job.id),
        name=job.name or "",
        user=job.user_name or str(job.user_id),
        state=text.state(job.state or ""),
        reason=text.word(job.state_reason or ""),
        partition=job.partition or "",
        account=job.account or "",
        nodes=hostlist.nodes(job.nodelist or ""),
        node_count=job.num_nodes or 0,
        time_limit_s=_seconds(job.time_limit) or 0.0,
        priority=job.priority or 0,
        restarts=job.requeue_count or 0,
        submit_ns=_ns(job.submit_time),
        start_ns=_ns(job.start_time),
        end_ns=_ns(job.end_time),
        exit_code=job.exit_code or 0,
        signal=job.exit_code_signal or 0,
        steps=tuple(_accounted_step(step) for step in job.steps.values()),
    )


def _accounted_step(step: Any) -> Step:
    return Step(
        id=str(step.id),
        name=step.name or "",
        state=text.state(step.state or ""),
        exit_code=step.exit_code or 0,
        signal=step.exit_code_signal or 0,
        nodes=hostlist.nodes(step.nodelist or ""),
        energy_j=text.energy_j(str(step.stats.consumed_energy or "")),
        start_ns=_ns(step.start_time),
        end_ns=_ns(step.end_time),
    )


def step(step: Any) -> Step:
    """Return a running step."""
    return Step(
        id=str(step.id),
        name=step.name or "",
        state=text.state(step.state or ""),
        nodes=hostlist.nodes(step.allocated_nodes or ""),
        start_ns=_ns(step.start_time),
    )


def node(node: Any) -> Node:
    """Return a node."""
    base, flags = entities.node_state(node.state or "")
    return Node(
        name=node.name,
        state=base,
        flags=flags,
        reason=node.reason or "",
        address=node.address or "",
        hostname=node.hostname or "",
        cpus=node.total_cpus or 0,
        memory=(node.real_memory or 0) * entities.MIB,
        gres=",".join(f"{name}:{count}" for name, count in (node.configured_gres or {}).items()),
        features=frozenset(node.available_features or ()),
        partitions=frozenset(node.partitions or ()),
    )


def partition(found: Any) -> PartitionLimits:
    """Return a partition's limits."""
    return PartitionLimits(
        name=found.name,
        up=found.state == "UP",
        max_time_s=_seconds(found.max_time),
        max_nodes=found.max_nodes if isinstance(found.max_nodes, int) else None,
        min_nodes=found.min_nodes or 0,
        total_nodes=found.total_nodes or 0,
        nodes=hostlist.nodes(found.nodes or ""),
        allow_accounts=_some(found.allowed_accounts),
        allow_qos=_some(found.allowed_qos),
        qos=found.qos or "",
    )


def reservation(found: Any, maintenance: bool) -> Reservation:
    """Return a reservation; of its flags MAINT alone, if *maintenance*."""
    return Reservation(
        name=found.name,
        start_ns=_ns(found.start_time),
        end_ns=_ns(found.end_time),
        nodes=hostlist.nodes(found.nodes or ""),
        partition=found.partition or "",
        users=_some(found.users),
        accounts=_some(found.accounts),
        flags=frozenset({"MAINT"}) if maintenance else frozenset(),
    )


def _seconds(minutes: Any) -> float | None:
    """Return seconds of whole minutes; None for UNLIMITED and nothing."""
    return 60.0 * minutes if isinstance(minutes, int) else None


def _ns(seconds: Any) -> int:
    return int(seconds) * text.NS if seconds else 0


def _some(words: Iterable[str] | None) -> frozenset[str]:
    """Return the words; none for all."""
    found = frozenset(words or ())
    return frozenset() if found == {"ALL"} else found
