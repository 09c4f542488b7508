"""Tonight's look at the history: all that alerts are made of, from any source."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.expect import RETIRED_NS, Seen, broken, nightly, stale
from pytest_mlhpc.alert.grouping import by_system, by_time
from pytest_mlhpc.alert.model import DAY_NS, Bad, Book, Observation, Subject
from pytest_mlhpc.alert.slower import Known, Rules, companion, regressions, subject_of
from pytest_mlhpc.alert.state import Companions, open_subjects
from pytest_mlhpc.alert.unfit import unfit
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.nightly import Look, Watched, watch
from pytest_mlhpc.history.series import Night, Series, Source, feeds
from pytest_mlhpc.store.record import SeriesKey

#: What is looked at: enough for a level, little enough that a forgotten one does not matter.
WINDOW_NS = 150 * DAY_NS
#: Nights of which runs and nodes are looked at.
RECENT_NS = 60 * DAY_NS
#: An open regression of a series without a figure for so long is over: the benchmark is no more.
GONE_NS = 30 * DAY_NS
#: How far a figure of another system must stand out to be a sign that the code is to blame.
ELSEWHERE_SIGMAS = 3.5


@dataclass(frozen=True)
class Question:
    """What to look for. ``expect``: missing nights are bad, too."""

    now_ns: int
    branch: str = "main"
    rules: Rules = field(default_factory=Rules)
    expect: bool = False
    stale_ns: int = 26 * 3600 * 10**9
    events: Sequence[Event] = ()
    cache: Path | None = None


@dataclass(frozen=True)
class Found:
    """The answer; ``empty``: there is no history at all."""

    observation: Observation
    companions: Companions
    empty: bool


def observe(source: Source, book: Book, question: Question) -> Found:
    """Return what *source* says of now; *book* says what is known as bad.

    Raises:
        StoreError: the history cannot be read.
        UsageError: a package is missing.
    """
    now_ns = question.now_ns
    look = Look(
        since_ns=now_ns - WINDOW_NS, until_ns=now_ns + 1, default_branch=question.branch, judged_only=True
    )
    tee = _Tee(source, question.branch)
    watched = tuple(watch(tee, look, question.events, question.cache))
    opened = {subject: bad for subject, bad in open_subjects(book).items() if subject.kind is Kind.REGRESSION}
    accepted = {one.subject: one.since_ns for one in book.accepted}
    known = Known(opened, accepted, fresh=book.last_ns == 0)
    bad = regressions(watched, tee.reruns, known, now_ns, question.rules)
    subjects = {subject_of(one.series.key) for one in watched}
    gone = {**_gone(watched, opened, now_ns), **_of_earlier_epochs(watched, opened)}
    nights = tuple(source.nights(now_ns - RECENT_NS, now_ns + 1))
    seen = nightly(nights, question.branch)
    parts = [broken(seen), unfit(nights, now_ns)]
    if question.expect:
        parts.append(stale(seen, now_ns, question.stale_ns))
    for part in parts:
        bad.update(part.bad)
        gone.update(part.gone)
        subjects |= part.known
    for one in book.accepted:
        if one.subject in bad and bad[one.subject].last_ns <= one.at_ns:
            gone[one.subject] = f"accepted by {one.by}: {one.reason}"
    bad = {subject: one for subject, one in bad.items() if subject not in gone}
    measured = _measured(watched, seen, now_ns)
    observation = Observation(now_ns, bad, frozenset(subjects), gone, measured)
    return Found(observation, _Companions(watched, question.rules.smallest), empty=not watched and not nights)


def _gone(watched: Sequence[Watched], known: Collection[Subject], now_ns: int) -> dict[Subject, str]:
    newest = {subject_of(one.series.key): one.series.points[-1].night.created_ns for one in watched}
    reason = f"not measured for {GONE_NS // DAY_NS} days"
    return {subject: reason for subject in known if newest.get(subject, 0) < now_ns - GONE_NS}


def _of_earlier_epochs(watched: Sequence[Watched], known: Mapping[Subject, Bad]) -> dict[Subject, str]:
    """Return the subjects whose series began a new epoch since they were told: nothing tonight compares with that."""
    found = {}
    for one in watched:
        opened = known.get(subject_of(one.series.key))
        if opened is not None and one.began is not None and one.began.at_ns > opened.last_ns:
            found[opened.subject] = f"a new epoch began: {one.began.what}"
    return found


def _measured(
    watched: Sequence[Watched], seen: Mapping[Subject, Seen], now_ns: int
) -> Mapping[str, frozenset[str]]:
    """Return the benchmarks of each system, each with its partition; not those that were given up."""
    found: dict[str, set[str]] = {}
    for one in watched:
        if one.series.points[-1].night.created_ns >= now_ns - RETIRED_NS:
            key = one.series.key
            found.setdefault(key.system, set()).add(f"{key.partition}:{key.benchmark}")
    for subject, nights in seen.items():
        if nights.newest.created_ns >= now_ns - RETIRED_NS:
            found.setdefault(subject.system, set()).add(f"{subject.partition}:{subject.benchmark}")
    return {system: frozenset(names) for system, names in found.items()}


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


class _Companions:
    """What became slower with what, among all series of tonight."""

    def __init__(self, watched: Sequence[Watched], smallest: float) -> None:
        self._watched = watched
        self._smallest = smallest

    def __call__(self, bads: Sequence[Bad]) -> Sequence[Bad]:
        """Look once for each system and night, as its typical loss, whatever the number of series."""
        slower = [bad for bad in bads if bad.subject.kind is Kind.REGRESSION]
        known = {bad.subject for bad in slower}
        found: dict[Subject, Bad] = {}
        for part in by_time(by_system(slower)):
            system = part[0].subject.system
            names = {bad.subject.benchmark for bad in part}
            first_ns = max(bad.first_ns for bad in part)
            last_ns = max(bad.last_ns for bad in part)
            least = max(self._smallest, statistics.median(bad.worse_by for bad in part) / 2)
            for one in self._watched:
                here = one.series.key.system == system
                if not here and one.series.key.benchmark not in names:
                    continue
                sigmas = 2.5 if here else ELSEWHERE_SIGMAS
                more = companion(one, min(first_ns, last_ns - 1), last_ns, least, sigmas)
                if more is not None and more.subject not in known:
                    found.setdefault(more.subject, more)
        return list(found.values())
