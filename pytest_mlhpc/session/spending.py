"""What a session may cost, and what of it was used: budgets of the command line and of systems.yaml together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.budget import (
    Budget,
    BudgetLimit,
    budget_refusal,
    cost_text,
    is_charged,
    max_hours,
    parse_limit,
    upper_bound,
    used_hours,
)
from pytest_mlhpc.jobs.job import Job
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
            specs, settings.reruns
        )  #: account -> node-hours, worst-case re-runs included
        if text := cost_text(specs, settings.reruns):
            self.announcement.append(text)
        self._session = _budget(specs, parse_limit(settings.budget) if settings.budget else None)
        self._partitions: dict[str, Budget] = {}
        self._reruns: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)  # node id -> keys of budgets
        for spec in specs:
            partition = spec.target.partition
            if partition.id not in self._partitions:
                source = f"systems.yaml: {partition.id}: budget"
                limit = parse_limit(partition.budget, source) if partition.budget else None
                mine = [one for one in specs if one.target.partition.id == partition.id]
                self._partitions[partition.id] = _budget(mine, limit)

    def refused(self, spec: JobSpec, numbers: Iterable[int]) -> str:
        """Promise its node-hours to the re-runs *numbers* of *spec*, or return why that is beyond a budget."""
        if not is_charged(spec):
            return ""
        keys = [(spec.node_id, number) for number in numbers]
        asked: list[Budget] = []
        for budget in self._budgets(spec):
            if not budget.allows(keys, _hours(spec, budget)):
                for earlier in asked:
                    earlier.give_back(keys)
                return budget.refused_text(_hours(spec, budget) * len(keys))
            asked.append(budget)
        self._reruns[spec.node_id].update(keys)
        return ""

    def settle(self, spec: JobSpec, key: int | str, node_hours: float) -> None:
        """Book once what an attempt of *spec* has used; *key* is its number, or its run id if another was made instead."""
        if is_charged(spec):
            for budget in self._budgets(spec):
                per_node = _hours(spec, budget) / max_hours(spec)
                budget.settle((spec.node_id, key), node_hours * per_node)

    def ended(self, job: Job) -> None:
        """Book once what *job* has used, judged or not, and give back the rest of what was promised to it. From any thread."""
        keys: list[int | str] = [attempt.run.run_id for attempt in job.lost]  # made again under their numbers
        keys += [attempt.number for attempt in job.attempts]
        for key, attempt in zip(keys, (*job.lost, *job.attempts), strict=True):
            self.settle(job.spec, key, used_hours(job.spec, attempt.run_s))
        self.over(job.spec)

    def over(self, spec: JobSpec) -> None:
        """Give back what is still promised to attempts of *spec*: none of them will be made any more. Idempotent."""
        for budget in self._budgets(spec):
            budget.give_back([(spec.node_id, 0), *self._reruns[spec.node_id]])

    def _budgets(self, spec: JobSpec) -> tuple[Budget, Budget]:
        return self._session, self._partitions[spec.target.partition.id]


def _budget(specs: Sequence[JobSpec], limit: BudgetLimit | None) -> Budget:
    if text := budget_refusal(specs, limit):
        raise UsageError(text)
    budget = Budget(limit)
    for spec in filter(is_charged, specs):
        budget.promise((spec.node_id, 0), _hours(spec, budget))
    return budget


def _hours(spec: JobSpec, budget: Budget) -> float:
    return max_hours(spec, budget.limit.unit if budget.limit else "node")
