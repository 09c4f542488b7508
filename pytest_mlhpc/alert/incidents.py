"""Incidents: what has one cause is one, and how last night's book becomes tonight's. Pure."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pytest_mlhpc.alert.channels.base import IncidentState, Kind
from pytest_mlhpc.alert.model import (
    DAY_NS,
    NIGHT_NS,
    Bad,
    Book,
    Incident,
    KnownIssue,
    Member,
    Observation,
    Subject,
)

#: Change points of one cause are found up to so far apart: the night before or after. Nights begin at other hours, too.
TOLERANCE_NS = DAY_NS * 3 // 2
#: What is found later is of the same cause if it began in the same night or the next one: whoever falls two nights later has
#: another cause, and is announced. Half a day, as nights begin at other hours.
LATE_NS = DAY_NS // 2
#: Nights in which a loss of one cause may be dated: the tolerance to both sides.
NIGHTS = 2 * TOLERANCE_NS / DAY_NS
#: What falls into one night by chance less often than this has a common cause: so often at most is such a claim wrong.
CHANCE = 0.02
#: From this share of a system's benchmarks on, and from three of them on, it is the system.
MOST, FEWEST = 0.6, 3
#: Metrics that say that reading or writing is slower, or sending.
IO_METRICS = frozenset({
    "io_time", "read_time", "wait_time", "copy_time", "exposed_copy_time", "compute_fraction", "write_bandwidth",
    "read_bandwidth", "create_rate", "small_read_rate",
})  # fmt: skip
COMMUNICATION_METRICS = frozenset({"latency", "bus_bandwidth", "exposed_communication_time"})
#: A loss of the whole is explained by computing if that lost at least this share of it.
EXPLAINS = 0.5


@dataclass(frozen=True)
class IncidentGroup:
    """Bads of one cause."""

    kind: Kind
    scope: str
    bads: tuple[Bad, ...]
    chance: float | None = None  #: that so many fall into one night without a common cause; None of one alone

    @property
    def systems(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted({bad.subject.system for bad in self.bads}))

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Sorted; empty for nodes."""
        return benchmarks(self.bads)


def benchmarks(bads: Iterable[Bad]) -> tuple[str, ...]:
    """Return the benchmarks of *bads*, sorted, with the system where there are several."""
    return tuple(sorted({place(bad) for bad in bads if bad.subject.benchmark}))


def place(bad: Bad) -> str:
    """Return a benchmark with its system and partition."""
    return f"{bad.subject.system}:{bad.subject.partition}:{bad.subject.benchmark}"


def joins(bad: Bad, incident: Incident) -> bool:
    """Whether *bad*, found tonight, is a late part of what an incident announced already."""
    if bad.subject.kind is not incident.kind:
        return False
    if bad.first_ns - LATE_NS > incident.last_ns or incident.first_ns > bad.last_ns + LATE_NS:
        return False
    if incident.scope == "code":
        return bad.subject.benchmark in {member.announced.subject.benchmark for member in incident.members}
    return (bad.subject.system,) == incident.systems


def groups(
    bads: Sequence[Bad],
    measured: Mapping[str, Collection[str]],
    losses_a_night: Mapping[str, float] = MappingProxyType({}),
) -> list[IncidentGroup]:
    """Return *bads* by cause, in a fixed order.

    *measured* are the benchmarks of each system, of which so many become worse in a night (*losses_a_night*): what they have in
    common is a cause only where chance would hardly bring as many together.
    """
    found: list[IncidentGroup] = []
    for kind in Kind:
        mine = sorted((bad for bad in bads if bad.subject.kind is kind), key=lambda bad: bad.subject)
        if kind is Kind.REGRESSION:
            found += _regressions(mine, measured, losses_a_night)
        else:
            found += [IncidentGroup(kind, kind.value, part) for part in by_time(by_system(mine))]
    return found


def _regressions(
    bads: Sequence[Bad], measured: Mapping[str, Collection[str]], rates: Mapping[str, float]
) -> list[IncidentGroup]:
    code, rest = _by_code(
        bads,
        {name: NIGHTS * rates.get(name, 0.0) / len(measured[name]) for name in measured if measured[name]},
    )
    found = [IncidentGroup(Kind.REGRESSION, "code", part, chance) for part, chance in code]
    for part in by_time(by_system(rest)):
        system = part[0].subject.system
        found += _by_class(part, len(measured.get(system, ())), NIGHTS * rates.get(system, 0.0))
    return found


def by_chance(least: int, expected: float) -> float:
    """Return how likely *least* or more events are where so many are expected (Poisson)."""
    fewer, term = 0.0, math.exp(-expected)
    for count in range(least):
        fewer, term = fewer + term, term * expected / (count + 1)
    return max(0.0, 1.0 - fewer)


def _by_code(
    bads: Sequence[Bad], likely: Mapping[str, float]
) -> tuple[list[tuple[tuple[Bad, ...], float]], list[Bad]]:
    """Return what several systems have in common, by night and with its chance, and the rest.

    *likely* is how likely one benchmark of each system became worse in such a time.
    """
    parts: list[tuple[tuple[Bad, ...], float]] = []
    rest: list[Bad] = []
    for part in by_time([tuple(bads)] if bads else []):
        systems: dict[str, set[str]] = {}
        for bad in part:
            systems.setdefault(bad.subject.benchmark, set()).add(bad.subject.system)
        chances = _chances(systems, likely)
        common = tuple(bad for bad in part if bad.subject.benchmark in chances)
        if common:
            parts.append((common, max(chances.values())))
        rest += [bad for bad in part if bad.subject.benchmark not in chances]
    return parts, rest


def _chances(systems: Mapping[str, Collection[str]], likely: Mapping[str, float]) -> dict[str, float]:
    """Return the benchmarks (-> systems) that fell on several systems, as chance alone hardly has it, with that chance."""
    shared = {name: where for name, where in systems.items() if len(where) > 1}
    expected = {
        name: sum(likely.values()) - max((likely.get(one, 0.0) for one in where), default=0.0)
        for name, where in systems.items()
    }
    every = by_chance(len(shared), sum(by_chance(1, one) for one in expected.values()))
    found = {
        name: min(every, len(systems) * by_chance(len(where) - 1, expected[name]))
        for name, where in shared.items()
    }
    return {name: chance for name, chance in found.items() if chance < CHANCE}


def _by_class(bads: Sequence[Bad], measured: int, expected: float) -> list[IncidentGroup]:
    classes: dict[str, list[Bad]] = {}
    for benchmark in benchmarks(bads):
        mine = [bad for bad in bads if place(bad) == benchmark]
        classes.setdefault(class_of(mine), []).extend(mine)
    affected = len(benchmarks(bads))
    if affected >= FEWEST and affected >= MOST * measured and set(classes) != {"io"}:
        return [_group("all", bads, expected)]
    return [_group(name, part, expected) for name, part in sorted(classes.items())]


def _group(scope: str, bads: Sequence[Bad], expected: float) -> IncidentGroup:
    affected = len(benchmarks(bads))
    chance = by_chance(affected - 1, expected) if affected > 1 else None
    return IncidentGroup(Kind.REGRESSION, scope, tuple(bads), chance)


def class_of(bads: Sequence[Bad]) -> str:
    """Return what is slower of one benchmark: ``io``, ``communication`` or ``benchmarks`` (computing, or unknown)."""
    losses = {bad.subject.metric: bad.worse_by for bad in bads}
    names = losses.keys()
    if names <= IO_METRICS:
        return "io"
    if names <= COMMUNICATION_METRICS:
        return "communication"
    whole = losses.get("effective_throughput", 0.0)
    if names <= {"effective_throughput"} | IO_METRICS and whole:
        return "io"
    if whole and losses.get("compute_throughput", 0.0) < EXPLAINS * whole:
        return "io"
    return "benchmarks"


def by_system(bads: Sequence[Bad]) -> list[tuple[Bad, ...]]:
    """Return the bads of each system, in its name's order."""
    systems: dict[str, list[Bad]] = {}
    for bad in bads:
        systems.setdefault(bad.subject.system, []).append(bad)
    return [tuple(part) for _name, part in sorted(systems.items())]


def by_time(parts: Iterable[Sequence[Bad]]) -> list[tuple[Bad, ...]]:
    """Split each part into those that may have begun in one night, oldest first."""
    found: list[tuple[Bad, ...]] = []
    for part in parts:
        night: list[Bad] = []
        for bad in sorted(part, key=lambda bad: (bad.last_ns, bad.subject)):
            if night and bad.last_ns - night[0].last_ns > TOLERANCE_NS:
                found.append(tuple(night))
                night = []
            night.append(bad)
        if night:
            found.append(tuple(night))
    return found


#: Worse is announced when a loss grew by half and by this much, as a fraction of the reference.
STEP = 0.03
#: One benchmark alone must lose three times as much, and so much more.
LEAP = 0.1
#: Names of incidents are not given again for so long.
REMEMBERED_NS = 400 * DAY_NS
#: Given tonight's new bads, return the same benchmarks of other systems that became bad with them on weaker evidence.
Companions = Callable[[Sequence[Bad]], Sequence[Bad]]


@dataclass(frozen=True)
class IncidentChange:
    """One incident whose state changed: one message."""

    incident: Incident
    state: IncidentState


def nothing_more(_bads: Sequence[Bad]) -> Sequence[Bad]:
    """Return no companions."""
    return ()


def advance(
    book: Book, observed: Observation, companions: Companions = nothing_more
) -> tuple[Book, tuple[IncidentChange, ...]]:
    """Return the book after tonight and the changes to tell, oldest incident first.

    Advancing twice with one observation changes nothing the second time. A book that was never advanced announces nothing
    that began more than a night ago, but keeps it as known.
    """
    now_ns = observed.now_ns
    incidents = [_stepped(incident, observed) for incident in book.incidents]
    known = {member.now.subject for incident in incidents for member in incident.members if member.open}
    new = [bad for subject, bad in sorted(observed.bad.items()) if subject not in known]
    expected, new = _split_known(new, book, incidents, now_ns)
    incidents, rest = _joined(incidents, new)
    more = [bad for bad in companions(rest) if bad.subject not in known and bad.subject not in observed.bad]
    taken = {*book.closed, *(incident.id for incident in incidents)}
    for group in groups([*rest, *more], observed.measured, observed.losses_a_night):
        if begun := _begun(group, observed, taken, now_ns):
            taken.add(begun.id)
            old = book.last_ns == 0 and begun.last_ns < now_ns - NIGHT_NS
            incidents.append(replace(begun, announced=True, state=IncidentState.CONTINUING) if old else begun)
    for issue, bads in expected:
        for group in groups(bads, observed.measured, observed.losses_a_night):
            if begun := _begun(group, observed, taken, now_ns):
                taken.add(begun.id)
                incidents.append(
                    replace(
                        begun,
                        announced=True,
                        state=IncidentState.ACKNOWLEDGED,
                        ack=issue.ack,
                        ticket=issue.ticket,
                    )
                )
    remaining: list[Incident] = []
    changes: list[IncidentChange] = []
    closed = {name: at_ns for name, at_ns in book.closed.items() if at_ns > now_ns - REMEMBERED_NS}
    recovered = [one for one in book.recovered if one.changed_ns > now_ns - NIGHT_NS]
    for incident in incidents:
        after, state = _announced(incident, book, now_ns)
        if state is not None:
            changes.append(IncidentChange(after, state))
        if after.open:
            remaining.append(after)
        else:
            closed[after.id] = now_ns
            recovered += [after] if after.announced else []
    mutes = {system: mute for system, mute in book.mutes.items() if mute.until_ns > now_ns}
    accepted = tuple(one for one in book.accepted if one.at_ns > now_ns - REMEMBERED_NS)
    issues = tuple(one for one in book.issues if one.ack.until_ns > now_ns)
    last_ns = max(now_ns, book.last_ns)
    after_tonight = replace(
        book, incidents=tuple(remaining), recovered=tuple(recovered), closed=closed, accepted=accepted, mutes=mutes,
        issues=issues, last_ns=last_ns,
    )  # fmt: skip
    return after_tonight, tuple(changes)


def _stepped(incident: Incident, observed: Observation) -> Incident:
    """Return the incident with what tonight says of its members."""
    return replace(incident, members=tuple(_step(member, observed) for member in incident.members))


def _step(member: Member, observed: Observation) -> Member:
    subject = member.now.subject
    if not member.open:
        return member
    if bad := observed.bad.get(subject):
        return replace(
            member, now=replace(bad, first_ns=member.announced.first_ns, last_ns=member.announced.last_ns)
        )
    if subject in observed.gone:
        return replace(member, open=False, reason=observed.gone[subject])
    return replace(member, open=False) if subject in observed.known else member


def _split_known(
    new: Sequence[Bad], book: Book, incidents: Sequence[Incident], now_ns: int
) -> tuple[list[tuple[KnownIssue, list[Bad]]], list[Bad]]:
    """Return what is new of each known issue, and the rest, with what comes back to an incident that is open."""
    found: dict[str, tuple[KnownIssue, list[Bad]]] = {}
    rest: list[Bad] = []
    for bad in new:
        issue = book.issue_of(bad.subject, now_ns)
        if issue is None or any(one.open and _had(one, bad) for one in incidents):
            rest.append(bad)
        else:
            found.setdefault(issue.name, (issue, []))[1].append(bad)
    return list(found.values()), rest


def _joined(incidents: Sequence[Incident], new: Sequence[Bad]) -> tuple[list[Incident], list[Bad]]:
    """Return incidents with their late parts, and what is of none."""
    found = list(incidents)
    rest: list[Bad] = []
    for bad in new:
        at = next(
            (i for i, one in enumerate(found) if one.open and (_had(one, bad) or joins(bad, one))), None
        )
        if at is None:
            rest.append(bad)
            continue
        others = tuple(member for member in found[at].members if member.now.subject != bad.subject)
        found[at] = replace(found[at], members=(*others, Member(bad, bad)))
    return found, rest


def _had(incident: Incident, bad: Bad) -> bool:
    """Whether it was part of the incident and had recovered."""
    return any(member.now.subject == bad.subject for member in incident.members)


def _begun(group: IncidentGroup, observed: Observation, taken: Iterable[str], now_ns: int) -> Incident | None:
    """Return the incident of a group; None where all of it is weak evidence."""
    members = tuple(Member(bad, bad) for bad in group.bads if bad.subject in observed.bad)
    if not members:
        return None
    # The same weak sign on another system is what tells the code from this one.
    all_of_them = group.scope == "code"
    systems = group.systems if all_of_them else tuple(sorted({m.now.subject.system for m in members}))
    started_ns = min(member.now.last_ns for member in members)
    return Incident(
        id=_identity(group, systems, started_ns, taken),
        kind=group.kind,
        scope=group.scope,
        systems=systems,
        started_ns=started_ns,
        first_ns=min(member.now.first_ns for member in members),
        last_ns=max(member.now.last_ns for member in members),
        created_ns=now_ns,
        members=members,
        named=benchmarks(member.now for member in members),
        measured=sum(len(observed.measured.get(system, ())) for system in systems),
        chance=group.chance,
        labels=_labels(group, systems, members),
    )


def _labels(group: IncidentGroup, systems: Sequence[str], members: Sequence[Member]) -> Mapping[str, str]:
    """Return what a site routes by; what differs within the incident is left out."""
    subjects = [member.now.subject for member in members]
    every = {
        "partition": {subject.partition for subject in subjects},
        "benchmark": {subject.benchmark for subject in subjects},
        "metric": {subject.metric for subject in subjects},
        "node": {subject.node for subject in subjects},
    }
    single = {name: next(iter(values)) for name, values in every.items() if len(values) == 1 and any(values)}
    return {"kind": group.kind.value, "scope": group.scope, "system": ",".join(systems), **single}


def _identity(group: IncidentGroup, systems: Sequence[str], started_ns: int, taken: Iterable[str]) -> str:
    """Return a name that is short enough to type and comes out the same if the book is lost."""
    day = dt.datetime.fromtimestamp(started_ns / 1e9, tz=dt.UTC).strftime("%Y%m%d")
    content = "\0".join([group.kind.value, group.scope, *systems, day])
    slug = re.sub(r"[^a-z0-9]+", "-", "-".join(systems).lower())[:20].strip("-")
    stem = f"{group.kind.value[:4]}-{slug or 'x'}-{day}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"
    used = set(taken)
    return next(
        name for n in range(1, len(used) + 2) if (name := stem if n == 1 else f"{stem}-{n}") not in used
    )


def _announced(incident: Incident, book: Book, now_ns: int) -> tuple[Incident, IncidentState | None]:
    """Return the incident after what is announced of it tonight, and what that is."""
    muted = all(book.muted(system, now_ns) for system in incident.systems)
    if not incident.open:
        # What began as a known issue and was never announced ends without a message.
        untold = not incident.announced or (incident.ack is not None and not incident.messages)
        return (incident, None) if untold else _with_message(incident, IncidentState.RESOLVED, now_ns)
    if not incident.announced:
        return (incident, None) if muted else _with_message(incident, IncidentState.NEW, now_ns)
    if incident.ack is not None and incident.ack.until_ns <= now_ns:
        without = replace(incident, ack=None)
        return (without, None) if muted else _with_message(without, IncidentState.CONTINUING, now_ns)
    if incident.ack is None and not muted and _worse(incident):
        return _with_message(incident, IncidentState.WORSE, now_ns)
    quiet = IncidentState.ACKNOWLEDGED if incident.ack else IncidentState.CONTINUING
    return replace(incident, state=quiet), None


def _with_message(incident: Incident, state: IncidentState, now_ns: int) -> tuple[Incident, IncidentState]:
    """Return the incident with all that its message will say as announced."""
    members = tuple(
        replace(member, announced=_louder(member)) if member.open else member for member in incident.members
    )
    named = benchmarks(member.now for member in members)
    messages = incident.messages + 1
    after = replace(
        incident,
        members=members,
        named=tuple(sorted({*incident.named, *named})),
        fresh=tuple(name for name in named if incident.announced and name not in incident.named),
        announced=True,
        state=state,
        messages=messages,
        changed_ns=now_ns,
        message_id=f"{incident.id}-{messages}-{state.value}",
    )
    return after, state


def _louder(member: Member) -> Bad:
    """Return what is announced now; a loss that shrank keeps its old figure, so that it does not grow twice."""
    return max(member.announced, member.now, key=lambda bad: bad.worse_by)


def _worse(incident: Incident) -> bool:
    """Whether its typical loss grew, one benchmark's by a lot, or another benchmark has it: each is named in a message."""
    open_members = [member for member in incident.members if member.open]
    before = statistics.median(member.announced.worse_by for member in incident.members)
    now = statistics.median(member.now.worse_by if member.open else 0.0 for member in incident.members)
    grown = now >= max(before * 1.5, before + STEP) or any(
        member.now.worse_by >= max(member.announced.worse_by * 3, member.announced.worse_by + LEAP)
        for member in open_members
    )
    return grown or any(
        place(member.now) not in incident.named for member in open_members if member.now.subject.benchmark
    )


def open_subjects(book: Book) -> dict[Subject, Bad]:
    """Return how bad each subject was when it was announced, of those that are still bad."""
    return {
        member.announced.subject: member.announced
        for incident in book.incidents
        for member in incident.members
        if member.open
    }
