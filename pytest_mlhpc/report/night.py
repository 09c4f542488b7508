"""From the nights of a history, or the records of a session, to their morning page. Pure."""

from __future__ import annotations

import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.messages import (
    HEADS,
    affected_text,
    benchmarks_text,
    cause_text,
    evidence_text,
    headline,
    short,
    suspects_code,
)
from pytest_mlhpc.alert.model import DAY_NS, NIGHT_NS, Bad, Book, Incident
from pytest_mlhpc.alert.observe import (
    BROKEN,
    did_run,
    explanation,
    first_of_streak,
    nightly,
    stale,
    unfit,
)
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.series import Night, day_of
from pytest_mlhpc.jobs.budget import hours_text
from pytest_mlhpc.report.morning import (
    Morning,
    MorningItem,
    NodeOut,
    OpenAlert,
    accept_command,
)
from pytest_mlhpc.store.record import INFRASTRUCTURE, WORSE, SeriesKey, Verdict
from pytest_mlhpc.store.text import count as counted
from pytest_mlhpc.store.text import minutes, one_line

_HOUR_NS = 3600 * 10**9
#: Nightly runs that are no farther apart belong to one night: the next one of a schedule comes after 24 h.
SAME_NIGHT_NS = 20 * _HOUR_NS
#: A record that is farther ahead was made by a clock that is wrong: its night would stay the last one for years.
AHEAD_NS = _HOUR_NS
#: Nights of which the schedule is learned, and that are counted.
LEARNT_NS = 60 * DAY_NS
#: Verdicts of runs that did not begin or were not waited for, and of those that ended without what was asked.
_DID_NOT_RUN = frozenset({*INFRASTRUCTURE, "cancelled", "detached", "cannot_lower"})
_BROKE = BROKEN - set(WORSE)
#: A baseline may be wrong where as many nights have figures, and a test was worse than it on so many of them on end.
SETTLED, REPEATED = 8, 3


@dataclass(frozen=True)
class MorningQuery:
    """What a page is about beside its nights. ``store`` says where the history comes from.

    ``sent`` says whether `mlhpc alert send` was ever run: else all incidents are news. ``options`` end each command that
    is named: where the state lies, if not where it is looked for.
    """

    now_ns: int
    store: str = ""
    branch: str = "main"
    sent: bool = True
    events: Sequence[Event] = ()
    options: Sequence[str] = ()
    notes: tuple[str, ...] = ()
    report: str = ""


@dataclass(frozen=True)
class _Tonight:
    """The nightly records of a history. ``runs`` are first attempts of each benchmark, oldest first.

    ``records`` are those of the last night, ``newest`` the last run of each benchmark in it, ``missing`` the newest
    run of each benchmark that the schedule expects and of which nothing was recorded of late.
    """

    now_ns: int
    start_ns: int
    last_ns: int
    ahead: Sequence[Night]
    runs: Mapping[SeriesKey, Sequence[Night]]
    records: Sequence[Night]
    newest: Mapping[SeriesKey, Night]
    missing: Mapping[SeriesKey, Night]
    out: Sequence[NodeOut]
    nights: str

    def name_of(self, key: SeriesKey) -> str:
        """Return the short name of a benchmark's test, with its target."""
        return short(self.runs[key][-1].node_id)

    def tests(self, keys: Iterable[SeriesKey]) -> list[str]:
        """Return the node ids of benchmarks that ran tonight."""
        return [self.newest[key].node_id for key in keys]

    def ended_as(self, *verdicts: str) -> list[SeriesKey]:
        """Return the benchmarks of tonight with one of *verdicts*, in their order."""
        return [key for verdict in verdicts for key, one in self.newest.items() if one.verdict == verdict]


def night_morning(nights: Iterable[Night], book: Book, asked: MorningQuery) -> Morning | None:
    """Return the page of the last night of *nights*; None where no nightly run is among them.

    Args:
        nights: All records of the last :data:`LEARNT_NS`, oldest first.
        book: After the observation of this night.
        asked: What else the page says.
    """
    tonight = _tonight(nights, asked)
    if tonight is None:
        return None
    fresh = [one for one in book.incidents if _is_fresh(one, tonight) or (one.open and not asked.sent)]
    known = [one for one in book.incidents if one.open and one.announced and one not in fresh]
    measured = [one for one in tonight.newest.values() if one.verdict not in _DID_NOT_RUN | _BROKE]
    systems = sorted({one.system for one in (*tonight.records, *tonight.missing.values())})
    sessions = tuple(dict.fromkeys(one.session for one in tonight.records))
    improved, waiting = tonight.ended_as("improved"), tonight.ended_as("wrong_baseline", "no_baseline", "new")
    page = Morning(
        "night",
        head="",
        notes=(*asked.notes, *_clock(tonight.ahead)),
        at_ns=tonight.last_ns,
        systems=tuple(systems),
        sessions=sessions,
        counts=Counter([one.verdict for one in tonight.newest.values()] + ["stale"] * len(tonight.missing)),
        node_hours=sum(one.node_hours for one in tonight.records),
        measured=len(measured),
        expected=len({*tonight.newest, *tonight.missing}),
        act_now=tuple(_act_now(fresh, book, tonight, asked)),
        did_not_run=tuple(_did_not_run(tonight, book, asked)),
        nodes_out=tuple(tonight.out),
        watching=tuple(_test_items(tonight.ended_as("suspect", "inconclusive"), tonight)),
        still_open=tuple(map(_open_alert, known)),
        recovered=tuple(
            OpenAlert(one.id, one.started_ns, affected_text(one))
            for one in book.recovered
            if one.changed_ns >= tonight.start_ns
        ),
        improved=tuple(_test_items(improved, tonight)),
        waiting=tuple(_test_items(waiting, tonight)),
        more=_command(["mlhpc", "records", "list", *_session(sessions), "--limit", "1000"], asked),
        alerts=_command(["mlhpc", "alert", "list"] if asked.sent else ["mlhpc", "history", "changes"], asked),
        accept_improved=accept_command(tonight.tests(improved), sessions, asked.options),
        accept_new=accept_command(tonight.tests(waiting), sessions, asked.options),
        report=asked.report,
    )
    return replace(page, head=_head(page, tonight, asked))


def _tonight(nights: Iterable[Night], asked: MorningQuery) -> _Tonight | None:
    found = [one for one in nights if one.purpose == "nightly"]
    past = [one for one in found if one.created_ns <= asked.now_ns + AHEAD_NS]
    now_ns = asked.now_ns
    if not past:  # the clock of this machine is behind those of all others
        past, now_ns = found, max((one.created_ns for one in found), default=0)
    if not past:
        return None
    last_ns = past[-1].created_ns
    records = [one for one in past if one.created_ns > last_ns - SAME_NIGHT_NS]
    if last_ns < now_ns - NIGHT_NS:
        records = []
    runs: dict[SeriesKey, list[Night]] = {}
    for one in past:
        if one.attempt == 0:
            runs.setdefault(one.series(""), []).append(one)
    start_ns = records[0].created_ns if records else now_ns - SAME_NIGHT_NS
    schedule = nightly(past, asked.branch)
    silent = [schedule[subject].newest for subject in stale(schedule, now_ns).bad]
    return _Tonight(
        now_ns=now_ns,
        start_ns=start_ns,
        last_ns=last_ns,
        ahead=[one for one in found if one.created_ns > now_ns + AHEAD_NS],
        runs=runs,
        records=records,
        newest={key: some[-1] for key, some in runs.items() if records and some[-1].created_ns >= start_ns},
        missing={one.series(""): one for one in silent if one.created_ns < min(start_ns, now_ns - NIGHT_NS)},
        out=[
            NodeOut(subject.system, subject.partition, subject.node, bad.reason)
            for subject, bad in sorted(unfit(past, now_ns).bad.items())
        ],
        nights=_nights(past, now_ns),
    )


def _nights(past: Sequence[Night], now_ns: int) -> str:
    """Return how many nights have records; those of the whole window are the last of more."""
    number = len({day_of(one.created_ns) for one in past})
    full = past[0].created_ns < now_ns - LEARNT_NS + 2 * DAY_NS
    return f"more than {number - 1} nights" if full else counted(number, "night")


def _head(page: Morning, tonight: _Tonight, asked: MorningQuery) -> str:
    when = f"night of {minutes(tonight.last_ns)[:10]}"
    if not tonight.records:
        when = f"no night since {minutes(tonight.last_ns)}"
    hours = [hours_text(page.node_hours)] if page.node_hours else []
    store = f" from {asked.store}" if asked.store else ""
    facts = [
        f"{page.measured} of {page.expected} measured",
        counted(len(page.systems), "system"),
        *hours,
        f"history of {tonight.nights}{store}",
    ]
    return f"{when}: {', '.join(facts)}"


def _clock(ahead: Sequence[Night]) -> list[str]:
    if not ahead:
        return []
    systems = ", ".join(sorted({one.system for one in ahead}))
    last = minutes(max(one.created_ns for one in ahead))
    return [f"a clock is wrong: {counted(len(ahead), 'record')} of {systems} left out, dated up to {last}"]


def _is_fresh(incident: Incident, tonight: _Tonight) -> bool:
    """Whether a message of tonight speaks of it, and nobody has acknowledged it since."""
    announced = incident.announced and incident.changed_ns >= tonight.start_ns
    return incident.open and announced and incident.ack is None


def _act_now(
    fresh: Sequence[Incident], book: Book, tonight: _Tonight, asked: MorningQuery
) -> list[MorningItem]:
    """Return what became worse tonight, and tests that fail by a promise or a baseline; most tests first."""
    slower = sorted(
        (one for one in fresh if one.kind is Kind.REGRESSION), key=lambda one: -_worst(one).worse_by
    )
    others = [one for one in book.incidents if one.kind in _OF_TESTS and one.open and one not in fresh]
    members = [member.now.subject for one in (*slower, *others) for member in one.members if member.open]
    known = {(one.system, one.partition, one.environment, one.benchmark) for one in members}
    groups: dict[tuple[str, str, str], list[SeriesKey]] = {}
    for key, night in tonight.newest.items():
        place = key.system, key.partition, key.environment, key.benchmark
        if night.verdict in WORSE and place not in known:
            groups.setdefault((night.verdict, key.system, key.partition), []).append(key)
    found = [_incident_item(one, asked) for one in slower]
    found += [_judged_item(verdict, keys, tonight, asked) for (verdict, _, _), keys in groups.items()]
    return sorted(found, key=lambda one: -len(one.tests))


def _worst(incident: Incident) -> Bad:
    return max((one.now for one in incident.members if one.open), key=lambda bad: bad.worse_by)


def _incident_item(incident: Incident, asked: MorningQuery) -> MorningItem:
    subjects = [member.now.subject for member in incident.members if member.open]
    series = {
        SeriesKey(one.system, one.partition, one.environment, one.fingerprint, one.benchmark, "")
        for one in subjects
    }
    system = ["--system", incident.systems[0]] if len(incident.systems) == 1 else []
    others = incident.measured - len({(one.system, one.partition, one.benchmark) for one in subjects})
    control = (
        f"; {counted(others, 'other benchmark')} of these systems did not change"
        if suspects_code(incident)
        else ""
    )
    return MorningItem(
        what=f"{HEADS[incident.announced_as]}: {headline(incident, incident.announced_as)}",
        why=f"{cause_text(incident)}{control} ({evidence_text(incident)})",
        command=_command(["mlhpc", "history", _worst(incident).subject.benchmark, *system], asked),
        verdict="regressed",
        system=", ".join(incident.systems),
        partition=incident.labels.get("partition", ""),
        tests=tuple(sorted({one.benchmark for one in subjects})),
        alert=incident.id,
        name=benchmarks_text(incident),
        series=tuple(sorted(series, key=str)),
        owners=incident.owners,
        ticket=incident.ticket,
    )


#: Kinds of incidents that tell of tests which fail by the judge.
_OF_TESTS = frozenset({Kind.REGRESSION, Kind.FAILURE})
#: What is said of tests that fail by the judge, though their history shows no fall.
_JUDGED: Mapping[str, str] = {
    Verdict.BELOW_REFERENCE: "worse than its reference",
    Verdict.REGRESSED: "worse than its baseline",
    Verdict.DRIFTED: "drifted from its baseline",
}


def _judged_item(
    verdict: str, keys: Sequence[SeriesKey], tonight: _Tonight, asked: MorningQuery
) -> MorningItem:
    newest = [tonight.newest[key] for key in keys]
    first, place = newest[0], f"{newest[0].system}:{newest[0].partition}"
    streaks = [_streak(tonight.runs[key], {verdict}) for key in keys]
    name = tonight.name_of(keys[0]) if len(keys) == 1 else f"{counted(len(keys), 'test')} of {place}"
    since = minutes(min(some[0].created_ns for some in streaks))[:10]
    settled = all(sum(map(did_run, tonight.runs[key])) >= SETTLED for key in keys)
    wrong = verdict != Verdict.BELOW_REFERENCE and settled and min(map(len, streaks)) >= REPEATED
    why = "their figures did not fall: suspect the baseline" if wrong else ""
    example = f"{short(first.node_id)}: {_reason(first)}" if len(keys) > 1 else _reason(first)
    command = ["mlhpc", "baseline", "diff", first.system] if wrong else _history(first)
    return MorningItem(
        what=f"{name}: {_JUDGED[verdict]} since {since}",
        why=f"{why} ({example})" if why else example,
        command=_command(command, asked),
        verdict=verdict,
        system=first.system,
        partition=first.partition,
        environment=first.environment,
        tests=tuple(one.node_id for one in newest),
        name=name,
        series=tuple(keys),
        owners=tuple(one.owner for one in newest),
    )


def _did_not_run(tonight: _Tonight, book: Book, asked: MorningQuery) -> list[MorningItem]:
    """Return one item for each cause, that of most tests first; a muted system and a maintenance are one cause each."""
    groups: dict[tuple[str, ...], list[SeriesKey]] = {}
    for key, night in (*tonight.newest.items(), *tonight.missing.items()):
        absent = key in tonight.missing or night.verdict in _DID_NOT_RUN
        if book.muted(key.system, tonight.now_ns):
            if absent or night.verdict in _BROKE:
                groups.setdefault(("muted", key.system), []).append(key)
        elif absent and (window := explanation(asked.events, night, tonight.now_ns)):
            place = window.system, window.text, str(window.until_ns)
            groups.setdefault(("maintenance", *place), []).append(key)
        elif key in tonight.missing:
            groups.setdefault(("not recorded", key.system), []).append(key)
        elif night.verdict in _DID_NOT_RUN:
            groups.setdefault(("did not run", key.system, _alike(night)), []).append(key)
        elif night.verdict in _BROKE:
            groups.setdefault(("broke", key.system, _alike(night)), []).append(key)
    found = [_cause_item(kind, keys, tonight, book, asked) for (kind, *_), keys in groups.items()]
    return sorted(found, key=lambda one: -len(one.tests))


def _cause_item(
    kind: str, keys: Sequence[SeriesKey], tonight: _Tonight, book: Book, asked: MorningQuery
) -> MorningItem:
    newest = [tonight.runs[key][-1] for key in keys]
    first = newest[0]
    places = {f"{one.system}:{one.partition}" for one in keys}
    place = next(iter(places)) if len(places) == 1 else first.system
    name = counted(len(keys), "test") if len(keys) > 1 else tonight.name_of(keys[0])
    tests = f"{name} of {place}" if len(keys) > 1 else name
    reason = _cause(first)
    if kind == "muted":
        mute = book.mutes[first.system]
        reason = f"{mute.reason or 'muted'} until {minutes(mute.until_ns)}"
        what = f"{first.system}: {reason}: {name} not measured"
    elif kind == "maintenance" and (window := explanation(asked.events, first, tonight.now_ns)):
        what = f"{place}: maintenance until {minutes(window.until_ns)} ({window.text}): {name} not measured"
    elif kind == "not recorded":
        reason = f"nothing recorded since {minutes(max(one.created_ns for one in newest))}"
        what = f"not recorded: {tests} since {reason.partition('since ')[2]}"
    else:
        alike = _DID_NOT_RUN if kind == "did not run" else _BROKE
        nights = statistics.median_low(len(_streak(tonight.runs[key], alike)) for key in keys)
        again = f" for {nights} nights" if nights > 1 else ""
        what = f"{kind}{again}: {tests}: {reason}"
    noted = (
        [one.text for one in asked.events if _is_of_tonight(one, first, tonight)]
        if kind not in {"muted", "maintenance"}
        else []
    )
    return MorningItem(
        what=what + (f" (noted: {noted[-1]})" if noted else ""),
        verdict="stale" if kind in {"muted", "maintenance", "not recorded"} else first.verdict,
        system=first.system,
        partition=first.partition if len(places) == 1 else "",
        environment=first.environment if len(keys) == 1 else "",
        tests=tuple(one.node_id for one in newest),
        name=name,
        series=tuple(keys),
        owners=tuple(one.owner for one in newest),
    )


def _is_of_tonight(event: Event, night: Night, tonight: _Tonight) -> bool:
    return (
        event.concerns(night.system, night.partition)
        and max(event.at_ns, event.until_ns) > tonight.start_ns - DAY_NS
        and event.at_ns <= tonight.now_ns
    )


def _streak(runs: Sequence[Night], verdicts: Iterable[str]) -> Sequence[Night]:
    """Return the runs at the end that all have one of *verdicts*; there is one at least."""
    alike = set(verdicts)
    first = first_of_streak(runs, lambda night: night.verdict in alike)
    return runs[list(runs).index(first) :]


def _cause(night: Night) -> str:
    reason = _reason(night)
    return f"{night.verdict}: {reason}" if reason else night.verdict


def _reason(night: Night) -> str:
    return one_line(night.failure.removeprefix(f"{night.verdict}: "), 200)


def _alike(night: Night) -> str:
    """Return a cause without its numbers: ranks, jobs and sizes differ where the cause does not."""
    return re.sub(r"[0-9]+", "#", _cause(night))


def _test_items(keys: Iterable[SeriesKey], tonight: _Tonight) -> Iterable[MorningItem]:
    for key in keys:
        night = tonight.newest[key]
        yield MorningItem(
            what=f"{night.verdict}: {night.node_id}",
            why="its baseline is wrong" if night.verdict == Verdict.WRONG_BASELINE else "",
            verdict=night.verdict,
            system=night.system,
            partition=night.partition,
            environment=night.environment,
            tests=(night.node_id,),
            name=short(night.node_id),
            series=(key,),
            owners=(night.owner,),
        )


def _open_alert(incident: Incident) -> OpenAlert:
    what = headline(incident, incident.state)
    by, until_ns = (incident.ack.by, incident.ack.until_ns) if incident.ack else ("", 0)
    return OpenAlert(incident.id, incident.started_ns, what, by, incident.owners, until_ns, incident.ticket)


def _session(sessions: Sequence[str]) -> list[str]:
    return ["--session", *sessions] if len(sessions) == 1 else []


def _history(night: Night) -> list[str]:
    return ["mlhpc", "history", night.benchmark, "--system", night.system]


def _command(command: Iterable[str], asked: MorningQuery) -> str:
    return shlex.join([*command, *asked.options])
