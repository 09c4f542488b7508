"""``mlhpc last``: the last session in at most ten lines, each problem with the command to type next."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.results.dates import minutes
from pytest_mlhpc.results.failures import INFRASTRUCTURE
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.text import one_line
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "what the last session found, and what to do next"

#: Ten lines: one for the session, two for each of four problems, one for the rest.
_MOST = 4
_FINE = ("passed", "new", "unjudged")
#: A session has no more tests than this worth reading for ten lines.
_LIMIT = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--state-dir``."""
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 5 when nothing was ever measured, as pytest would."""
    state_dir = args.state_dir or default_state_dir(os.environ)
    index = Index(state_dir)
    try:
        newest = index.newest(limit=1)
        if not newest:
            sys.stdout.write(f"nothing is recorded in {state_dir}; run: pytest suites/ --system local\n")
            return 5
        records = [one for one in index.newest(session=newest[0].session, limit=_LIMIT) if one.attempt == 0]
    finally:
        index.close()
    options: tuple[str, ...] = ()
    if state_dir != default_state_dir(os.environ):
        options = (f"--state-dir={state_dir.absolute()}",)
    sys.stdout.writelines(f"{line}\n" for line in lines_of(records[::-1], options))
    return 0


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
    lines = [one_line(f"{minutes(last.created_ns)}, {systems}, session {last.session}: {counts}")]
    problems = sorted((one for one in records if one.verdict not in _FINE), key=_urgency)
    for record in problems[:_MOST]:
        lines.append(one_line(f"{record.verdict}: {record.node_id}: {_what(record)}"))
        lines.append(f"  next: {_next(record, options)}")
    if len(problems) > _MOST:
        lines.append(
            f"and {len(problems) - _MOST} more: mlhpc records list --session {last.session} --limit 1000"
            + "".join(f" {shlex.quote(word)}" for word in options)
        )
    return lines


def _urgency(record: Record) -> int:
    order = ("regressed", "drifted")
    if record.verdict in order:
        return order.index(record.verdict)
    return {"inconclusive": 8, "improved": 9}.get(
        record.verdict, 3 if record.verdict in INFRASTRUCTURE else 2
    )


def _what(record: Record) -> str:
    if record.explanation:
        return record.explanation[0]
    return record.failure.removeprefix(f"{record.verdict}: ") or "no explanation was recorded"


def _next(record: Record, options: Sequence[str]) -> str:
    node_id = one_line(record.node_id, 10_000)
    if record.verdict in {"improved", "no_baseline"}:
        return shlex.join(["mlhpc", "baseline", "accept", node_id, "--reason", "TEXT", *options])
    words = ["pytest", node_id, "--system", f"{record.system}:{record.partition}"]
    # A record does not say which ones would be taken by themselves, so they are always named.
    for option, value in (("--environment", record.environment), ("--preset", record.preset)):
        words += [option, value] if value else []
    return one_line(shlex.join([*words, *options]), 10_000)
