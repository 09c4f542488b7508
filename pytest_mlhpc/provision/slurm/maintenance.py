"""A maintenance that would hold the jobs up: then nothing is submitted, and the session says until when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_mlhpc.jobs.packing import time_of
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.slurm.client import PartitionLimits, Reservation, SlurmClient, SlurmError
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.system.model import Partition


def delayed(specs: Sequence[JobSpec], client_of: Callable[[Partition], SlurmClient], now_ns: int) -> str:
    """Return ``maintenance until T (reservation NAME)`` for the first partition whose jobs would wait, or an empty string.

    Costs one query a partition, two where a maintenance is announced. Where Slurm does not answer, nothing is said: the
    submission will find out.
    """
    by_partition: dict[str, list[JobSpec]] = {}
    for spec in specs:
        if spec.target.partition.scheduler == "slurm":
            by_partition.setdefault(spec.target.partition.id, []).append(spec)
    for mine in by_partition.values():
        partition = mine[0].target.partition
        settings = settings_of(partition)
        try:
            client = client_of(partition)
            near = upcoming(client.reservations(), settings.reservation, mine, now_ns)
            if not near or not settings.partition:
                continue
            blocking = in_the_way(near, client.partition(settings.partition), max(one.nodes for one in mine))
        except SlurmError:
            continue
        if blocking is not None:
            begins = "begins" if blocking.start_ns > now_ns else "began"
            return (
                f"maintenance until {minutes(blocking.end_ns)} (reservation {blocking.name}): it {begins} at "
                f"{minutes(blocking.start_ns)}, before the longest job on {partition.id} would have ended"
            )
    return ""


def upcoming(
    reservations: Sequence[Reservation], own: str, specs: Sequence[JobSpec], now_ns: int
) -> list[Reservation]:
    """Return maintenances, other than the one *own* names, that begin before the longest of *specs* would end."""
    until_ns = now_ns + int(max(time_of([spec]) for spec in specs) * 1e9)
    return [
        one
        for one in reservations
        if "MAINT" in one.flags
        and one.name not in own.split(",")
        and one.start_ns < until_ns
        and one.end_ns > now_ns
    ]


def in_the_way(near: Sequence[Reservation], limits: PartitionLimits, nodes: int) -> Reservation | None:
    """Return the maintenance that ends last of those that leave fewer than *nodes* nodes to the partition, or None."""
    taken = {name for one in near for name in one.nodes}
    if len(set(limits.nodes) - taken) >= nodes:
        return None
    touching = [one for one in near if set(one.nodes) & set(limits.nodes)]
    return max(touching, key=lambda one: one.end_ns, default=None)
