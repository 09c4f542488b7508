"""The morning page: what a night, a session or a change needs of people, in at most 25 lines. Pure.

Terminal, mail, HTML and merge requests show these lines in this order. From the nights of a history it is made in night.py.
"""

from __future__ import annotations

import html
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pytest_mlhpc.alert.channels.base import AlertMessage, IncidentState, Kind
from pytest_mlhpc.alert.messages import anchor, is_address, owners_text, short
from pytest_mlhpc.alert.model import owner_names
from pytest_mlhpc.jobs.budget import hours_text
from pytest_mlhpc.store.record import FINE, INFRASTRUCTURE, WORSE, Record, SeriesKey, unfit_of
from pytest_mlhpc.store.text import count as counted
from pytest_mlhpc.store.text import iso, minutes, one_line

#: Lines of a page, and the incidents among them that are shown whole.
MOST_LINES, MOST_URGENT = 25, 5
#: Names in a line that counts.
MOST_NAMES = 3
#: Longest line where no terminal says how wide it is, and the shortest text beside a command.
WIDTH, LEAST_TEXT = 240, 24


@dataclass(frozen=True)
class NodeOut:
    """A node that vetting left out, or excluded from jobs."""

    system: str
    partition: str
    node: str
    reason: str


#: What a link within the HTML page leads to: a benchmark, all of a system (its other fields are empty), or a node.
Place = SeriesKey | NodeOut
#: What a link leads to: a place on the page, or an address.
Target = Place | str


@dataclass(frozen=True)
class MorningItem:
    """An incident, or tests with one cause: what happened, why as far as is known, and what to type next.

    ``name`` is the part of ``what`` that names the ``series``. ``tests`` are node ids, or benchmarks of an incident.
    ``owners`` are one text for each test, empty where it has none.
    """

    what: str
    why: str = ""
    command: str = ""
    verdict: str = ""
    system: str = ""
    partition: str = ""
    environment: str = ""
    tests: tuple[str, ...] = ()
    alert: str = ""
    name: str = ""
    series: tuple[SeriesKey, ...] = ()
    owners: tuple[str, ...] = ()
    ticket: str = ""

    def data(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "what": self.what,
            "reason": self.why,
            "command": self.command,
            "verdict": self.verdict,
            "tests": list(self.tests),
            "system": self.system,
            "partition": self.partition,
            "environment": self.environment,
            "alert": self.alert,
            "owners": list(owner_names(self.owners)),
            "ticket": self.ticket,
        }

    def links(self) -> tuple[tuple[str, Target], ...]:
        """Return the name with its target: the benchmark, or the system of several."""
        systems = {one.system for one in self.series}
        if len(self.series) == 1:
            return ((self.name, self.series[0]),)
        return ((self.name, system_target(*systems)),) if len(systems) == 1 else ()


def system_target(system: str) -> SeriesKey:
    """Return what stands for all benchmarks of a system."""
    return SeriesKey(system, "", "", "", "", "")


@dataclass(frozen=True)
class OpenAlert:
    """An alert that has not ended, or ended tonight; ``since_ns`` UTC, ``by`` who acknowledged it until ``until_ns``, or empty.

    ``owners`` are as in :class:`MorningItem`.
    """

    id: str
    since_ns: int
    what: str
    by: str = ""
    owners: tuple[str, ...] = ()
    until_ns: int = 0
    ticket: str = ""

    def data(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "alert": self.id,
            "since": iso(self.since_ns),
            "what": self.what,
            "acknowledged_by": self.by,
            "acknowledged_until": iso(self.until_ns) if self.by else None,
            "owners": list(owner_names(self.owners)),
            "ticket": self.ticket,
        }


@dataclass(frozen=True)
class MorningLine:
    """One line of the page; ``links`` are parts of its text, in their order, with what they lead to."""

    style: Literal["head", "note", "what", "why", "next", "more", "count", "report"]
    text: str
    links: tuple[tuple[str, Target], ...] = ()
    command: str = ""  #: behind the text, where there is room for it; always at the end of ``next``


@dataclass(frozen=True)
class Morning:
    """One night on all systems, one session, or what a change measured on one system.

    ``head`` is the first line. ``at_ns`` is UTC. ``counts`` are of tests by verdict. ``more`` and ``alerts`` are the
    commands that list what has no room. ``report`` is the address of the HTML page.
    """

    kind: str  #: session, night or change
    head: str
    notes: tuple[str, ...] = ()
    at_ns: int = 0
    systems: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    node_hours: float = 0.0
    measured: int = 0
    expected: int = 0
    act_now: tuple[MorningItem, ...] = ()
    did_not_run: tuple[MorningItem, ...] = ()
    nodes_out: tuple[NodeOut, ...] = ()
    watching: tuple[MorningItem, ...] = ()
    still_open: tuple[OpenAlert, ...] = ()
    recovered: tuple[OpenAlert, ...] = ()
    improved: tuple[MorningItem, ...] = ()
    waiting: tuple[MorningItem, ...] = ()
    more: str = ""
    alerts: str = "mlhpc alert list"
    accept_improved: str = ""
    accept_new: str = ""
    report: str = ""

    def page(self, width: int = WIDTH) -> list[MorningLine]:
        """Return at most 25 lines. Text is cut to *width*; a command is never cut, as it is there to be copied."""
        lines = [MorningLine("head", self.head)]
        lines += [MorningLine("note", "; ".join(self.notes))] if self.notes else []
        end = self._counts()
        lines += self._urgent(MOST_LINES - len(lines) - len(end) - bool(self.did_not_run))
        lines += self._causes(MOST_LINES - len(lines) - len(end)) + end
        return [_cut(line, width) for line in lines]

    def lines(self, width: int = WIDTH) -> list[str]:
        """Return the texts of the page."""
        return [line.text for line in self.page(width)]

    def data(self) -> dict[str, Any]:
        """Return it for programs, in the order of the lines."""
        sections = (
            "act_now",
            "did_not_run",
            "nodes_out",
            "watching",
            "still_open",
            "recovered",
            "improved",
            "waiting",
        )
        found = {
            name: [vars(one) if isinstance(one, NodeOut) else one.data() for one in getattr(self, name)]
            for name in sections
        }
        return {
            "kind": self.kind,
            "at": iso(self.at_ns) if self.at_ns else None,
            "systems": list(self.systems),
            "sessions": list(self.sessions),
            "counts": dict(self.counts),
            "node_hours": self.node_hours,
            "measured": self.measured,
            "expected": self.expected,
            "notes": list(self.notes),
            **found,
            "report": self.report,
        }

    def _urgent(self, room: int) -> list[MorningLine]:
        """Return the incidents of which as many as fit are shown whole, five at most, and one line for the others."""
        lines: list[MorningLine] = []
        shown = 0
        for item in self.act_now[:MOST_URGENT]:
            found, others = _lines_of(item), len(self.act_now) - shown > 1
            if len(lines) + len(found) + others > room:
                break
            lines += found
            shown += 1
        if rest := self.act_now[shown:]:
            more = self.alerts if any(one.alert for one in rest) else self.more
            lines.append(MorningLine("more", f"and {len(rest)} more: {more}"))
        return lines

    def _causes(self, room: int) -> list[MorningLine]:
        """Return what did not run, as many causes as fit, and one line for those that do not."""
        lines: list[MorningLine] = []
        for number, item in enumerate(self.did_not_run):
            found, rest = _lines_of(item), len(self.did_not_run) - number
            if len(lines) + len(found) + (rest > 1) > room:
                text = f"and {rest} more" if lines else f"did not run or broke: {counted(rest, 'cause')}"
                return [*lines, MorningLine("more", f"{text}: {self.more}")]
            lines += found
        return lines

    def _counts(self) -> list[MorningLine]:
        """Return the lines that count: nodes out, watching, still open, recovered, improved, waiting; and the link."""
        nodes = [
            (f"{one.node} of {one.system} ({one_line(one.reason, 60)})", one.node, one)
            for one in self.nodes_out
        ]
        ended = [(one.what, "", None) for one in self.recovered]
        lines = [
            _count("nodes out", "", nodes, "mlhpc vet history"),
            _count("watching", counted(len(self.watching), "test"), _named(self.watching)),
            self._open(),
            _count("recovered", "", ended),
            _count("improved", counted(len(self.improved), "test"), _named(self.improved), self.accept_improved),
            _count("waiting to be accepted", counted(len(self.waiting), "test"), _named(self.waiting), self.accept_new),
            MorningLine("report", f"report: {self.report}") if self.report else None,
        ]  # fmt: skip
        return [line for line in lines if line is not None]

    def _open(self) -> MorningLine | None:
        if not self.still_open:
            return None
        oldest = min(self.still_open, key=lambda one: (one.since_ns, one.id))
        until = minutes(oldest.until_ns)[:10]
        known = f"acknowledged by {oldest.by} until {until}" if oldest.by else "not acknowledged"
        if owner := owners_text(oldest.owners):
            known = f"owned by {owner}, {known}"
        known += f", ticket {oldest.ticket}" if oldest.ticket else ""
        number = len(self.still_open)
        first = f": {counted(number, 'alert')}, the oldest {known}" if number > 1 else f", {known}"
        links = _ticket_links(oldest.ticket)
        return MorningLine("count", f"still open{first}: {oldest.what}", links, command=self.alerts)


def _lines_of(item: MorningItem) -> list[MorningLine]:
    lines = [MorningLine("what", item.what, item.links())]
    lines += [MorningLine("why", item.why)] if item.why else []
    known = f"owner {owners_text(item.owners)}; " if any(item.owners) else ""
    known += f"ticket {item.ticket}; " if item.ticket else ""
    if item.command:
        text = f"{known}next: {item.command}"
        lines.append(MorningLine("next", text, _ticket_links(item.ticket), command=item.command))
    return lines


def _ticket_links(ticket: str) -> tuple[tuple[str, Target], ...]:
    return ((ticket, ticket),) if is_address(ticket) else ()


def _named(items: Sequence[MorningItem]) -> list[tuple[str, str, Target | None]]:
    """Return the texts of tests in a line that counts, each with its reason, where one is known."""
    reasons = [f" ({one_line(one.why, 80)})" if one.why else "" for one in items]
    targets = [one.series[0] if one.series else None for one in items]
    return [
        (one.name + reason, one.name, target)
        for one, reason, target in zip(items, reasons, targets, strict=True)
    ]


def _count(
    title: str, number: str, named: Sequence[tuple[str, str, Target | None]], command: str = ""
) -> MorningLine | None:
    """Return ``TITLE: NUMBER: the first three and N more``; None where there are none."""
    if not named:
        return None
    rest = len(named) - MOST_NAMES
    names = ", ".join(text for text, _, _ in named[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    links = tuple((link, target) for _, link, target in named[:MOST_NAMES] if target is not None)
    return MorningLine("count", ": ".join(filter(None, (title, number, names))), links, command)


def _cut(line: MorningLine, width: int) -> MorningLine:
    """Return the line safe to print: text as long as *width* allows, commands and addresses whole."""
    if line.style in {"next", "more", "report"}:
        indent = "  " * (line.style == "next")
        return replace(line, text=indent + one_line(line.text, None))
    if line.command and (room := width - len(line.command) - 2) >= min(LEAST_TEXT, len(line.text)):
        return replace(line, text=f"{one_line(line.text, room)}: {one_line(line.command, None)}")
    indent = "  " * (line.style == "why")
    return replace(line, text=indent + one_line(line.text, width - len(indent)))


def as_html(lines: Sequence[MorningLine], address: Callable[[Place], str] = lambda _target: "") -> str:
    """Return the lines as HTML, escaped; *address* gives what a link leads to, empty for nothing."""
    return "\n".join(f'<p class="{line.style}">{_html_of_line(line, address)}</p>' for line in lines)


def _html_of_line(line: MorningLine, address: Callable[[Place], str]) -> str:
    text = line.text.strip()
    if line.style == "next":
        command = one_line(line.command, None)
        before = _with_links(text.removesuffix(command), line.links, address)
        return f"{before}<code>{html.escape(command)}</code>"
    if line.style == "report":
        url = text.removeprefix("report: ")
        return "report: " + anchor(url, url if is_address(url) else "")
    return _with_links(text, line.links, address)


def _with_links(text: str, links: Sequence[tuple[str, Target]], address: Callable[[Place], str]) -> str:
    found, at = "", 0
    for part, target in links:
        place = text.find(part, at) if part else -1
        if place >= 0:
            href = target if isinstance(target, str) else address(target)
            found += html.escape(text[at:place]) + anchor(part, href)
            at = place + len(part)
    return found + html.escape(text[at:])


def message_of_morning(morning: Morning, now_ns: int) -> AlertMessage:
    """Return the page as a message for channels. A night has one key, by which a second copy is known."""
    lines = morning.page()
    day = iso(now_ns)[:10]
    owners = [owner for item in morning.act_now for owner in item.owners]
    owners += [owner for alert in morning.still_open for owner in alert.owners]
    urgent = f"; act now: {len(morning.act_now)}" if morning.act_now else ""
    return AlertMessage(
        id=f"morning-{day}",
        incident=f"morning-{day}",
        kind=Kind.MORNING,
        state=IncidentState.NEW,
        title=one_line(f"{morning.head.partition(',')[0]}{urgent}", 160),
        text="".join(f"{line.text}\n" for line in lines),
        html=as_html(lines),
        labels={"kind": Kind.MORNING.value, "system": ",".join(morning.systems)},
        started_ns=now_ns,
        created_ns=now_ns,
        owners=owner_names(owners),
    )


def session_morning(
    records: Sequence[Record], options: Sequence[str] = (), roots: Mapping[str, str] | None = None
) -> Morning:
    """Return the page of the first attempts of one session, in the order in which they were recorded.

    *options* end each command. *roots* has pytest's root directory of tests that are called in another folder, by node id:
    their commands go there.
    """
    if not records:
        return Morning("session", "the session recorded no first attempt")
    last = records[-1]
    systems = tuple(sorted({one.system for one in records}))
    counts = Counter(one.verdict for one in records)
    hours = sum(one.node_hours for one in records)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    cost = f"; {hours_text(hours)}" if hours else ""
    items: dict[str, list[MorningItem]] = {}
    for one in sorted(records, key=lambda one: _urgency(one.verdict)):
        items.setdefault(_section(one.verdict), []).append(_record_item(one, options, roots or {}))
    names = {name: [one.tests[0] for one in some] for name, some in items.items()}
    return Morning(
        "session",
        head=f"{minutes(last.created_ns)}, {', '.join(systems)}, session {last.session}: {verdicts}{cost}",
        at_ns=last.created_ns,
        systems=systems,
        sessions=(last.session,),
        counts=counts,
        node_hours=hours,
        measured=sum(one.measurement is not None for one in records),
        expected=len(records),
        act_now=tuple(items.get("act_now", ())),
        did_not_run=tuple(items.get("did_not_run", ())),
        nodes_out=_nodes_out(records),
        watching=tuple(items.get("watching", ())),
        improved=tuple(items.get("improved", ())),
        waiting=tuple(items.get("waiting", ())),
        more=shlex.join(["mlhpc", "records", "list", "--session", last.session, "--limit", "1000", *options]),
        alerts=shlex.join(["mlhpc", "alert", "list", *options]),
        accept_improved=accept_command(names.get("improved", ()), (last.session,), options),
        accept_new=accept_command(names.get("waiting", ()), (last.session,), options),
    )


def change_morning(records: Sequence[Record]) -> Morning:
    """Return the page of what was measured of one commit on one system; *records* are first attempts, one at least."""
    page = session_morning(records)
    hours = f", {hours_text(page.node_hours)}" if page.node_hours else ""
    of = f"commit {records[0].commit[:12] or 'unknown'} on {records[0].system}"
    return replace(page, kind="change", head=f"{of}: {page.measured} of {page.expected} measured{hours}")


def accept_command(tests: Sequence[str], sessions: Sequence[str], options: Sequence[str]) -> str:
    """Return the command that accepts a few tests by their names, or all that is new in a few sessions; empty for more."""
    what = tests if len(tests) <= MOST_NAMES else sessions
    if not tests or not 0 < len(what) <= MOST_NAMES:
        return ""
    return shlex.join(["mlhpc", "baseline", "accept", *what, "--reason", "TEXT", *options])


def _record_item(record: Record, options: Sequence[str], roots: Mapping[str, str]) -> MorningItem:
    node_id = one_line(record.node_id, 10_000)
    command = _again(record, options)
    if root := roots.get(record.node_id):
        command = f"(cd {shlex.quote(root)} && {command})"
    reason = record.failure.removeprefix(f"{record.verdict}: ")
    return MorningItem(
        what=f"{record.verdict}: {node_id}",
        why=one_line(record.explanation[0] if record.explanation else reason, 400),
        command=command,
        verdict=record.verdict,
        system=record.system,
        partition=record.partition,
        environment=record.environment,
        tests=(record.node_id,),
        name=short(node_id),
        series=(record.series(),),
        owners=(record.owner,),
    )


def _again(record: Record, options: Sequence[str]) -> str:
    """Return what runs the test again; records of other tools, whose names have another form, are only shown."""
    node_id = one_line(record.node_id, 10_000)
    if "::" not in node_id:
        return shlex.join(["mlhpc", "history", node_id, "--system", record.system, *options])
    command = ["pytest", node_id, "--system", f"{record.system}:{record.partition}", *record.options]
    command += [option.replace("--state-dir=", "--mlhpc-state=", 1) for option in options]
    return one_line(shlex.join(command), 10_000)


def _urgency(verdict: str) -> int:
    if verdict in WORSE:
        return WORSE.index(verdict)
    return 3 if verdict in INFRASTRUCTURE else 2


def _section(verdict: str) -> str:
    if verdict in INFRASTRUCTURE:
        return "did_not_run"
    found = {
        "suspect": "watching",
        "inconclusive": "watching",
        "improved": "improved",
        "wrong_baseline": "waiting",
        "no_baseline": "waiting",
        "new": "waiting",
    }
    return found.get(verdict, "fine" if verdict in FINE else "act_now")


def _nodes_out(records: Iterable[Record]) -> tuple[NodeOut, ...]:
    """Return the nodes that vetting excluded from any of *records*, each once, with the last reason."""
    found: dict[tuple[str, str], NodeOut] = {}
    for record in records:
        for node, reason in unfit_of(record).items():
            found[record.system, node] = NodeOut(record.system, record.partition, node, reason)
    return tuple(one for _, one in sorted(found.items()))
