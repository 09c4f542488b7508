"""The lines of ``mlhpc last``: what went wrong, the worst first, each with the command to type next. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.failures import INFRASTRUCTURE
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.text import one_line

#: Ten lines: one for the session or the night, two for each of four problems, one for the rest.
MOST = 4
FINE = ("passed", "new", "unjudged")

_FIRST, _LAST = ("regressed", "drifted"), ("inconclusive", "improved")


@dataclass(frozen=True)
class Problem:
    """``what`` is one line, ``command`` what to type next; the least ``urgency`` is told first."""

    urgency: int
    what: str
    command: str


def lines_of(records: Sequence[Record], options: Sequence[str] = ()) -> list[str]:
    """Return at most ten lines about the first attempts of one session, in the order in which they were recorded.

    *options* end each command that is named: where the state lies, if not where it is looked for.
    """
    if not records:
        return ["the session recorded no first attempt"]
    last = records[-1]
    counts = ", ".join(
        f"{count} {verdict}" for verdict, count in Counter(one.verdict for one in records).items()
    )
    systems = ", ".join(sorted({one.system for one in records}))
    head = f"{minutes(last.created_ns)}, {systems}, session {last.session}: {counts}"
    head += cost(one.node_hours for one in records)
    more = shlex.join(["mlhpc", "records", "list", "--session", last.session, "--limit", "1000", *options])
    return told(head, problems_of(records, options), more)


def told(head: str, problems: Sequence[Problem], more: str) -> list[str]:
    """Return *head*, the most urgent problems with their commands, and with the command *more* how many are left."""
    lines = [one_line(head, 240)]
    ordered = sorted(problems, key=lambda one: one.urgency)
    for problem in ordered[:MOST]:
        lines += [one_line(problem.what), f"  next: {one_line(problem.command, 10_000)}"]
    if len(ordered) > MOST:
        lines.append(f"and {len(ordered) - MOST} more: {more}")
    return lines


def problems_of(
    records: Iterable[Record], options: Sequence[str] = (), *, not_run: bool = False
) -> list[Problem]:
    """Return a problem for each record that is not fine; with *not_run*, infrastructure's are called so."""
    found = []
    for record in records:
        if record.verdict in FINE:
            continue
        called = record.verdict
        what = _what(record)
        if not_run and record.verdict in INFRASTRUCTURE:
            called, what = "not run", f"{record.verdict}: {what}"
        problem = Problem(
            _urgency(record.verdict), f"{called}: {record.node_id}: {what}", command(record, options)
        )
        found.append(problem)
    return found


def command(record: Record, options: Sequence[str] = ()) -> str:
    """Return what to type next about a record that is not fine."""
    node_id = one_line(record.node_id, 10_000)
    if record.verdict in {"improved", "no_baseline"}:
        return shlex.join(["mlhpc", "baseline", "accept", node_id, "--reason", "TEXT", *options])
    words = ["pytest", node_id, "--system", f"{record.system}:{record.partition}"]
    # A record does not say which ones would be taken by themselves, so they are always named.
    for option, value in (("--environment", record.environment), ("--preset", record.preset)):
        words += [option, value] if value else []
    return one_line(shlex.join([*words, *options]), 10_000)


def cost(node_hours: Iterable[float]) -> str:
    """Return what was charged, for the end of a line; nothing where nothing was."""
    total = sum(node_hours)
    return f"; {total:.4g} node-hours" if total else ""


def _urgency(verdict: str) -> int:
    if verdict in _FIRST:
        return _FIRST.index(verdict)
    if verdict in _LAST:
        return 8 + _LAST.index(verdict)
    return 3 if verdict in INFRASTRUCTURE else 2


def _what(record: Record) -> str:
    if record.explanation:
        return record.explanation[0]
    return record.failure.removeprefix(f"{record.verdict}: ") or "no explanation was recorded"
