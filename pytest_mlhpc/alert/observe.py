"""Tonight's observation: which series are worse, which nights are missing, which runs broke, which nodes are out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.incidents import Companions, open_subjects
from pytest_mlhpc.alert.model import DAY_NS, NIGHT_NS, Bad, Book, Observation, Subject
from pytest_mlhpc.alert.slower_series import KnownIncidents, Rules, elsewhere, regressions, subject_of
from pytest_mlhpc.history.events import Event, maintenance_of
from pytest_mlhpc.history.level_changes import NightlyQuery, WatchedSeries, watch
from pytest_mlhpc.history.series import Night, Series, Source, feeds
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, SeriesKey, Verdict
from pytest_mlhpc.store.text import minutes, one_line

#: A benchmark of which nothing was recorded for so long, while others of its system were, is no longer expected.
RETIRED_NS = 14 * DAY_NS
#: Two nightly records are of two nights if they are farther apart than this.
APART_NS = 12 * 3600 * 10**9
#: Failures of a run whose figures are compared over nights elsewhere, or of one that nobody waited for. A promise that is not met
#: (``below_reference``) is no change of level, and is announced here.
_NOT_BROKEN = frozenset(
    {Verdict.REGRESSED, Verdict.DRIFTED, "no_baseline", "cancelled", "detached", "cannot_lower"}
)
BROKEN = frozenset(FAILURES) - _NOT_BROKEN
#: How a reason begins of what was submitted and did not run.
NOT_RUN = "did not run"
#: Announced by the message about the nodes.
_NODES = "unfit_nodes"
#: Others had the processors: of one night it says nothing.
_BUSY = "machine_busy"


@dataclass
class NightlyRecords:
    """The nightly records of one benchmark."""

    nights: list[Night] = field(default_factory=list)

    @property
    def newest(self) -> Night:
        """The last one."""
        return self.nights[-1]

    @property
    def expected(self) -> bool:
        """Whether it was recorded in two nights at least: once is no schedule."""
        return self.newest.created_ns - self.nights[0].created_ns > APART_NS

    def measured_ns(self) -> int:
        """Return when the last one was recorded that ran, 0 if none did."""
        return next((night.created_ns for night in reversed(self.nights) if did_run(night)), 0)


@dataclass(frozen=True)
class Missing:
    """``bad`` are stale or broken; ``known`` those of which the nights say so or not; ``gone`` are no longer expected."""

    bad: dict[Subject, Bad]
    known: frozenset[Subject]
    gone: dict[Subject, str]


def nightly(nights: Iterable[Night], default_branch: str) -> dict[Subject, NightlyRecords]:
    """Return the nightly first attempts of each benchmark, oldest first, by a subject of kind ``stale``."""
    found: dict[Subject, NightlyRecords] = {}
    for night in nights:
        if night.purpose == "nightly" and feeds(night, default_branch):
            found.setdefault(_benchmark_subject(Kind.STALE, night), NightlyRecords()).nights.append(night)
    return found


def stale(latest: dict[Subject, NightlyRecords], now_ns: int, limit_ns: int = NIGHT_NS) -> Missing:
    """Return the benchmarks of which nothing was recorded for *limit_ns*, or only that they did not run.

    Where nothing at all was recorded of a partition, all its benchmarks are stale together as soon as the newest is.
    """
    newest: dict[tuple[str, str], int] = {}
    for subject, one in latest.items():
        place = subject.system, subject.partition
        newest[place] = max(newest.get(place, 0), one.newest.created_ns)
    bad, gone = {}, {}
    expected = {subject: one for subject, one in latest.items() if one.expected}
    for subject, one in expected.items():
        silent = newest[subject.system, subject.partition] < now_ns - limit_ns
        if not silent and one.newest.created_ns < now_ns - RETIRED_NS:
            gone[subject] = (
                f"not recorded for {RETIRED_NS // DAY_NS} days while others were: no longer expected"
            )
        elif one.newest.created_ns < now_ns - limit_ns:
            bad[subject] = _silent(subject, one, limit_ns)
        elif not did_run(one.newest) and not _says_nothing(one, now_ns - limit_ns - DAY_NS):
            bad[subject] = _not_run(subject, one)
    return Missing(bad, frozenset(expected), gone)


def explanation(events: Sequence[Event], newest: Night, now_ns: int) -> Event | None:
    """Return the maintenance because of which a benchmark did not run in the last night, or None.

    The benchmark is taken to be due each 24 h after its *newest* record.
    """
    due_ns = newest.created_ns + max(0, now_ns - newest.created_ns) // DAY_NS * DAY_NS
    return maintenance_of(events, newest.system, newest.partition, due_ns)


def unexplained(missing: Missing, latest: Mapping[Subject, NightlyRecords], question: Question) -> Missing:
    """Return *missing* without what a maintenance explains: of that nothing is known tonight."""
    explained = {
        subject
        for subject in missing.bad
        if explanation(question.events, latest[subject].newest, question.now_ns)
    }
    bad = {subject: one for subject, one in missing.bad.items() if subject not in explained}
    return replace(missing, bad=bad, known=missing.known - explained)


def broken(latest: dict[Subject, NightlyRecords]) -> Missing:
    """Return the benchmarks whose newest record is of a run that broke; those that did not run say nothing new."""
    bad, known = {}, set()
    for one in latest.values():
        ran = [night for night in one.nights if did_run(night)]
        if not ran:
            continue
        subject = _benchmark_subject(Kind.FAILURE, ran[-1])
        known.add(subject)
        if ran[-1].verdict in BROKEN:
            bad[subject] = _broken(subject, ran)
    return Missing(bad, frozenset(known), {})


def _says_nothing(one: NightlyRecords, since_ns: int) -> bool:
    """Return whether the newest record, of a run that gave no figures, is no news: nodes have a message of their own.

    A busy machine is news once the benchmark has not been measured since *since_ns*.
    """
    verdict = one.newest.verdict
    return verdict == _NODES or (verdict == _BUSY and one.measured_ns() >= since_ns)


def _silent(subject: Subject, one: NightlyRecords, limit_ns: int) -> Bad:
    last_ns = one.newest.created_ns
    reason = f"nothing recorded since {minutes(last_ns)}"
    if not did_run(one.newest):
        reason += f", which was {_outcome_of(one.newest)}"
    return Bad(subject, last_ns, last_ns + limit_ns, reason=reason)


def _not_run(subject: Subject, one: NightlyRecords) -> Bad:
    first = first_of_streak(one.nights, lambda night: not did_run(night))
    before_ns = one.measured_ns()
    return Bad(subject, before_ns, first.created_ns, reason=f"{NOT_RUN}: {_outcome_of(one.newest)}")


def _broken(subject: Subject, ran: Sequence[Night]) -> Bad:
    first = first_of_streak(ran, lambda night: night.verdict in BROKEN)
    good = [night.created_ns for night in ran if night.created_ns < first.created_ns]
    newest = ran[-1]
    return Bad(
        subject, good[-1] if good else 0, first.created_ns, nodes=newest.nodes, reason=_outcome_of(newest)
    )  # fmt: skip


def first_of_streak(nights: Sequence[Night], bad: Callable[[Night], bool]) -> Night:
    """Return the first of the bad nights at the end; the last night, if none is."""
    first = nights[-1]
    for night in reversed(nights):
        if not bad(night):
            break
        first = night
    return first


def did_run(night: Night) -> bool:
    """Whether the run began: what the machine is to blame for did not."""
    return night.verdict not in INFRASTRUCTURE


def _outcome_of(night: Night) -> str:
    text = night.failure.removeprefix(f"{night.verdict}: ")
    return one_line(f"{night.verdict}: {text}" if text else night.verdict, 300)


def _benchmark_subject(kind: Kind, night: Night) -> Subject:
    """Device model and fingerprint are left out: a run that did not begin knows neither."""
    return Subject(kind, night.system, night.partition, night.environment, benchmark=night.benchmark)


#: A node that was neither blamed nor used for so long is forgotten: it may be out of service, or another's.
FORGOTTEN_NS = 7 * DAY_NS


@dataclass
class _Node:
    good_ns: int = 0
    unfit_ns: int = 0  #: first of the nights on end in which it was left out
    newest_ns: int = 0
    reason: str = ""


def unfit(nights: Iterable[Night], now_ns: int) -> Missing:
    """Return the nodes that the newest record which names them says are unfit; *nights* are oldest first."""
    nodes: dict[Subject, _Node] = {}
    for night in nights:
        for host in night.nodes:
            if host in night.unfit:
                continue
            node = nodes.setdefault(_node_subject(night, host), _Node())
            node.good_ns = node.newest_ns = night.created_ns
            node.unfit_ns, node.reason = 0, ""
        for host, reason in night.unfit.items():
            node = nodes.setdefault(_node_subject(night, host), _Node())
            node.unfit_ns = node.unfit_ns or night.created_ns
            node.newest_ns, node.reason = night.created_ns, one_line(reason, 300)
    bad, gone = {}, {}
    for subject, node in nodes.items():
        if not node.unfit_ns:
            continue
        if node.newest_ns < now_ns - FORGOTTEN_NS:
            gone[subject] = f"not seen for {FORGOTTEN_NS // DAY_NS} days"
            continue
        first_ns = node.good_ns or node.unfit_ns - DAY_NS
        bad[subject] = Bad(subject, first_ns, node.unfit_ns, nodes=(subject.node,), reason=node.reason)
    return Missing(bad, frozenset(nodes), gone)


def _node_subject(night: Night, host: str) -> Subject:
    return Subject(Kind.NODES, night.system, night.partition, node=host)


#: What is looked at: enough for a level, little enough that a forgotten one does not matter.
WINDOW_NS = 150 * DAY_NS
#: What dates a loss. That it is one is certain already: its second night may say when it began, and no third one has to confirm it.
DATING = Detector(shortest=2)
#: Nights of which runs and nodes are looked at.
RECENT_NS = 60 * DAY_NS
#: An open regression of a series without a figure for so long is over: the benchmark is no more.
GONE_NS = 30 * DAY_NS


@dataclass(frozen=True)
class Question:
    """What to look for. ``expect``: missing nights are bad, too."""

    now_ns: int
    branch: str = "main"
    rules: Rules = field(default_factory=Rules)
    false_alarms: float = 1.0  #: a month that the site accepts, all its series together
    expect: bool = False
    stale_ns: int = 26 * 3600 * 10**9
    events: Sequence[Event] = ()
    cache: Path | None = None


@dataclass(frozen=True)
class Observed:
    """The answer; ``empty``: there is no history at all."""

    observation: Observation
    companions: Companions
    empty: bool


def observe(source: Source, book: Book, question: Question) -> Observed:
    """Return what *source* says of now; *book* says what is known as bad.

    Raises:
        StoreError: the history cannot be read.
        UsageError: a package is missing.
    """
    now_ns = question.now_ns
    query = NightlyQuery(
        since_ns=now_ns - WINDOW_NS, until_ns=now_ns + 1, default_branch=question.branch, judged_only=True,
        detector=DATING,
    )  # fmt: skip
    tee = _Tee(source, question.branch)
    watched = tuple(watch(tee, query, question.events, question.cache))
    opened = {subject: bad for subject, bad in open_subjects(book).items() if subject.kind is Kind.REGRESSION}
    accepted = {one.subject: one.since_ns for one in book.accepted}
    known = KnownIncidents(opened, accepted, fresh=book.last_ns == 0)
    bad = regressions(watched, tee.reruns, known, now_ns, question.rules, question.false_alarms)
    subjects = {subject_of(one.series.key) for one in watched}
    gone = {**_gone(watched, opened, now_ns), **_of_earlier_epochs(watched, opened)}
    nights = tuple(source.nights(now_ns - RECENT_NS, now_ns + 1))
    latest = nightly(nights, question.branch)
    parts = [broken(latest), unfit(nights, now_ns)]
    if question.expect:
        parts.append(unexplained(stale(latest, now_ns, question.stale_ns), latest, question))
    for part in parts:
        bad.update(part.bad)
        gone.update(part.gone)
        subjects |= part.known
    for one in book.accepted:
        if one.subject in bad and bad[one.subject].last_ns <= one.at_ns:
            gone[one.subject] = f"accepted by {one.by}: {one.reason}"
    owners = _Owners(nights, question.branch)
    bad = {subject: owners.named(one) for subject, one in bad.items() if subject not in gone}
    measured = _measured(watched, latest, now_ns)
    observation = Observation(now_ns, bad, frozenset(subjects), gone, measured, _losses_a_night(watched))

    def companions(bads: Sequence[Bad]) -> Sequence[Bad]:
        slower = [one for one in bads if one.subject.kind is Kind.REGRESSION]
        return [owners.named(one) for one in elsewhere(watched, tee.reruns, slower, question.rules.smallest)]

    return Observed(observation, companions, empty=not watched and not nights)


class _Owners:
    """Who owns benchmarks and nodes, as the newest nightly record of each says."""

    def __init__(self, nights: Iterable[Night], branch: str) -> None:
        found = [night for night in nights if feeds(night, branch)]
        self._tests = {(one.system, one.partition, one.benchmark): one.owner for one in found}
        self._partitions = {(one.system, one.partition): one.partition_owner for one in found}

    def named(self, bad: Bad) -> Bad:
        """Return *bad* with its owner; where no record names one, the owner that it had."""
        one = bad.subject
        if one.kind is Kind.NODES:
            owner = self._partitions.get((one.system, one.partition))
        else:
            owner = self._tests.get((one.system, one.partition, one.benchmark))
        return replace(bad, owner=owner or bad.owner)


def _gone(watched: Sequence[WatchedSeries], known: Collection[Subject], now_ns: int) -> dict[Subject, str]:
    newest = {subject_of(one.series.key): one.series.points[-1].night.created_ns for one in watched}
    reason = f"not measured for {GONE_NS // DAY_NS} days"
    return {subject: reason for subject in known if newest.get(subject, 0) < now_ns - GONE_NS}


def _of_earlier_epochs(watched: Sequence[WatchedSeries], known: Mapping[Subject, Bad]) -> dict[Subject, str]:
    """Return the subjects whose series began a new epoch since they were announced: nothing tonight compares with that."""
    found = {}
    for one in watched:
        opened = known.get(subject_of(one.series.key))
        if opened is not None and one.began is not None and one.began.at_ns > opened.last_ns:
            found[opened.subject] = f"a new epoch began: {one.began.what}"
    return found


def _measured(
    watched: Sequence[WatchedSeries], latest: Mapping[Subject, NightlyRecords], now_ns: int
) -> Mapping[str, frozenset[str]]:
    """Return the benchmarks of each system, each with its partition; not those that were given up."""
    found: dict[str, set[str]] = {}
    for one in watched:
        if one.series.points[-1].night.created_ns >= now_ns - RETIRED_NS:
            key = one.series.key
            found.setdefault(key.system, set()).add(f"{key.partition}:{key.benchmark}")
    for subject, nights in latest.items():
        if nights.newest.created_ns >= now_ns - RETIRED_NS:
            found.setdefault(subject.system, set()).add(f"{subject.partition}:{subject.benchmark}")
    return {system: frozenset(names) for system, names in found.items()}


def _losses_a_night(watched: Sequence[WatchedSeries]) -> Mapping[str, float]:
    """Return how many series of each system become worse in a night, over all nights that are looked at; half a one at least in all."""
    losses: dict[str, float] = {}
    nights: dict[str, int] = {}
    for one in watched:
        system = one.series.key.system
        losses[system] = losses.get(system, 0.5) + sum(shift.worse for shift in one.shifts)
        nights[system] = max(nights.get(system, 1), len(one.series.points))
    return {system: losses[system] / nights[system] for system in losses}


class _Tee:
    """A source that remembers the re-runs of what it hands on, which are no part of what is watched over nights."""

    def __init__(self, source: Source, branch: str) -> None:
        self._source = source
        self._branch = branch
        self.reruns: dict[tuple[SeriesKey, str], list[float]] = {}

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield what the source has."""
        return self._source.nights(since_ns, until_ns)

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield what the source has."""
        for one in self._source.series(since_ns, until_ns, system=system, benchmark=benchmark):
            for point in one.points if one.judged else ():
                if point.night.attempt and feeds(replace(point.night, attempt=0), self._branch):
                    self.reruns.setdefault((one.key, point.night.session), []).append(point.value)
            yield one
