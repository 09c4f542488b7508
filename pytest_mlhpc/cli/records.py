"""``mlhpc records``: what was measured: list, show, rejudge, cost, check, usage, prune, ingest, push."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice, NounGroup
from pytest_mlhpc.cli.options import chosen
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.foreign import DIRECTIONS, READERS, ForeignNames
from pytest_mlhpc.history.judge_inputs import rejudged
from pytest_mlhpc.influx import credentials
from pytest_mlhpc.influx.cursor import PushStart, begin, read_start, rejected_folder, restart, waiting
from pytest_mlhpc.influx.push import (
    InfluxSink,
    Patience,
    Progress,
    Sender,
    StuckError,
    UnavailableError,
    push_records,
)
from pytest_mlhpc.influx.push import retry_rejected as send_rejected
from pytest_mlhpc.jobs.budget import GROUPS, add_up, charged_text
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record, default_branch_of
from pytest_mlhpc.store.store import read_records
from pytest_mlhpc.store.text import count, iso, minutes, quantity, table, tell

if TYPE_CHECKING:
    from pytest_mlhpc.history.foreign import Ingested

#: Exit codes: something was not read, or was refused and put aside; what is left can be sent later.
INCOMPLETE, LATER = 1, 75
#: Records of one session, at most.
_EVERY = 10**9


@click.group(
    cls=NounGroup,
    help="Records: what was measured, one for each attempt of a run.",
    example="mlhpc records list --limit 50",
)
def command() -> None:
    """Hold the verbs."""


@command.command(
    "list",
    cls=DataCommand,
    help="List the newest records.",
    example="mlhpc records list --test 'suites/test_a.py::test_a[cirrus:standard]'",
)
@click.option("--session", default="", metavar="ID", help="Only of this session.")
@click.option("--test", default="", metavar="TEST", help="Only of this test, by its node id or name.")
@click.option("--limit", type=int, default=20, metavar="N", show_default=True, help="At most N.")
@options.state_dir
def list_(session: str, test: str, limit: int, state_dir: Path) -> CommandReport:
    """Return a row for each."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        records = index.newest(session=session, test=test, limit=limit)
    data = {"records": [to_json(record) for record in records]}
    if not records:
        return CommandReport(f"no record in {state_dir} matches\n", data)
    rows = [("recorded", "id", "verdict", "attempt", "owner", "test", "judged")]
    for record in records:
        row = minutes(record.created_ns), record.id, record.verdict, str(record.attempt), record.owner or "-"
        rows.append((*row, record.node_id, _figures(record)))
    return CommandReport(table(rows), data)


def _figures(record: Record) -> str:
    if record.measurement is None:
        return record.failure
    metrics = [metric for name in record.judged if (metric := record.measurement.metric(name))]
    return ", ".join(f"{metric.name} {quantity(metric.value, metric.unit)}" for metric in metrics)


@command.command(
    "show",
    cls=DataCommand,
    help="Show all of one record, by its ID or how that begins; `mlhpc records list` shows the newest.",
    example="mlhpc records show 01932f6a-7c1e",
)
@click.argument("name", metavar="ID")
@options.state_dir
def show(name: str, state_dir: Path) -> CommandReport:
    """Return it, or say which are meant."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        found = index.find(name)
    if not found:
        raise UsageError(f"no record's id starts with {name!r}; `mlhpc records list` shows the newest")
    if len(found) > 1:
        ids = ", ".join(record.id for record in found)
        raise UsageError(f"several records' ids start with {name!r}: {ids}")
    record = to_json(found[0])
    return CommandReport(clean(_fields(record)), {"record": record})


def _fields(record: Mapping[str, Any]) -> str:
    """Return what is known of a record: a line for each field that is not empty, and its metrics as a table."""
    measured = dict(record.get("measurement") or {})
    metrics = measured.pop("metrics", [])
    known = {**record, "measurement": None, **{f"measured {name}": value for name, value in measured.items()}}
    lines = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}\n"
        for name, value in known.items()
        if value not in (None, "", [], {})
    ]
    rows = [(one["name"], quantity(one["value"], one["unit"]), one["better"]) for one in metrics]
    return "".join(lines) + (table([("metric", "value", "better"), *rows]) if rows else "")


@command.command(
    "rejudge",
    cls=DataCommand,
    help="Judge a session again, from its records and the history before it alone, on any machine that has both. Exit code 1: a "
    "verdict is another one than was recorded; says what differs.",
    example="mlhpc records rejudge 01932f6a-7c1e-7000-8000-000000000001",
)
@click.argument("session", metavar="SESSION-ID")
@options.source
def rejudge(*, session: str, source: str, state_dir: Path) -> CommandReport:
    """Return a row for each run whose verdict is another one."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        records = index.newest(session=session, limit=_EVERY)
    if not records:
        raise UsageError(
            f"no record is of session {session!r}; `mlhpc records show ID` names a record's session"
        )
    with chosen(source, state_dir) as opened:
        found = list(rejudged(records, opened))
    other = [one for one in found if one.differs]
    lines = [f"{one.record.node_id}: {text}\n" for one in other for text in one.differs]
    same = f"{count(len(found) - len(other), 'run')} of {len(found)} judged as recorded\n"
    data = {
        "session": session,
        "judged": len(found),
        "runs": [
            {"record": one.record.id, "test": one.record.node_id, "recorded": one.record.verdict, "verdict": one.verdict, "differs": one.differs}
            for one in found
        ],
    }  # fmt: skip
    return CommandReport(clean("".join([*lines, same])), data, INCOMPLETE if other else 0)


@command.command(
    "cost",
    cls=DataCommand,
    help="Add up the node-hours that were charged: of first attempts, re-runs, and runs that measured nothing.",
    example="mlhpc records cost --since 7d --by account",
)
@options.since("30d")
@click.option(
    "--by", type=NearestChoice([*GROUPS]), default="partition", show_default=True, help="What is added up."
)
@options.state_dir
def cost(since_ns: int, by: str, state_dir: Path) -> CommandReport:
    """Return a row for each group, dearest first."""
    with contextlib.closing(Index(state_dir, tell)) as index:
        costs, total = add_up(index.since(since_ns), GROUPS[by])
    data = {
        "since": iso(since_ns),
        "by": by,
        "costs": [cost.to_json() for cost in costs],
        "total": total.to_json(),
    }
    return CommandReport(charged_text(costs, total, by, since_ns), data)


@command.command(
    "check",
    cls=DataCommand,
    help="Read every record and name what is damaged; exit code 1 if anything is.",
    example="mlhpc records check",
)
@click.option("--rebuild-index", is_flag=True, help="Make the index of the records anew, too.")
@options.state_dir
def check(rebuild_index: bool, state_dir: Path) -> CommandReport:
    """Return what is damaged."""
    problems: list[str] = []
    records = sum(1 for _record in read_records(state_dir, problems.append))
    if rebuild_index:
        with contextlib.closing(Index(state_dir)) as index:
            index.rebuild()
    lines = [
        *problems,
        f"{count(records, 'record')} in {state_dir / 'records'}, {count(len(problems), 'problem')}",
    ]
    text = "".join(f"{line}\n" for line in lines)
    return CommandReport(text, {"records": records, "problems": problems}, 1 if problems else 0)


def _older(_ctx: click.Context, _option: click.Parameter, value: str) -> tuple[int, str]:
    """Return the moment in ns UTC, and how it was typed."""
    from pytest_mlhpc.session.retention import RECENT_NS

    now_ns = time.time_ns()
    before_ns = options.moment(value, now_ns, "--older", "2y, 18 months or 90d")
    if before_ns > now_ns - RECENT_NS:
        raise UsageError(f"--older {value!r} is less than a day ago; write for example: --older 2y")
    return before_ns, value


@command.command(
    "usage",
    cls=DataCommand,
    help="Show how much the state directory holds, by kind and by month, the largest first, and what pruning would free. "
    "Nothing is changed.",
    example="mlhpc records usage --older 18months",
)
@click.option(
    "--older", default="2y", metavar="TIME", callback=_older, show_default=True, help="What would be pruned."
)
@options.state_dir
def usage(older: tuple[int, str], state_dir: Path) -> CommandReport:
    """Return it."""
    from pytest_mlhpc.session import retention

    found = retention.usage(state_dir, older[0])
    text = found.text(older[1]) if state_dir.is_dir() else f"there is no {state_dir}: nothing is recorded\n"
    return CommandReport(text, found.to_json())


@command.command(
    "prune",
    cls=DataCommand,
    help="Make old records smaller and remove old run folders. Of records older than TIME samples are dropped; figures, verdicts "
    "and surroundings stay. Only files of this user are changed, and none of a session that is open. Exit code 1: something "
    "could not be done.",
    example="mlhpc records prune --older 2y --dry-run",
)
@click.option("--older", required=True, metavar="TIME", callback=_older, help="2y, 18months, 90d or a date.")
@click.option("--dry-run", is_flag=True, help="Only say what would be pruned.")
@options.state_dir
def prune(older: tuple[int, str], dry_run: bool, state_dir: Path) -> CommandReport:
    """Do it, and say what was done."""
    from pytest_mlhpc.session import retention

    found = retention.prune(state_dir, older[0], dry_run=dry_run)
    return CommandReport(found.text(), found.to_json(), INCOMPLETE if found.failed else 0)


#: Time between two reads of a source that is followed, in seconds.
LOOK_S = 5.0


@command.command(
    "ingest",
    cls=DataCommand,
    help="Record runs that another tool made, each once: history, change points and alerts then work on them as on our own. "
    "The source stays as it is, and may be read again at any time. Exit code 1: something in it was not read.",
    example="mlhpc records ingest --reframe perflogs/",
)
@click.option("--reframe", type=Path, metavar="PATH", help="Folder of perflogs, one of them, or results.db.")
@click.option("--jsonl", type=Path, metavar="FILE", help="JSON lines: time, benchmark, metric, value, unit.")
@click.option(
    "--pytest-benchmark", type=Path, metavar="PATH", help="File of --benchmark-json, or a folder of them."
)
@click.option(
    "--junit", type=Path, metavar="PATH", help="JUnit XML, or a folder of it: the time of each test case."
)
@click.option("--system", default="", metavar="NAME", help="Instead of the source's own.")
@click.option("--partition", default="", metavar="NAME", help="Instead of the source's own.")
@click.option("--environment", default="", metavar="NAME", help="Instead of the source's own.")
@click.option(
    "--better", multiple=True, metavar="METRIC=higher|lower|none", help="Which direction is better."
)
@click.option(
    "--unit", multiple=True, metavar="METRIC=UNIT", help="Unit of a metric that the source does not say."
)
@click.option(
    "--branch", default="", metavar="NAME", help="Branch of the runs.  [default: the default branch]"
)
@click.option("--follow", is_flag=True, help="Go on as the source grows, until interrupted.")
@options.state_dir
def ingest(
    *,
    reframe: Path | None,
    jsonl: Path | None,
    pytest_benchmark: Path | None,
    junit: Path | None,
    system: str,
    partition: str,
    environment: str,
    better: Sequence[str],
    unit: Sequence[str],
    branch: str,
    follow: bool,
    state_dir: Path,
) -> CommandReport:
    """Read the source, store what is new, and say what became of it."""
    given = {"reframe": reframe, "jsonl": jsonl, "pytest-benchmark": pytest_benchmark, "junit": junit}
    sources = [(tool, path) for tool, path in given.items() if path is not None]
    if len(sources) != 1:
        raise UsageError(
            "name one source: --reframe PATH, --jsonl FILE, --pytest-benchmark PATH or --junit PATH"
        )
    (tool, path) = sources[0]
    if not path.exists():
        raise UsageError(f"there is no {path}")
    if system == "local":
        raise UsageError(
            "`local` is this machine itself; give the other tool's machine a name of its own by --system"
        )
    names = ForeignNames(
        system, partition, environment, _pairs("--better", better, DIRECTIONS), _pairs("--unit", unit)
    )
    from pytest_mlhpc.history.foreign import Ingester

    made = Ingester(state_dir, tool, branch or default_branch_of(Path.cwd(), os.environ))
    with contextlib.closing(made):
        made.take(READERS[tool](path, names))
        before = _state_of(path)
        while follow:
            if sys.stderr.isatty():
                sys.stderr.write(f"{made.found.stored} records stored; waiting for more (Ctrl-C ends)\r")
            try:
                time.sleep(LOOK_S)
            except KeyboardInterrupt:
                break
            if (now := _state_of(path)) != before:
                before = now
                made.take(READERS[tool](path, names))
    return CommandReport(
        _ingested(made.found), _ingested_data(made.found), INCOMPLETE if made.found.problems else 0
    )


def _state_of(path: Path) -> list[tuple[str, int, int]]:
    """Return what changes as the source grows: of each file its size and time."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = []
    for file in files:
        with contextlib.suppress(OSError):  # it was moved away meanwhile
            stat = file.stat()
            found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return found


def _pairs(option: str, given: Sequence[str], allowed: Sequence[str] = ()) -> dict[str, str]:
    found = {}
    for pair in given:
        name, _, value = pair.partition("=")
        if not name or not value or (allowed and value not in allowed):
            values = "|".join(allowed) or "UNIT"
            raise UsageError(f"{option} {pair!r}: write METRIC={values}")
        found[name] = value
    return found


def _ingested(found: Ingested) -> str:
    since = iso(found.first_ns)[:10]
    commands = (f"mlhpc history changes --since {since}", f"mlhpc report html --since {since}")
    return found.text() + ("".join(("next:\n", *(f"  {one}\n" for one in commands))) if found.stored else "")


def _ingested_data(found: Ingested) -> dict[str, object]:
    return {
        "stored": found.stored,
        "known": found.known,
        "failed": found.failed,
        "benchmarks": sorted(found.benchmarks),
        "systems": sorted(found.systems),
        "notes": found.notes,
        "problems": found.problems,
    }


#: One request may take so long, in seconds: a server that compacts its files answers late.
REQUEST_LIMIT_S = 60.0
#: So many requests at a time: more gain nothing where the server has two cores.
LANES = 2


@command.command(
    "push",
    cls=DataCommand,
    help="Send to InfluxDB what was recorded since the last push. MLHPC_INFLUX_URL, _TOKEN or _TOKEN_FILE, _BUCKET and _ORG name "
    "the server. Exit code 1: something could not be read, or was refused and lies in the folder `rejected`. 75: try again "
    "later, nothing is lost.",
    example="mlhpc records push --check",
)
@click.option("--check", is_flag=True, help="Write one point, read it back, say what is wrong.")
@click.option(
    "--since",
    default=None,
    metavar="TIME",
    help="Send all that was recorded since then, 30d, 12h or a date, whatever was sent before; equal points stay one.",
)
@click.option("--retry-rejected", is_flag=True, help="Send what was refused earlier once more.")
@click.option(
    "--wait",
    metavar="SECONDS",
    type=float,
    default=30.0,
    show_default=True,
    help="How long to go on trying while the server is away.",
)
@options.state_dir
def push(
    *, check: bool, since: str | None, retry_rejected: bool, wait: float, state_dir: Path
) -> CommandReport:
    """Send, and say what was sent."""
    if check + (since is not None) + retry_rejected > 1:
        raise UsageError("--check, --since, --retry-rejected: give one of them")
    since_ns = None if since is None else options.moment(since, time.time_ns())
    server = credentials.server_of(os.environ)
    if check:
        from pytest_mlhpc.influx.publisher import check as check_server

        steps, code = check_server(server)
        text = "".join(f"{name:<8} {clean(found)}\n" for name, found in steps)
        return CommandReport(text, {"check": [{"step": name, "found": found} for name, found in steps]}, code)
    with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
        patience = Patience(time.monotonic() + max(0.0, wait))
        sender = Sender(sink, state_dir, patience, lanes=LANES)
        began = time.monotonic()
        later = "" if since_ns is None else _start_again(sender, since_ns)
        later = later or _send(sender, begin(state_dir, tell), again=retry_rejected)
    progress, left = sender.progress, waiting(state_dir)
    if later:
        tell(f"mlhpc records push: {later}\n{left} left to send: try again later")
    text = _sent(progress, rejected_folder(state_dir), time.monotonic() - began)
    data = {
        "points": progress.points,
        "rejected": progress.rejected,
        "unread": progress.unread,
        "waiting": left.both,
    }
    return CommandReport(
        text, data, LATER if later else INCOMPLETE if progress.rejected or progress.unread else 0
    )


def _send(sender: Sender, start: PushStart, *, again: bool = False) -> str:
    """Send what waits, and *again* what was refused; return why it must be tried later, an empty text if it need not."""
    try:
        push_records(sender, start, tell)
        if again:
            tell(f"{count(send_rejected(sender), 'refused line')} sent again")
    except (UnavailableError, StuckError, StoreError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or rejected_folder(sender.state_dir)}: {error.strerror}"
    return ""


def _start_again(sender: Sender, since_ns: int) -> str:
    """Write a new start when what waits has been sent, as it would forget older records; return why not, as :func:`_send`.

    Where the present start is damaged, nobody knows what waits.
    """
    start = None
    with contextlib.suppress(StoreError):
        start = read_start(sender.state_dir)
    later = _send(sender, start) if start is not None else ""
    if not later:
        restart(sender.state_dir, since_ns)
    return later


def _sent(progress: Progress, rejected: Path, seconds: float) -> str:
    rate = f", {progress.points / seconds:,.0f} a second" if progress.points and seconds > 1 else ""
    lines = [f"{count(progress.points, 'point')} sent{rate}", *map(clean, progress.notes(rejected))]
    return "".join(f"{line}\n" for line in lines)
