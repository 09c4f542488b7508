"""What a session may cost, and what of it was used: budgets of the command line and of systems.yaml together."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.budget import Budget, Limit, parse, refusal
from pytest_mlhpc.jobs.node_hours import bound_text, charged, most_of, total_bound, upper_bound
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.options import Settings


class Spending:
    """Asked before each re-run, told after each attempt. ``announcement`` is printed before anything is submitted.

    Args:
        specs: all jobs of the session.

    Raises:
        UsageError: the first attempts alone are beyond a budget.
    """

    def __init__(self, specs: Sequence[JobSpec], settings: Settings) -> None:
        self.announcement: list[str] = []
        self.bounds = upper_bound(
            specs, settings.max_reruns
        )  #: account -> node-hours, worst-case re-runs included
        if text := bound_text(specs, settings.max_reruns):
            self.announcement.append(text)
        self._session = _budget(specs, parse(settings.budget) if settings.budget else None)
        self._partitions: dict[str, Budget] = {}
        for spec in specs:
            partition = spec.target.partition
            if partition.id not in self._partitions:
                source = f"systems.yaml: {partition.id}: budget"
                limit = parse(partition.budget, source) if partition.budget else None
                mine = [one for one in specs if one.target.partition.id == partition.id]
                self._partitions[partition.id] = _budget(mine, limit)

    def refused(self, spec: JobSpec, attempts: int) -> str:
        """Promise *attempts* re-runs of *spec*, or return why that is beyond a budget."""
        if not charged(spec):
            return ""
        budgets = (self._session, self._partitions[spec.target.partition.id])
        promised: list[tuple[Budget, float]] = []
        for budget in budgets:
            hours = _hours(spec, budget) * attempts
            if not budget.allows(hours):
                for earlier, given in promised:
                    earlier.settle(given, 0.0)
                return budget.refused_text(hours)
            promised.append((budget, hours))
        return ""

    def settle(self, spec: JobSpec, node_hours: float) -> None:
        """Book what one attempt of *spec* has used."""
        if charged(spec):
            for budget in (self._session, self._partitions[spec.target.partition.id]):
                per_node = _hours(spec, budget) / most_of(spec)
                budget.settle(_hours(spec, budget), node_hours * per_node)


def _budget(specs: Sequence[JobSpec], limit: Limit | None) -> Budget:
    if text := refusal(specs, limit):
        raise UsageError(text)
    return Budget(limit, total_bound(specs, 0, limit.unit if limit else "node"))


def _hours(spec: JobSpec, budget: Budget) -> float:
    return most_of(spec, budget.limit.unit if budget.limit else "node")
