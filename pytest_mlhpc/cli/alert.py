"""``mlhpc alert``: one message for one cause after a nightly run: send, list, ack, mute."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_mlhpc.alert import book as books
from pytest_mlhpc.alert.book import (
    MOST_REASON,
    BusyError,
    Delivery,
    acknowledge,
    checked_ticket,
    deliver,
    keep_damaged,
    locked,
    queued,
    read_book,
    repeat,
    until,
    write_book,
    write_with_journal,
)
from pytest_mlhpc.alert.channels.base import AlertMessage, as_json
from pytest_mlhpc.alert.incidents import advance
from pytest_mlhpc.alert.messages import message_of, owners_text, with_journal
from pytest_mlhpc.alert.model import DAY_NS, NIGHT_NS, Book, Incident, KnownIssue
from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand, NearestChoice, NounGroup
from pytest_mlhpc.cli.options import chosen
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.events import JournalEntry, software_changes
from pytest_mlhpc.history.level_changes import cache_path
from pytest_mlhpc.influx.credentials import store_text
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.record import provenance_of
from pytest_mlhpc.store.text import iso, minutes, nanoseconds, one_line, table, tell

if TYPE_CHECKING:
    from pytest_mlhpc.alert.config import Config
    from pytest_mlhpc.alert.observe import Question
    from pytest_mlhpc.history.events import Event
    from pytest_mlhpc.history.series import Source


@click.group(
    cls=NounGroup,
    help="Alerts: after a nightly run, one message for one cause.",
    example="mlhpc alert send --expect nightly",
)
def command() -> None:
    """Hold the verbs."""


#: Found in the folder of the call unless --config names another.
DEFAULT_CONFIG = "alerts.yaml"
REFUSED, LATER = 1, 75
#: The software of a night is compared with that of a night so long before, at most.
_COMPARED_NS = 14 * DAY_NS


@dataclass(frozen=True)
class _Night:
    """What one call of the command is about."""

    source: str
    state_dir: Path
    config: Config
    now_ns: int
    stale: bool
    dry_run: bool


@command.command(
    "send",
    cls=DataCommand,
    help="Send what is new, worse, over or missing after a nightly run; each of it once. Exit code 1: a channel refuses "
    "for good. 75: a channel or the history could not be reached; the same command later sends what waits.",
    example="mlhpc alert send --config alerts.yaml --expect nightly",
)
@options.source
@click.option(
    "--config",
    type=Path,
    metavar="FILE",
    help=f"Channels and rules.  [default: {DEFAULT_CONFIG} in this folder; without it, messages are only printed]",
)
@click.option(
    "--expect",
    type=NearestChoice(["nightly"]),
    help="A benchmark that was run every night and is not recorded for 26 h is an alert, too.",
)
@click.option("--at", default="", metavar="TIME", help="As if it were then, such as 2026-11-21T06:00.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent; keep and send nothing.")
def send(
    *, source: str, state_dir: Path, config: Path | None, expect: str | None, at: str, dry_run: bool
) -> CommandReport:
    """Do it."""
    night = _Night(source, state_dir, _config(config), _moment(at), expect == "nightly", dry_run)
    try:
        if dry_run:
            return _night(night)
        with locked(state_dir):
            report = _night(night)
    except BusyError as error:
        tell(str(error))
        return CommandReport("", {"messages": [], "open": None}, LATER)
    options.publish_events(state_dir)
    return report


@command.command(
    "drill",
    cls=DataCommand,
    help="Plant known faults into a copy of SUITES (default: suites/) and of this state, run a night of each on the real "
    "system, and show who would have been told what, when. Nothing is sent, no figure is recorded, the copy is removed. Exit "
    "code 1: a fault was not noticed. 75: a session was lost.",
    example="mlhpc alert drill suites/ --system cirrus --fault slow-steps=10% --nights 3",
)
@click.argument("suites", nargs=-1)
@click.option("--system", required=True, metavar="NAME[:PARTITION]", help="Where the suites run.")
@click.option(
    "--fault", "faults", multiple=True, metavar="FAULT",
    help="slow-steps=10%, slow-reading=10%, slow-rank=30%, lying-exit or missing-night; several.  [default: all five]",
)  # fmt: skip
@click.option(
    "--nights", type=click.IntRange(1, 60), default=3, metavar="N",
    help="The first night is measured, later ones are drawn from the history of each benchmark.  [default: 3]",
)  # fmt: skip
@click.option("--config", type=Path, metavar="FILE", help=f"[default: {DEFAULT_CONFIG} in this folder]")
@options.systems_file
@options.baselines_dir
@options.state_dir
def drill(
    *,
    suites: tuple[str, ...],
    system: str,
    faults: tuple[str, ...],
    nights: int,
    config: Path | None,
    systems_file: str | None,
    baselines_dir: Path,
    state_dir: Path,
) -> CommandReport:
    """Do it."""
    from pytest_mlhpc.cli import alert_drill

    chosen = alert_drill.parse_faults(faults)
    file = config or Path(DEFAULT_CONFIG)
    if config is None and not file.exists():
        tell(
            f"there is no {file} in this folder: `mlhpc alert send` would print messages and send them nowhere"
        )
    own = suites or (("suites",) if Path("suites").is_dir() else ())

    def tell_night(state: Path, channels: Config, now_ns: int) -> Sequence[Mapping[str, Any]]:
        messages: Sequence[Mapping[str, Any]] = _night(
            _Night("local", state, channels, now_ns, stale=True, dry_run=False)
        ).data["messages"]
        return messages

    request = alert_drill.DrillRequest(
        own,
        system,
        chosen,
        nights,
        file if config or file.exists() else None,
        systems_file,
        baselines_dir,
        state_dir,
    )
    return alert_drill.run_drill(request, tell_night)


def _night(night: _Night) -> CommandReport:
    config, state_dir, now_ns = night.config, night.state_dir, night.now_ns
    damage: list[str] = []
    before = book = read_book(state_dir, damage.append)
    for problem in damage:
        tell(problem)
    if damage and not night.dry_run:
        keep_damaged(state_dir)
    branch = config.branch or provenance_of(Path.cwd()).default_branch
    from pytest_mlhpc.alert.observe import Question, observe

    alarms = options.false_alarms()
    unread = False
    messages: tuple[AlertMessage, ...] = ()
    try:
        with chosen(night.source, state_dir) as source:
            question = Question(
                now_ns, branch, config.rules, alarms, night.stale, config.stale_ns,
                options.site_events(state_dir, source), cache_path(state_dir),
            )  # fmt: skip
            found = observe(source, book, question)
            software = _software(source, book, night, branch)
            book, changes = advance(book, found.observation, found.companions)
            messages = tuple(message_of(one.incident, one.state, now_ns, config.report) for one in changes)
            if config.takes_mornings and (page := _morning(source, book, night, question)):
                book, messages = replace(book, morning_ns=now_ns), (*messages, page)
        book = with_journal(before, replace(book, journal=(*book.journal, *software)), now_ns)
        if found.empty:
            tell("no history: nothing was recorded in the last nights")
    except StoreError as error:
        # What waits is sent all the same; what is new is found the next time.
        tell(f"{error}; nothing is told of this night before it can be read")
        unread = True
    code = 0
    if not night.dry_run:
        book = write_with_journal(state_dir, queued(book, messages, config.takers))
        code = _send(book, config, state_dir, now_ns)
    data = {"messages": [as_json(message) for message in messages], "open": len(book.incidents)}
    return CommandReport(_messages(messages, book), data, LATER if unread else code)


def _software(source: Source, book: Book, night: _Night, branch: str) -> tuple[JournalEntry, ...]:
    """Return with which commits and software nights began to run since the book was last advanced, that day included."""
    since_ns = book.last_ns or night.now_ns - NIGHT_NS
    nights = source.nights(since_ns - _COMPARED_NS, night.now_ns)
    return software_changes(nights, since_ns, branch)


def _morning(source: Source, book: Book, night: _Night, question: Question) -> AlertMessage | None:
    """Return the page of the night as a message; None where it was made before, or no nightly run is recorded."""
    from pytest_mlhpc.report.morning import message_of_morning
    from pytest_mlhpc.report.night import LEARNT_NS, SAME_NIGHT_NS, MorningQuery, night_morning

    if night.now_ns <= book.morning_ns + SAME_NIGHT_NS:
        return None
    asked = MorningQuery(
        night.now_ns,
        store_text(night.source, night.state_dir),
        branch=question.branch,
        events=question.events,
        report=night.config.report,
    )
    page = night_morning(source.nights(night.now_ns - LEARNT_NS), book, asked)
    return message_of_morning(page, night.now_ns) if page else None


def _send(book: Book, config: Config, state_dir: Path, now_ns: int) -> int:
    outcomes: list[Delivery] = []

    def record(delivery: Delivery) -> None:
        outcomes.append(delivery)
        if delivery.error:
            again = "; it is tried again next time" if delivery.retry else ""
            tell(f"{delivery.message.id}: {delivery.error}{again}")

    book = deliver(book, config.channels, lambda after: write_book(state_dir, after), record, now_ns)
    problems = repeat(config.channels, lambda name: _open(book, config, name, now_ns))
    for problem in problems:
        tell(f"{problem}; it is tried again next time")
    if any(one.error and not one.retry for one in outcomes):
        return REFUSED
    return LATER if problems or any(one.retry for one in outcomes) else 0


def _open(book: Book, config: Config, name: str, now_ns: int) -> Sequence[AlertMessage]:
    """Return what is open, as far as a channel receives it and has received it already."""
    route = config.routes[name]
    waiting = {pending.message.incident for pending in book.outbox if name in pending.waiting}
    return [
        message_of(one, one.state, now_ns, config.report)
        for one in book.incidents
        if one.announced and route.takes(one) and one.id not in waiting
    ]


def _messages(messages: Sequence[AlertMessage], book: Book) -> str:
    count = sum(incident.announced for incident in book.incidents)
    muted = len(book.incidents) - count
    new = f"{len(messages)} new message{'' if len(messages) == 1 else 's'}"
    last = f"{new}, {count} open{f', {muted} of muted systems' if muted else ''}\n"
    return "".join(f"{message.text}\n" for message in messages) + last


def _config(path: Path | None) -> Config:
    from pytest_mlhpc.alert.config import Config, load
    from pytest_mlhpc.builtin import channel_types

    if path is None:
        path = Path(DEFAULT_CONFIG)
        if not path.exists():
            return Config()
    return load(path, os.environ, channel_types())


def _moment(text: str) -> int:
    try:
        return nanoseconds(text) if text else time.time_ns()
    except (ValueError, OverflowError):
        raise UsageError(f"--at {text!r} is no date like 2026-11-21T06:00") from None


@command.command(
    "list",
    cls=DataCommand,
    help="List open alerts, known issues, muted systems, and maintenance that is not over.",
    example="mlhpc alert list",
)
@options.state_dir
def list_(state_dir: Path) -> CommandReport:
    """Return a row for each."""
    book = read_book(state_dir, tell)
    now_ns = time.time_ns()
    mutes = {name: mute for name, mute in sorted(book.mutes.items()) if mute.until_ns > now_ns}
    rows = [(name, minutes(mute.until_ns), mute.by, mute.reason) for name, mute in mutes.items()]
    muted = table([("muted system", "until", "by", "reason"), *rows]) if rows else ""
    issues = [one for one in book.issues if one.ack.until_ns > now_ns]
    windows = [one for one in options.site_events(state_dir) if one.until_ns > now_ns]
    data = {
        "alerts": [as_json(message_of(one, one.state, one.changed_ns)) for one in book.incidents],
        "muted": [
            {"system": name, "until": iso(mute.until_ns), "by": mute.by, "reason": mute.reason}
            for name, mute in mutes.items()
        ],
        "known_issues": [_issue_data(one) for one in issues],
        "maintenance": [to_json(one) for one in windows],
    }
    return CommandReport(_alerts(book) + _issues(issues) + muted + _maintenance(windows), data)


def _issues(issues: Sequence[KnownIssue]) -> str:
    rows = [
        (one.name, minutes(one.ack.until_ns), one.ack.by, one.ticket or "-", one.ack.reason) for one in issues
    ]
    return table([("known issue", "until", "by", "ticket", "reason"), *rows]) if rows else ""


def _issue_data(issue: KnownIssue) -> dict[str, object]:
    subjects = {(one.system, one.partition, one.benchmark or one.node) for one in issue.subjects}
    return {
        "alert": issue.name,
        "of": [":".join(one) for one in sorted(subjects)],
        "until": iso(issue.ack.until_ns),
        "by": issue.ack.by,
        "reason": issue.ack.reason,
        "ticket": issue.ticket,
    }


def _maintenance(windows: Sequence[Event]) -> str:
    """Return a row for each maintenance; partitions that share one stand together."""
    places: dict[tuple[str, str, str, str], list[str]] = {}
    for one in windows:
        when = minutes(one.at_ns), minutes(one.until_ns)
        places.setdefault((*when, one.system, one.text), []).append(one.partition)
    rows = [
        (":".join(filter(None, (system, ",".join(filter(None, names))))), since, until, text)
        for (since, until, system, text), names in places.items()
    ]
    return table([("maintenance", "from", "until", "reason"), *rows]) if rows else ""


def _alerts(book: Book) -> str:
    if not book.incidents:
        return "no alert is open\n"
    rows = [("alert", "since", "state", "owner", "ticket", "what")]
    for one in book.incidents:
        title = message_of(one, one.state, one.changed_ns).title.partition(": ")[2]
        owner = owners_text(one.owners) or "-"
        rows.append((one.id, minutes(one.started_ns), _state(one), owner, one.ticket or "-", title))
    return table(rows)


def _state(incident: Incident) -> str:
    if incident.ack:
        return f"acknowledged by {incident.ack.by} until {minutes(incident.ack.until_ns)}"
    return incident.state.value if incident.announced else "muted"


@command.command(
    "ack",
    cls=DataCommand,
    help="Acknowledge alert ID (or how it begins): nothing of it is sent until then. `mlhpc alert list` shows all.",
    example='mlhpc alert ack cirrus-3f2a --until 7d --reason "fan replaced on Tuesday"',
)
@click.argument("name", metavar="ID")
@click.option("--until", "end", default="", metavar="TIME", help="7d, 12h or 2026-12-24.")
@click.option("--reason", default="", metavar="TEXT", help="For those who read it later.")
@click.option("--ticket", default="", metavar="URL", help="Where people work on it: an address or a key.")
@click.option(
    "--known", is_flag=True, help="A known issue: what comes back of it until then is acknowledged, too."
)
@click.option("--off", is_flag=True, help="End it now.")
@options.state_dir
def ack(
    *, name: str, end: str, reason: str, ticket: str, known: bool, off: bool, state_dir: Path
) -> CommandReport:
    """Do it."""
    if off:
        if end or reason or ticket or known:
            raise UsageError("--off goes with no other option")
        done = books.end_acknowledgement(state_dir, name)
        options.publish_events(state_dir)
        return _changed(done, {"alert": done.subject if done else None, "until": None})
    if not end:
        raise UsageError("Missing option '--until', a time such as 7d; or say --off")
    reason = one_line(reason, MOST_REASON)
    if not reason:
        raise UsageError("Missing option '--reason': whoever reads it next month wants to know")
    until_ns = until(end, time.time_ns())
    done = acknowledge(state_dir, name, until_ns, reason, ticket=checked_ticket(ticket), known=known)
    options.publish_events(state_dir)
    return _changed(
        done,
        {
            "alert": done.subject if done else None,
            "until": iso(until_ns),
            "ticket": ticket or None,
            "known": known,
        },
    )


@command.command(
    "mute",
    cls=DataCommand,
    help="Send nothing new of SYSTEM until then. What was announced before and is over is sent all the same.",
    example="mlhpc alert mute cirrus --until 2d --reason maintenance",
)
@click.argument("system")
@click.option("--until", "end", default="", metavar="TIME", help="2d, 12h or 2026-12-24T08:00.")
@click.option("--reason", default="", metavar="TEXT", help="Such as maintenance.")
@click.option("--off", is_flag=True, help="End it now.")
@options.state_dir
def mute(system: str, end: str, reason: str, off: bool, state_dir: Path) -> CommandReport:
    """Do it."""
    if off == bool(end):
        raise UsageError("say either --until TIME or --off")
    if off:
        return _changed(books.unmute(state_dir, system), {"system": system, "until": None})
    until_ns = until(end, time.time_ns())
    done = books.mute(state_dir, system, until_ns, reason)
    return _changed(done, {"system": system, "until": iso(until_ns)})


def _changed(done: books.BookChange | None, data: Mapping[str, str | bool | None]) -> CommandReport:
    text = f"{done.text}\n" if done else ""
    return CommandReport(text, {**data, "done": done is not None}, 0 if done else LATER)
