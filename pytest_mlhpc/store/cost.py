"""Node-hours that were charged, from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, Record
from pytest_mlhpc.store.table import table
from pytest_mlhpc.store.text import minutes
from pytest_mlhpc.store.verdict import WORSE

#: These have a figure, which is worse than it should be; the other failures have none.
_MEASURED = frozenset({*WORSE, "no_baseline"})
_BROKEN = frozenset({*FAILURES, *INFRASTRUCTURE}) - _MEASURED


def _account(record: Record) -> str:
    """Return ``system:account``; records of earlier versions name none."""
    account: str = getattr(record, "account", "")
    return account or f"{record.system}:{record.partition} (default account)"


#: ``--by`` -> what records are added up by.
GROUPS: dict[str, Callable[[Record], str]] = {
    "partition": lambda record: f"{record.system}:{record.partition}",
    "system": lambda record: record.system,
    "account": _account,
    "benchmark": lambda record: record.benchmark,
    "session": lambda record: record.session,
}


@dataclass
class AttemptCost:
    """Node-hours of some attempts: ``first`` and ``reruns`` that measured something, ``failed`` that did not."""

    name: str
    attempts: int = 0
    first: float = 0.0
    reruns: float = 0.0
    failed: float = 0.0

    @property
    def node_hours(self) -> float:
        """All of it."""
        return self.first + self.reruns + self.failed

    def add(self, record: Record) -> None:
        """Take in one attempt."""
        self.attempts += 1
        if record.measurement is None or record.verdict in _BROKEN:
            self.failed += record.node_hours
        elif record.attempt:
            self.reruns += record.node_hours
        else:
            self.first += record.node_hours

    def to_json(self) -> dict[str, object]:
        """Return it as plain JSON."""
        return {
            "name": self.name,
            "node_hours": self.node_hours,
            "first_attempts": self.first,
            "reruns": self.reruns,
            "failed": self.failed,
            "attempts": self.attempts,
        }


def add_up(
    records: Iterable[Record], group: Callable[[Record], str]
) -> tuple[list[AttemptCost], AttemptCost]:
    """Return the costs of each group, dearest first, and of all."""
    costs: dict[str, AttemptCost] = {}
    total = AttemptCost("total")
    for record in records:
        name = group(record)
        costs.setdefault(name, AttemptCost(name)).add(record)
        total.add(record)
    return sorted(costs.values(), key=lambda cost: (-cost.node_hours, cost.name)), total


def text_of(costs: list[AttemptCost], total: AttemptCost, by: str, since_ns: int) -> str:
    """Return a table for people; what cost nothing, like runs on this machine, is one line."""
    charged = [cost for cost in costs if cost.node_hours]
    free = total.attempts - sum(cost.attempts for cost in charged)
    rest = f"{free} attempts that cost nothing are not shown\n" if free else ""
    if not charged:
        return f"no node-hours were charged since {minutes(since_ns)}\n{rest}"
    rows = [(by, "node-hours", "first attempts", "re-runs", "failed", "attempts")]
    for cost in [*charged, total]:
        figures = (cost.node_hours, cost.first, cost.reruns, cost.failed)
        rows.append((cost.name, *(f"{figure:.2f}" for figure in figures), str(cost.attempts)))  # type: ignore[arg-type]  # six texts
    return f"since {minutes(since_ns)}\n{table(rows)}{rest}"
