"""An incident as text: a title that tells the cause, one line for each benchmark or node, and what to type next. Pure."""

from __future__ import annotations

import html
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_mlhpc.alert.channels.base import Affected, AlertMessage, IncidentState, Kind
from pytest_mlhpc.alert.incidents import CHANCE, benchmarks, place
from pytest_mlhpc.alert.model import Ack, Bad, Book, Incident, Member, owner_names
from pytest_mlhpc.alert.observe import NOT_RUN
from pytest_mlhpc.history.events import MOST_TESTS, JournalEntry
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.store.text import count, from_to, minutes, one_line, quantity

#: Lines of a message, at most; the report has all of them.
MOST = 40
#: Longest title: mail programs and chats show less.
TITLE = 160
#: Longest name of a benchmark in a title.
NAME = 60
#: Owners that are named with a count, and the longest name of one.
MOST_OWNERS, OWNER = 3, 80
#: Text of a state at the head of a title.
HEADS = {
    IncidentState.NEW: "new",
    IncidentState.WORSE: "worse",
    IncidentState.CONTINUING: "still",
    IncidentState.ACKNOWLEDGED: "acknowledged",
    IncidentState.RESOLVED: "resolved",
}
#: A commit's whole name; its first letters are enough to find it.
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b")
#: How the line that names a ticket begins.
_TICKET = "Ticket: "
_WHAT = {"io": "input and output", "communication": "communication"}


def message_of(incident: Incident, state: IncidentState, now_ns: int, report: str = "") -> AlertMessage:
    """Return the message that says that *incident* is in *state* now. *report* is the address of a page to look at."""
    title = one_line(f"{HEADS[state]}: {headline(incident, state)}", TITLE)
    facts = _facts(incident, state)
    shown = _shown(incident, state)
    lines = [_line(incident, members) for members in shown[:MOST]]
    if len(shown) > MOST:
        lines.append(f"and {len(shown) - MOST} more")
    commands = _commands(incident, state)
    parts = [title, "\n".join(facts), "\n".join(f"  {line}" for line in lines)]
    if commands:
        parts.append("\n".join(["next:", *(f"  {command}" for command in commands)]))
    if report:
        parts.append(f"report: {report}")
    return AlertMessage(
        id=incident.message_id or f"{incident.id}-0-{state.value}",
        incident=incident.id,
        kind=incident.kind,
        state=state,
        title=title,
        text=clean("\n\n".join(parts)) + "\n",
        html=_html(title, facts, lines, commands, report),
        labels=incident.labels,
        started_ns=incident.started_ns,
        created_ns=incident.changed_ns or now_ns,
        ended_ns=max(now_ns, incident.started_ns + 1) if state is IncidentState.RESOLVED else None,
        problems=tuple(_affected(member, incident) for member in incident.members),
        owners=owner_names(incident.owners),
        ticket=incident.ticket,
    )


def headline(incident: Incident, state: IncidentState) -> str:
    """Return what happened, where, how much and since when, without the state."""
    where = ", ".join(incident.systems)
    who = benchmarks_text(incident)
    bads = [_bad(member, state) for member in incident.members]
    if incident.kind is Kind.STALE:
        not_run = [bad.reason for bad in bads if bad.reason.startswith(NOT_RUN)]
        if len(not_run) == len(bads):
            return f"{where}: {who} {not_run[0]}"
        return f"{where}: {who} not recorded, though expected every night"
    if incident.kind is Kind.FAILURE:
        return f"{where}: {who} failed: {bads[0].reason}"
    if incident.kind is Kind.NODES:
        nodes = sorted(bad.subject.node for bad in bads)
        return f"{where}: {count(len(nodes), 'node')} unfit: {_some(nodes)}"
    losses: dict[str, float] = {}
    for bad in bads:
        losses[place(bad)] = max(losses.get(place(bad), 0.0), bad.worse_by)
    loss = _percent(statistics.median(losses.values()))
    what = f"{_WHAT[incident.scope]} of {who}" if incident.scope in _WHAT else who
    node = f", on node {_node(bads)}" if _node(bads) and incident.scope != "code" else ""
    code = ", on each of them" if incident.scope == "code" else ""
    code += ": suspect the code" if suspects_code(incident) else ""
    return f"{where}: {what} {loss} slower since {minutes(_night(incident))[:10]}{node}{code}"


def with_journal(before: Book, after: Book, now_ns: int) -> Book:
    """Return *after* with an entry of the journal for each alert that was opened, closed, acknowledged or no longer so."""
    earlier = {one.id: one for one in before.incidents}
    later = {one.id: one for one in after.incidents}
    entries: list[JournalEntry] = []
    for name, incident in later.items():
        old = earlier.get(name)
        if old is None:
            entries += _entries(incident, "alert_opened", incident.created_ns)
        ack = incident.ack
        if ack is not None and ack != (old.ack if old else None):
            ended = ack.until_ns == 0
            kind = "alert_unacknowledged" if ended else "alert_acknowledged"
            # What comes back of a known issue was acknowledged before it was an alert.
            since_ns = now_ns if ended else max(ack.at_ns, incident.created_ns)
            entries += _entries(incident, kind, since_ns, ack)
    for name in earlier.keys() - later.keys():
        entries += _entries(earlier[name], "alert_closed", after.closed.get(name, now_ns))
    entries.sort(key=lambda entry: (entry.at_ns, entry.id, entry.kind, entry.system))
    return replace(after, journal=(*after.journal, *entries))


def _entries(incident: Incident, kind: str, at_ns: int, ack: Ack | None = None) -> list[JournalEntry]:
    """Return an entry for each system of an incident."""
    state = IncidentState.RESOLVED if kind == "alert_closed" else incident.state
    reason = f": {ack.reason}" if ack and ack.until_ns else ""
    one = JournalEntry(
        id=incident.id,
        kind=kind,
        system="",
        text=one_line(f"{headline(incident, state)}{reason}", 2 * TITLE),
        at_ns=at_ns,
        partition=incident.labels.get("partition", ""),
        by=ack.by if ack and ack.until_ns else "",
        until_ns=ack.until_ns if ack else 0,
        owner=", ".join(owner_names(incident.owners)),
        benchmarks=benchmarks(member.announced for member in incident.members)[:MOST_TESTS],
    )
    return [replace(one, system=system) for system in incident.systems]


def suspects_code(incident: Incident) -> bool:
    """Return whether two systems became slower at one commit, while other benchmarks of them did not."""
    members = [member.now for member in incident.members]
    systems: dict[str, set[str]] = {}
    for bad in members:
        for cause in bad.causes:
            systems.setdefault(cause, set()).add(bad.subject.system)
    shared = any(cause.startswith("commit ") and len(where) > 1 for cause, where in systems.items())
    return incident.scope == "code" and shared and incident.measured > len(benchmarks(members))


def affected_text(incident: Incident) -> str:
    """Return what an incident is about, without what happened to it: ``cirrus: all 5 benchmarks``."""
    nodes = sorted(member.now.subject.node for member in incident.members)
    what = f"node {_some(nodes)}" if incident.kind is Kind.NODES else benchmarks_text(incident)
    return f"{', '.join(incident.systems)}: {what}"


def benchmarks_text(incident: Incident) -> str:
    """Return which benchmarks: the name of one, ``all 5 benchmarks``, or ``3 of 5 benchmarks``."""
    names = incident.named or benchmarks(member.now for member in incident.members)
    if len(names) == 1:
        return short(names[0].split(":", 2)[2])
    if incident.scope == "code":
        names = tuple({name.split(":", 2)[2] for name in names})
        return short(names[0]) if len(names) == 1 else f"{len(names)} benchmarks"
    if incident.measured and len(names) >= incident.measured:
        return f"all {len(names)} benchmarks"
    of = f" of {incident.measured}" if incident.measured else ""
    return f"{len(names)}{of} benchmarks"


def short(benchmark: str) -> str:
    """Return a benchmark's test without its file: enough for a title."""
    test, bracket, parameters = benchmark.partition("[")
    return one_line(test.rpartition("::")[2] + bracket + parameters, NAME)


def owners_text(owners: Iterable[str]) -> str:
    """Return the one owner, or of several ``ada (3), grace (2), joan (1) and 2 more``; empty where none is known."""
    counts = sorted(Counter(filter(None, owners)).items(), key=lambda one: (-one[1], one[0]))
    if len(counts) == 1:
        return one_line(counts[0][0], OWNER)
    named = [f"{one_line(name, OWNER)} ({number})" for name, number in counts]
    return _some(named, MOST_OWNERS)


def _facts(incident: Incident, state: IncidentState) -> list[str]:
    """Return what is known of the whole: since when, who owns it, what changed then, who knows of it."""
    facts = [f"Since {_since(incident)}; alert {incident.id}."]
    if owner := owners_text(incident.owners):
        facts.append(f"Owner: {owner}")
    if state is IncidentState.WORSE and incident.fresh:
        facts.append(f"New in it: {_some([short(name.split(':', 2)[2]) for name in incident.fresh])}.")
    if state is IncidentState.RESOLVED:
        reasons = sorted({member.reason for member in incident.members if member.reason})
        facts.append(f"Over: {'; '.join(reasons)}." if reasons else _over(incident.kind))
    if incident.ack:
        until = minutes(incident.ack.until_ns)
        facts.append(one_line(f"Acknowledged by {incident.ack.by} until {until}: {incident.ack.reason}", 400))
    if incident.ticket:
        facts.append(f"{_TICKET}{incident.ticket}")
    if incident.kind is Kind.REGRESSION:
        cause = cause_text(incident)
        facts.append(f"{cause[0].upper()}{cause[1:]}.")
        facts += [text] if (text := chance_text(incident)) else []
    return facts


def chance_text(incident: Incident) -> str:
    """Return how likely what is announced together has no common cause; an empty text for one benchmark."""
    if incident.chance is None:
        return ""
    if incident.chance < 0.001:
        often = "less than 1 in 1,000 times"
    else:
        often = f"in 1 of {round(1 / incident.chance):,} cases"
    what = "On several systems" if incident.scope == "code" else "So many"
    cause = "suspect one cause" if incident.chance < CHANCE else "each may have its own cause"
    return f"{what} in one night is chance {often}: {cause}."


def _over(kind: Kind) -> str:
    return {
        Kind.REGRESSION: "Over: the figures are back.",
        Kind.STALE: "Over: it is recorded again.",
        Kind.FAILURE: "Over: it runs again.",
        Kind.NODES: "Over: runs used these nodes again.",
    }[kind]


def _since(incident: Incident) -> str:
    last = minutes(_night(incident))
    good_ns = statistics.median_low(member.announced.first_ns for member in incident.members)
    if incident.kind is not Kind.REGRESSION or not good_ns:
        return last
    return f"the night of {last} (good at {minutes(good_ns)})"


def _night(incident: Incident) -> int:
    """Return when it began as most members say: noise dates some a night early or late."""
    return statistics.median_low(member.announced.last_ns for member in incident.members)


def cause_text(incident: Incident) -> str:
    """Return what else changed when an incident began: what all members have in common comes first."""
    every = [member.now.causes for member in incident.members]
    found = list(dict.fromkeys(cause for causes in every for cause in causes))
    found.sort(key=lambda cause: -sum(cause in causes for causes in every))
    if found:
        return "changed then: " + one_line(_COMMIT.sub(r"\1", "; ".join(found[:6])), 600)
    nothing = "nothing that is recorded changed then"
    # A cause that several systems share is none of a single system.
    return nothing if incident.scope == "code" else f"{nothing}: suspect the system, not the code"


def _shown(incident: Incident, state: IncidentState) -> list[list[Member]]:
    """Return the members to list, those of one benchmark together: open ones unless all is over, new ones first, then the worst."""
    members = [member for member in incident.members if member.open or state is IncidentState.RESOLVED]
    members.sort(
        key=lambda member: (
            place(member.now) not in incident.fresh,
            -_bad(member, state).worse_by,
            member.now.subject,
        )
    )
    lines: dict[str, list[Member]] = {}
    for member in members:
        lines.setdefault(f"{place(member.now)}:{member.now.subject.node}", []).append(member)
    return list(lines.values())


def _bad(member: Member, state: IncidentState) -> Bad:
    return member.announced if state is IncidentState.RESOLVED else member.now


def _line(incident: Incident, members: Sequence[Member]) -> str:
    bad, subject = members[0].now, members[0].now.subject
    where = f"{subject.system}:{subject.partition}"
    if incident.kind is Kind.NODES:
        return one_line(f"{where} {subject.node}: {bad.reason}", 400)
    name = one_line(f"{where} {subject.benchmark}", 250)
    if incident.kind is not Kind.REGRESSION:
        return one_line(f"{name}: {bad.reason}", 500)
    reason = f" ({bad.reason})" if bad.reason else ""
    return f"{name}: {'; '.join(map(_loss, members))}{reason}"


def _loss(member: Member) -> str:
    """Return by how much a metric is or was worse."""
    bad = max(member.now, member.announced, key=lambda bad: bad.worse_by)
    before, after = member.announced.before, bad.after
    levels = f"? -> {quantity(after, bad.unit)}"
    if before is not None and after is not None:
        levels = from_to(before, after, bad.unit)
    return f"{bad.subject.metric} {levels}, {_percent(bad.worse_by)} worse"


def evidence_text(incident: Incident) -> str:
    """Return the figures of the member that lost most, and whether re-runs confirm them."""
    worst = max((one for one in incident.members if one.open), key=lambda one: one.now.worse_by)
    return _loss(worst) + (f", {worst.now.reason}" if worst.now.reason else "")


def _affected(member: Member, incident: Incident) -> Affected:
    bad, subject = member.now, member.now.subject
    return Affected(
        system=subject.system,
        partition=subject.partition,
        environment=subject.environment,
        benchmark=subject.benchmark,
        metric=subject.metric,
        unit=bad.unit,
        before=bad.before,
        after=bad.after,
        worse_by=bad.worse_by,
        since_ns=bad.last_ns,
        node=subject.node or _node([bad]),
        reason=member.reason or bad.reason,
        state=IncidentState.RESOLVED if not member.open else incident.state,
        hint="; ".join(bad.causes[:3]),
        owner=bad.owner,
    )


def _commands(incident: Incident, state: IncidentState) -> list[str]:
    if state is IncidentState.RESOLVED:
        return []
    first = next(member.now.subject for member in incident.members if member.open)
    commands = []
    if incident.kind is Kind.REGRESSION:
        commands.append(one_line(shlex.join(["mlhpc", "history", first.benchmark]), 1000))
    elif first.benchmark:
        commands.append("mlhpc status")
    if incident.kind is Kind.NODES:
        commands.append(f"mlhpc vet history --system {shlex.quote(incident.systems[0])}")
    commands.append(f"mlhpc alert ack {incident.id} --until 7d --reason TEXT")
    return commands


def _html(
    title: str, facts: Sequence[str], lines: Sequence[str], commands: Sequence[str], report: str
) -> str:
    """Return a fragment; everything in it is escaped."""
    parts = [f"<h3>{html.escape(title)}</h3>"]
    parts += [f"<p>{_html_of_fact(clean(fact))}</p>" for fact in facts]
    parts.append("<ul>" + "".join(f"<li>{html.escape(clean(line))}</li>" for line in lines) + "</ul>")
    if commands:
        parts.append(f"<pre>{html.escape(chr(10).join(commands))}</pre>")
    if is_address(report):
        parts.append(f"<p>{anchor('report', report)}</p>")
    return "\n".join(parts)


def _html_of_fact(fact: str) -> str:
    ticket = fact.removeprefix(_TICKET)
    if ticket == fact or not is_address(ticket):
        return html.escape(fact)
    return _TICKET + anchor(ticket, ticket)


def is_address(text: str) -> bool:
    """Return whether *text* may be the target of a link."""
    return text.startswith(("https://", "http://"))


def anchor(text: str, href: str) -> str:
    """Return *text* as a link to *href*, escaped; without an address only the text."""
    shown = html.escape(text)
    return f'<a href="{html.escape(href, quote=True)}">{shown}</a>' if href else shown


def _node(bads: Sequence[Bad]) -> str:
    """Return the one node on which all of them always ran since then, if there is only one."""
    common = set.intersection(*(set(bad.nodes) for bad in bads)) if bads else set()
    return next(iter(common)) if len(common) == 1 and all(bad.nodes for bad in bads) else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
