"""`mlhpc vet history`: which nodes were unfit, repeated offenders first."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.dates import iso, minutes
from pytest_mlhpc.results.text import clean, one_line, table
from pytest_mlhpc.statedir import default_state_dir
from pytest_mlhpc.vet.command.history import EXCLUDE_S, forget, unfit_now
from pytest_mlhpc.vet.command.journal import EpochEntry, NodeEntry, Query, node_entries_since
from pytest_mlhpc.vet.command.offenders import Offender, offenders

SUMMARY = "nodes that vettings found unfit, repeated offenders first"

#: Longest reason in the table, in characters; --json has all of it.
MOST_REASON = 100

#: What "kept out" means: descriptions of partitions are not read here.
KEPT_OUT = f"kept out: of later runs, for {EXCLUDE_S / 3600:.0f} h unless the partition's exclude_for says otherwise\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--system``, ``--partition``, ``--since``, ``--json`` and ``--state-dir``."""
    parser.add_argument(
        "--system", default="", metavar="NAME", help="only nodes of this system, or NAME:PARTITION"
    )
    parser.add_argument("--since", default="30d", metavar="TIME", help="30d, 12h or a date (default: 30d)")
    parser.add_argument(
        "--forget-figures", metavar="REASON", default="",
        help="after an upgrade: learn anew what good nodes of --system NAME:PARTITION reach; nothing is deleted",
    )  # fmt: skip
    parser.add_argument(
        "--json",
        action="store_true",
        help="for programs: one JSON object; kept_out in it means 24 h after the vetting, whatever exclude_for says",
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Print it. Nodes unfit by what a user can mend are not listed: another user would have had no trouble."""
    now_ns = time.time_ns()
    since_ns = since(args.since, now_ns)
    system, _, partition = args.system.partition(":")
    where = {name: value for name, value in (("system", system), ("partition", partition)) if value}
    state_dir = args.state_dir or default_state_dir(os.environ)
    if args.forget_figures:
        return _forget(state_dir, args, now_ns)
    entries = list(node_entries_since(state_dir, Query(since_ns, now_ns, where, _tell)))
    bad, good = offenders(entries)
    out = _kept_out(entries, now_ns)
    if args.json:
        rows = [_to_json(node, out) for node in bad]
        sys.stdout.write(json.dumps({"since": iso(since_ns), "nodes": rows, "never_unfit": good}) + "\n")
    else:
        sys.stdout.write(text_of(bad, good, out, since_ns))
    return 0


def _forget(state_dir: Path, args: argparse.Namespace, now_ns: int) -> int:
    system, colon, partition = args.system.partition(":")
    if not colon or not args.forget_figures.strip():
        raise UsageError("--forget-figures needs a reason, and --system NAME:PARTITION for whose figures")
    forget(state_dir, EpochEntry(now_ns, system, partition, args.forget_figures.strip(), getpass.getuser()))
    sys.stdout.write(clean(f"figures of {args.system} are learned anew from {minutes(now_ns)} on\n"))
    return 0


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


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
