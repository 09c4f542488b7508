"""``mlhpc push``: send what waits in the spool to InfluxDB; ``--check`` tests the way there and back."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.influx import credentials
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.client import InfluxSink, UnavailableError
from pytest_mlhpc.influx.lines import lines_of
from pytest_mlhpc.influx.push import (
    Patience,
    Progress,
    Sender,
    StuckError,
    push_lines,
    push_spool,
    retry_rejected,
)
from pytest_mlhpc.results.cost_cli import since
from pytest_mlhpc.results.store import read_records
from pytest_mlhpc.results.text import clean
from pytest_mlhpc.statedir import default_state_dir

#: Exit codes: some of it was refused and put aside; try again later.
FOUND, LATER = 1, 75
#: One request may take so long, in seconds: a server that compacts its files answers late.
REQUEST_LIMIT_S = 60.0
#: So many requests at a time: more gain nothing where the server has two cores.
LANES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--check``, ``--all``, ``--since``, ``--retry-rejected``, ``--wait``, ``--state-dir``."""
    parser.epilog = (
        "The server is named by MLHPC_INFLUX_URL, _TOKEN or _TOKEN_FILE, _BUCKET, _ORG. Exit codes: 0 all was sent, "
        "1 some points were refused and lie in the spool's folder `rejected`, 4 wrong usage, "
        "75 try again later, nothing is lost."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write one point, read it back, say what is wrong")
    what.add_argument("--all", action="store_true", help="send the whole store again; equal points stay one")
    what.add_argument("--retry-rejected", action="store_true", help="send what was refused earlier once more")
    parser.add_argument(
        "--since", metavar="TIME", default="", help="with --all: 30d, 12h or a date (default: all)"
    )
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=30.0,
        help="how long to go on trying while the server is away (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    if args.since and not args.all:
        raise UsageError("--since goes with --all: the spool is always sent whole")
    since_ns = since(args.since, time.time_ns()) if args.since else 0
    state_dir: Path = args.state_dir or default_state_dir(os.environ)
    server = credentials.server_of(os.environ)
    if args.check:
        from pytest_mlhpc.influx.checking import check

        return check(server)
    spool = spools.make_folders(state_dir)
    if args.retry_rejected:
        sys.stdout.write(f"{retry_rejected(state_dir)} refused points are back in the spool\n")
    with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
        sender = Sender(
            sink, spool / "rejected", Patience(time.monotonic() + max(0.0, args.wait)), lanes=LANES
        )
        began = time.monotonic()
        later = _send(sender, state_dir, whole_store=args.all, since_ns=since_ns)
    _tell(sender.progress, spool, time.monotonic() - began)
    if later:
        sys.stderr.write(f"mlhpc push: {clean(later)}\nwhat was not sent stays: try again later\n")
        return LATER
    return FOUND if sender.progress.rejected or sender.progress.damaged else 0


def _send(sender: Sender, state_dir: Path, *, whole_store: bool, since_ns: int) -> str:
    """Send; return why it must be tried again, an empty text if it need not."""
    try:
        if whole_store:
            push_lines(sender, _stored(state_dir, since_ns), "store")
        else:
            push_spool(sender, spools.spool_of(state_dir))
    except (UnavailableError, StuckError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or spools.spool_of(state_dir)}: {error.strerror}"
    return ""


def _stored(state_dir: Path, since_ns: int) -> Iterator[list[str]]:
    for record in read_records(state_dir, lambda problem: print(clean(problem), file=sys.stderr)):  # noqa: T201 - stderr
        if record.created_ns >= since_ns:
            yield lines_of(record)


def _tell(progress: Progress, spool: Path, seconds: float) -> None:
    rate = f", {progress.points / seconds:,.0f} a second" if progress.points and seconds > 1 else ""
    sys.stdout.write(f"{progress.points} points sent{rate}\n")
    if progress.adopted:
        sys.stdout.write(f"{progress.adopted} files of writers that had died were taken over\n")
    if progress.rejected or progress.damaged:
        sys.stdout.write(f"{progress.rejected} lines were put aside in {spool / 'rejected'}:\n")
        for reason, count in progress.reasons.items():
            sys.stdout.write(f"  {count}: {clean(reason)}\n")
