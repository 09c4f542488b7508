"""Which jobs may share an allocation: those with the same needs, one after the other, within its time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from pytest_mlhpc.batch.plan import VETTED
from pytest_mlhpc.jobs.spec import JobSpec

#: Seconds that an allocation has beyond its runs: interpreters start, results are written.
MARGIN_S = 60.0

#: Seconds that each run of an allocation has beyond its own limit: what is left of it is ended, the next step starts.
BETWEEN_S = 15.0


def shares(spec: JobSpec, *, pack: bool) -> bool:
    """Whether *spec* may share its allocation at all: a vetting does without being asked, as all tests of it look at the same."""
    return pack or spec.workload == VETTED


def same_needs(one: JobSpec, other: JobSpec) -> bool:
    """Whether both want the same nodes in the same way, so that one job script serves both."""
    return _needs(one) == _needs(other)


def time_of(specs: Sequence[JobSpec]) -> float:
    """Return the time limit of an allocation for the runs of *specs*, in seconds."""
    return sum(spec.time_limit_s for spec in specs) + MARGIN_S + BETWEEN_S * (len(specs) - 1)


def fits(packed: Sequence[JobSpec], more: JobSpec, longest_s: float | None) -> bool:
    """Whether *more* may run after *packed* in one allocation of at most *longest_s* seconds; None: any."""
    if packed[0].held or more.held or not same_needs(packed[0], more):
        return False
    # All of one allocation say the same where tests say a time; one beyond *longest_s* is had alone.
    limits = [limit for limit in (longest_s, more.scheduler_options.get("max_time")) if limit is not None]
    return time_of([*packed, more]) <= min(limits, default=math.inf)


def _needs(spec: JobSpec) -> tuple[object, ...]:
    target = spec.target
    options = json.dumps(spec.scheduler_options, sort_keys=True, default=str)
    vetting = json.dumps(spec.parameters, sort_keys=True) if spec.workload == VETTED else spec.vet_level
    place = (vetting, target.partition.id, target.environment.name, spec.node, options)
    return (*place, spec.nodes, spec.ranks, spec.exclusive)
