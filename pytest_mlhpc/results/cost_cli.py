"""``mlhpc cost``: node-hours that were charged, from what was recorded."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.results.dates import iso, minutes, nanoseconds
from pytest_mlhpc.results.failures import FAILURES, INFRASTRUCTURE
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.text import clean, table
from pytest_mlhpc.statedir import default_state_dir
from pytest_mlhpc.system.quantities import parse_duration

SUMMARY = "node-hours that were charged, by system, partition, account, benchmark or session"

#: These have a figure, which is worse than it should be; the other failures have none.
_MEASURED = frozenset({"regressed", "drifted", "no_baseline"})
_BROKEN = frozenset({*FAILURES, *INFRASTRUCTURE}) - _MEASURED


def _account(record: Record) -> str:
    """Return ``system:account``; records of earlier versions name none."""
    account: str = getattr(record, "account", "")
    return account or f"{record.system}:{record.partition} (default account)"


#: --by -> what records are added up by.
GROUPS: dict[str, Callable[[Record], str]] = {
    "partition": lambda record: f"{record.system}:{record.partition}",
    "system": lambda record: record.system,
    "account": _account,
    "benchmark": lambda record: record.benchmark,
    "session": lambda record: record.session,
}


@dataclass
class Cost:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--since``, ``--by``, ``--json`` and ``--state-dir``."""
    parser.add_argument("--since", default="30d", metavar="TIME", help="30d, 12h or a date (default: 30d)")
    parser.add_argument("--by", choices=GROUPS, default="partition", help="default: partition")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    since_ns = since(args.since, time.time_ns())
    index = Index(args.state_dir or default_state_dir(os.environ), _tell)
    try:
        records = index.since(since_ns)
    finally:
        index.close()
    costs, total = add_up(records, GROUPS[args.by])
    if args.json:
        rows = [cost.to_json() for cost in costs]
        content = {"since": iso(since_ns), "by": args.by, "costs": rows, "total": total.to_json()}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        sys.stdout.write(text_of(costs, total, args.by, since_ns))
    return 0


def since(text: str, now_ns: int) -> int:
    """Return the moment *text* ago, or that of a date, in ns UTC.

    Raises:
        UsageError: it is neither a duration nor a date.
    """
    try:
        return max(0, now_ns - int(parse_duration(text) * 1e9))
    except ValueError:
        pass
    try:
        return nanoseconds(text) if text else _no_time(text)
    except (ValueError, OverflowError):
        return _no_time(text)


def _no_time(text: str) -> int:
    raise UsageError(f"--since {text!r} is neither a time like 30d or 12h nor a date like 2026-11-21")


def add_up(records: Iterable[Record], group: Callable[[Record], str]) -> tuple[list[Cost], Cost]:
    """Return the costs of each group, dearest first, and of all."""
    costs: dict[str, Cost] = {}
    total = Cost("total")
    for record in records:
        name = group(record)
        costs.setdefault(name, Cost(name)).add(record)
        total.add(record)
    return sorted(costs.values(), key=lambda cost: (-cost.node_hours, cost.name)), total


def text_of(costs: list[Cost], total: Cost, by: str, since_ns: int) -> str:
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


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
