"""Budgets and node-hours: what a session may cost at most, whether a re-run still fits, and what recorded runs were charged.

A budget is compared with the first attempts at their time limits, before anything is submitted: these are sure to run.
Re-runs are not; each is granted or refused against the hours that were really used (:class:`Budget`). Slurm charges a job's
nodes while it has them, and ends it at its time limit. So no attempt costs more than an allocation of its own at its time
limit; sharing an allocation only costs less.
"""

from __future__ import annotations

import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.config.quantities import parse_budget
from pytest_mlhpc.jobs.spec import JobSpec, allocation_time_s
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, WORSE, Record
from pytest_mlhpc.store.text import count, minutes, table

_SHORT_FORM = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([ndc])h\Z")
_UNITS = {"n": "node", "d": "device", "c": "core"}
#: How many of the dearest tests a refusal names.
_MAX_NAMED = 5
#: Hours below which a difference is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class BudgetLimit:
    """So many ``unit``-hours (node, device or core). ``source`` says who set it."""

    hours: float
    unit: str = "node"
    source: str = "mlhpc_budget"

    def __str__(self) -> str:
        """Return ``20 node-hours``."""
        return f"{self.hours:g} {self.unit}-hours"


def parse_limit(value: object, source: str = "mlhpc_budget") -> BudgetLimit:
    """Return the limit in ``20nh``, ``8dh`` (devices), ``100ch`` (cores) or ``20 node-hours``.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str) and (match := _SHORT_FORM.match(value.strip())):
        return BudgetLimit(float(match[1]), _UNITS[match[2]], source)
    try:
        hours, unit = parse_budget(value)
    except ValueError as error:
        raise ValueError(f"{error}, or short: 20nh") from error
    return BudgetLimit(hours, unit, source)


def budget_refusal(specs: Sequence[JobSpec], limit: BudgetLimit | None) -> str:
    """Return why *specs* are beyond *limit*, naming the dearest, or an empty string."""
    if limit is None:
        return ""
    need = total_bound(specs, 0, limit.unit)
    if need <= limit.hours + _ROUNDING:
        return ""
    dear = sorted(filter(is_charged, specs), key=lambda spec: -max_hours(spec, limit.unit))
    named = ", ".join(f"{spec.node_id} {max_hours(spec, limit.unit):.3g}" for spec in dear[:_MAX_NAMED])
    more = f", and {len(dear) - _MAX_NAMED} more" if len(dear) > _MAX_NAMED else ""
    return (
        f"{len(dear)} tests may take {hours_text(need, limit.unit)} at their time limits, re-runs aside; the budget is {limit} "
        f"({limit.source}). The dearest: {named}{more}. Select fewer (-k), lower their time_limit, or raise the budget"
    )


class Budget:
    """What is left of a limit while a session runs; may be asked from several threads. Without a limit all is allowed.

    Hours are promised to keys: one for each attempt that is to be made. What was used may be booked without a promise, as
    attempts that an earlier session submitted, or that were lost and made again, cost as much as others.
    """

    def __init__(self, limit: BudgetLimit | None) -> None:
        self.limit = limit
        self._promised: dict[Hashable, float] = {}
        self._settled: set[Hashable] = set()
        self._used = 0.0
        self._lock = threading.Lock()

    @property
    def used(self) -> float:
        """Hours that were really used."""
        with self._lock:
            return self._used

    @property
    def left(self) -> float:
        """Hours that are neither used nor promised; infinite without a limit."""
        with self._lock:
            return self._left()

    def promise(self, key: Hashable, hours: float) -> None:
        """Promise *hours* to *key* without asking: first attempts, which are sure to be made. The last promise counts."""
        with self._lock:
            self._promised[key] = hours

    def allows(self, keys: Iterable[Hashable], hours: float) -> bool:
        """Whether re-runs of at most *hours* each still fit. If so they are promised to *keys*, until :meth:`settle`."""
        with self._lock:
            wanted = dict.fromkeys(keys, hours)
            if sum(wanted.values()) > self._left() + _ROUNDING:
                return False
            self._promised.update(wanted)
            return True

    def settle(self, key: Hashable, used: float) -> None:
        """Book what *key* has *used* and give back what was promised to it. The second time changes nothing."""
        with self._lock:
            if key not in self._settled:
                self._settled.add(key)
                self._promised.pop(key, None)
                self._used += max(0.0, used)

    def give_back(self, keys: Iterable[Hashable]) -> None:
        """Take back what was promised to *keys*: they will not be made, or not now."""
        with self._lock:
            for key in keys:
                self._promised.pop(key, None)

    def refused_text(self, hours: float) -> str:
        """Return why a re-run was not made: the text of ``inconclusive (budget)``."""
        if self.limit is None:
            return ""
        left = self.left if self.left > _ROUNDING else 0.0
        return (
            f"a re-run of at most {hours_text(hours, self.limit.unit)} does not fit: {hours_text(left, self.limit.unit)}"
            f" of {self.limit} ({self.limit.source}) are left"
        )

    def _left(self) -> float:
        return (
            float("inf")
            if self.limit is None
            else self.limit.hours - self._used - sum(self._promised.values())
        )


#: Less than that is not given exactly, in hours.
_MIN_HOURS = 0.001

#: Most re-runs of one judged job (twice RERUNS of judge/fence.py; a test compares the two).
RERUNS_PER_JOB = 8
#: Slurm's time limits are whole minutes, rounded up (sbatch(1), --time).
_MINUTE_S = 60.0
#: How long a job may hold its nodes beyond its limit: KillWait of slurm.conf(5), 30 s by default, until all is killed.
KILL_WAIT_S = 30.0

#: How many of what budgets count (node, device, core) one node has.
_PER_NODE: Mapping[str, Callable[[JobSpec], int]] = {
    "node": lambda _spec: 1,
    "device": lambda spec: max(1, spec.target.partition.nodes.devices),
    "core": lambda spec: spec.target.partition.nodes.cores,
}


def is_charged(spec: JobSpec) -> bool:
    """Whether somebody pays for *spec*: nobody does for runs on this machine itself."""
    return spec.target.partition.scheduler != "local"


def account_of(spec: JobSpec) -> str:
    """Return ``system:account``, or the partition where it names no account (the user's default one is charged)."""
    partition = spec.target.partition
    account = partition.scheduler_options.get("account")
    return f"{partition.system}:{account}" if account else f"{partition.id} (default account)"


def max_hours(spec: JobSpec, unit: str = "node") -> float:
    """Return the most *unit*-hours (node, device, core) that one attempt of *spec* can cost."""
    if not is_charged(spec):
        return 0.0
    limit_s = math.ceil(allocation_time_s([spec]) / _MINUTE_S) * _MINUTE_S + KILL_WAIT_S
    return spec.nodes * _PER_NODE[unit](spec) * limit_s / 3600


def used_hours(spec: JobSpec, run_s: float) -> float:
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
        if is_charged(spec):
            cost, name = max_hours(spec, unit), group(spec)
            first[name] += cost
            again[name] += [cost] * (RERUNS_PER_JOB if spec.judged else 0)
    return {
        name: cost + sum(sorted(again[name], reverse=True)[: max(0, max_reruns)])
        for name, cost in first.items()
    }


def total_bound(specs: Sequence[JobSpec], max_reruns: int, unit: str = "node") -> float:
    """Return the most *unit*-hours that the whole session can cost."""
    return upper_bound(specs, max_reruns, lambda _spec: "", unit).get("", 0.0)


def hours_text(hours: float, unit: str = "node") -> str:
    """Return ``12.5 node-hours``, with at least three figures that count, but no fraction of half a minute."""
    if 0 < hours < _MIN_HOURS:
        return f"less than {_MIN_HOURS} {unit}-hours"
    return f"{hours:.3g} {unit}-hours" if hours < 1000 else f"{hours:.0f} {unit}-hours"


def cost_text(specs: Sequence[JobSpec], max_reruns: int) -> str:
    """Return the line that is printed before submission; empty where nothing is charged."""
    bounds = upper_bound(specs, max_reruns)
    if not bounds:
        return ""
    accounts = ", ".join(f"{hours_text(hours)} of {name}" for name, hours in sorted(bounds.items()))
    jobs = sum(map(is_charged, specs))
    reruns = min(max_reruns, RERUNS_PER_JOB * sum(1 for spec in specs if is_charged(spec) and spec.judged))
    many = f"{count(jobs, 'run')}, {count(max(0, reruns), 're-run')}, all at their time limits"
    return f"this session costs at most {accounts} ({many})"


#: These have a figure, which is worse than it should be; the other failures have none.
_WITH_FIGURE = frozenset({*WORSE, "no_baseline"})
_WITHOUT_FIGURE = frozenset({*FAILURES, *INFRASTRUCTURE}) - _WITH_FIGURE


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
        if record.measurement is None or record.verdict in _WITHOUT_FIGURE:
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


def charged_text(costs: list[AttemptCost], total: AttemptCost, by: str, since_ns: int) -> str:
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
