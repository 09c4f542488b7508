"""What a session may cost at most, known before anything is submitted. Pure functions.

Slurm charges the nodes of a job for as long as it holds them, and ends it at its time limit. So no attempt costs more than
its nodes for an allocation of its own that runs into its limit; sharing an allocation only makes that less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from pytest_mlhpc.jobs.packing import time_of
from pytest_mlhpc.jobs.spec import JobSpec

#: Most re-runs of one judged job (judge/quorum.py: RERUNS; a test compares the two).
RERUNS_PER_JOB = 4
#: Slurm's time limits are whole minutes, rounded up (sbatch(1), --time).
_MINUTE_S = 60.0
#: How long a job may hold its nodes beyond its limit: KillWait of slurm.conf(5), 30 s by default, until all is killed.
KILL_WAIT_S = 30.0

#: How many of what budgets count (node, device, core) one node has.
_COUNTED: Mapping[str, Callable[[JobSpec], int]] = {
    "node": lambda _spec: 1,
    "device": lambda spec: max(1, spec.target.partition.nodes.devices),
    "core": lambda spec: spec.target.partition.nodes.cores,
}


def charged(spec: JobSpec) -> bool:
    """Whether somebody pays for *spec*: nobody does for runs on this machine itself."""
    return spec.target.partition.scheduler != "local"


def account_of(spec: JobSpec) -> str:
    """Return ``system:account``, or the partition where it names no account (the user's default one is charged)."""
    partition = spec.target.partition
    account = partition.scheduler_options.get("account")
    return f"{partition.system}:{account}" if account else f"{partition.id} (default account)"


def partition_of(spec: JobSpec) -> str:
    """Return ``system:partition``."""
    return spec.target.partition.id


def most_of(spec: JobSpec, unit: str = "node") -> float:
    """Return the most *unit*-hours (node, device, core) that one attempt of *spec* can cost."""
    if not charged(spec):
        return 0.0
    limit_s = math.ceil(time_of([spec]) / _MINUTE_S) * _MINUTE_S + KILL_WAIT_S
    return spec.nodes * _COUNTED[unit](spec) * limit_s / 3600


def used(spec: JobSpec, run_s: float) -> float:
    """Return the node-hours that an attempt of *spec* has used which ran for *run_s* seconds."""
    return spec.nodes * run_s / 3600


def upper_bound(
    specs: Sequence[JobSpec],
    max_reruns: int,
    group: Callable[[JobSpec], str] = account_of,
    unit: str = "node",
) -> dict[str, float]:
    """Return group -> the most *unit*-hours that attempt 0 of all *specs* and the dearest re-runs can cost.

    Only judged jobs are re-run, each at most ``RERUNS_PER_JOB`` times and all together *max_reruns* times. As any group
    may need them all, each is counted with its own dearest: the groups' sum can be more than the session's bound, which
    is that of a single group.
    """
    first: dict[str, float] = defaultdict(float)
    again: dict[str, list[float]] = defaultdict(list)
    for spec in specs:
        if charged(spec):
            cost, name = most_of(spec, unit), group(spec)
            first[name] += cost
            again[name] += [cost] * (RERUNS_PER_JOB if spec.judged else 0)
    return {
        name: cost + sum(sorted(again[name], reverse=True)[: max(0, max_reruns)])
        for name, cost in first.items()
    }


def total_bound(specs: Sequence[JobSpec], max_reruns: int, unit: str = "node") -> float:
    """Return the most *unit*-hours that the whole session can cost."""
    return upper_bound(specs, max_reruns, lambda _spec: "", unit).get("", 0.0)


def text_of(hours: float, unit: str = "node") -> str:
    """Return ``12.5 node-hours``, with at least three figures that count."""
    return f"{hours:.3g} {unit}-hours" if hours < 1000 else f"{hours:.0f} {unit}-hours"


def bound_text(specs: Sequence[JobSpec], max_reruns: int) -> str:
    """Return the line that is printed before submission; empty where nothing is charged."""
    bounds = upper_bound(specs, max_reruns)
    if not bounds:
        return ""
    accounts = ", ".join(f"{name} {text_of(hours)}" for name, hours in sorted(bounds.items()))
    jobs = sum(map(charged, specs))
    reruns = min(max_reruns, RERUNS_PER_JOB * sum(1 for spec in specs if charged(spec) and spec.judged))
    return f"at most, with {jobs} run{'s' * (jobs != 1)} and {max(0, reruns)} re-runs at their time limits: {accounts}"
