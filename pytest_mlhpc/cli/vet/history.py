"""``mlhpc vet history``: which nodes were unfit, repeated offenders first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.record import user_name
from pytest_mlhpc.store.text import iso, minutes, one_line, table, tell
from pytest_mlhpc.vetting.history import EXCLUDE_S, Offender, forget, offenders, unfit_now
from pytest_mlhpc.vetting.journal import EpochEntry, JournalQuery, NodeEntry, node_entries_since

#: Longest reason in the table, in characters; --json has all of it.
MOST_REASON = 100

#: What "kept out" means: descriptions of partitions are not read here.
KEPT_OUT = f"kept out: of later runs, for {EXCLUDE_S / 3600:.0f} h unless the partition's exclude_for says otherwise\n"


@click.command(
    cls=DataCommand,
    help="Show which nodes were unfit, repeated offenders first. Nodes unfit by what a user can mend are not listed. In "
    "--json kept_out means 24 h after the vetting, whatever exclude_for of a partition says.",
    example="mlhpc vet history --system cirrus --since 30d",
)
@click.option("--system", "place", default="", metavar="NAME[:PARTITION]", help="Only nodes of this one.")
@options.since("30d")
@click.option(
    "--forget-figures",
    metavar="REASON",
    default="",
    help="After an upgrade: learn anew what good nodes of --system NAME:PARTITION reach; nothing is deleted.",
)
@options.state_dir
def command(place: str, since_ns: int, forget_figures: str, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    now_ns = time.time_ns()
    if forget_figures:
        return _forget(state_dir, place, forget_figures, now_ns)
    system, _, partition = place.partition(":")
    where = {name: value for name, value in (("system", system), ("partition", partition)) if value}
    entries = list(node_entries_since(state_dir, JournalQuery(since_ns, now_ns, where, tell)))
    bad, good = offenders(entries)
    out = _kept_out(entries, now_ns)
    data = {"since": iso(since_ns), "nodes": [_to_json(node, out) for node in bad], "never_unfit": good}
    return CommandReport(text_of(bad, good, out, since_ns), data)


def _forget(state_dir: Path, place: str, reason: str, now_ns: int) -> CommandReport:
    system, colon, partition = place.partition(":")
    if not colon or not reason.strip():
        raise UsageError("--forget-figures needs a reason, and --system NAME:PARTITION for whose figures")
    forget(state_dir, EpochEntry(now_ns, system, partition, reason.strip(), user_name()))
    since = {"system": place, "learned_anew_since": iso(now_ns)}
    return CommandReport(f"figures of {place} are learned anew from {minutes(now_ns)} on\n", since)


def text_of(bad: Sequence[Offender], good: int, out: set[tuple[str, str, str]], since_ns: int) -> str:
    """Return a table for people."""
    if not bad:
        if not good:
            return f"no node was vetted since {minutes(since_ns)}\n"
        return f"{'1 node was' if good == 1 else f'{good} nodes were'} vetted since {minutes(since_ns)}, none was unfit\n"
    rows = [("node", "system", "unfit", "last", "now", "checks", "last reason")]
    for node in bad:
        checks = ", ".join(f"{name} {times}x" for name, times in node.checks.most_common(3))
        rows.append((
            node.host, ":".join(filter(None, (node.system, node.partition))), f"{node.unfit} of {node.vettings}",
            minutes(node.last_ns), "kept out" if _key(node) in out else "", checks, one_line(node.last_reason, MOST_REASON),
        ))  # fmt: skip
    rest = f"{good} other {'node was' if good == 1 else 'nodes were'} never unfit\n"
    meant = KEPT_OUT if any(_key(node) in out for node in bad) else ""
    return f"since {minutes(since_ns)}\n{table(rows)}{meant}{rest}"


def _kept_out(entries: Sequence[NodeEntry], now_ns: int) -> set[tuple[str, str, str]]:
    """Return the nodes that are kept out of submissions now, each with its system and partition."""
    groups: dict[tuple[str, str], list[NodeEntry]] = {}
    for entry in entries:
        if entry.at_ns >= now_ns - int(EXCLUDE_S * 1e9):
            groups.setdefault((entry.system, entry.partition), []).append(entry)
    return {(*place, host) for place, group in groups.items() for host in unfit_now(group)}


def _key(node: Offender) -> tuple[str, str, str]:
    return node.system, node.partition, node.host


def _to_json(node: Offender, out: set[tuple[str, str, str]]) -> dict[str, object]:
    return {
        "node": node.host,
        "system": node.system,
        "partition": node.partition,
        "vettings": node.vettings,
        "unfit": node.unfit,
        "unknown": node.unknown,
        "checks": dict(node.checks.most_common()),
        "last": iso(node.last_ns),
        "last_reason": node.last_reason,
        "kept_out": _key(node) in out,
    }
