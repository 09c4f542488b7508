"""``mlhpc records push``: send what waits in the spool to InfluxDB; ``--check`` tests the way there and back."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import Command
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.influx import credentials
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.push import (
    InfluxSink,
    Patience,
    Progress,
    Sender,
    StuckError,
    UnavailableError,
    push_lines,
    push_spool,
)
from pytest_mlhpc.influx.push import retry_rejected as requeue
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.store.store import read_records
from pytest_mlhpc.store.text import clean, tell

#: Exit codes: some of it was refused and put aside; try again later.
FOUND, LATER = 1, 75
#: One request may take so long, in seconds: a server that compacts its files answers late.
REQUEST_LIMIT_S = 60.0
#: So many requests at a time: more gain nothing where the server has two cores.
LANES = 2


@click.command(
    cls=Command,
    help="Send what waits in the spool to InfluxDB. MLHPC_INFLUX_URL, _TOKEN or _TOKEN_FILE, _BUCKET and _ORG name the "
    "server. Exit code 1: some points were refused and lie in the spool's folder `rejected`. 75: try again later, "
    "nothing is lost.",
    example="mlhpc records push --check",
)
@click.option("--check", is_flag=True, help="Write one point, read it back, say what is wrong.")
@click.option("--all", "everything", is_flag=True, help="Send the whole store again; equal points stay one.")
@click.option("--retry-rejected", is_flag=True, help="Send what was refused earlier once more.")
@options.since()
@click.option(
    "--wait",
    metavar="SECONDS",
    type=float,
    default=30.0,
    show_default=True,
    help="How long to go on trying while the server is away.",
)
@options.state_dir
def command(
    *, check: bool, everything: bool, retry_rejected: bool, since_ns: int, wait: float, state_dir: Path
) -> int:
    """Send, and say what was sent."""
    if check + everything + retry_rejected > 1:
        raise UsageError("--check, --all, --retry-rejected: give one of them")
    if since_ns and not everything:
        raise UsageError("--since goes with --all: the spool is always sent whole")
    server = credentials.server_of(os.environ)
    if check:
        from pytest_mlhpc.influx.publisher import check as check_server

        return check_server(server)
    spool = spools.make_folders(state_dir)
    if retry_rejected:
        sys.stdout.write(f"{requeue(state_dir)} refused points are back in the spool\n")
    with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
        sender = Sender(sink, spool / "rejected", Patience(time.monotonic() + max(0.0, wait)), lanes=LANES)
        began = time.monotonic()
        later = _send(sender, state_dir, whole_store=everything, since_ns=since_ns)
    _print(sender.progress, spool, time.monotonic() - began)
    if later:
        tell(f"mlhpc records push: {later}\nwhat was not sent stays: try again later")
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
    for record in read_records(state_dir, tell):
        if record.created_ns >= since_ns:
            yield lines_of(record)


def _print(progress: Progress, spool: Path, seconds: float) -> None:
    rate = f", {progress.points / seconds:,.0f} a second" if progress.points and seconds > 1 else ""
    sys.stdout.write(f"{progress.points} points sent{rate}\n")
    if progress.adopted:
        sys.stdout.write(f"{progress.adopted} files of writers that had died were taken over\n")
    if progress.rejected or progress.damaged:
        sys.stdout.write(f"{progress.rejected} lines were put aside in {spool / 'rejected'}:\n")
        for reason, count in progress.reasons.items():
            sys.stdout.write(f"  {count}: {clean(reason)}\n")
