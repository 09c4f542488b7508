"""Which nights are missing: benchmarks that the schedule expects and that were not recorded, and runs that broke. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import DAY_NS, NIGHT_NS, Bad, Subject
from pytest_mlhpc.history.series import Night, feeds
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE
from pytest_mlhpc.store.text import minutes, one_line
from pytest_mlhpc.store.verdict import Verdict

#: A benchmark of which nothing was recorded for so long, while others of its system were, is no longer expected.
RETIRED_NS = 14 * DAY_NS
#: Two nightly records are of two nights if they are farther apart than this.
APART_NS = 12 * 3600 * 10**9
#: Failures of a run whose figures are compared over nights elsewhere, or of one that nobody waited for. A promise that is not met
#: (``below_reference``) is no change of level, and is told here.
_NOT_BROKEN = frozenset(
    {Verdict.REGRESSED, Verdict.DRIFTED, "no_baseline", "cancelled", "detached", "cannot_lower"}
)
_BROKEN = frozenset(FAILURES) - _NOT_BROKEN
#: How a reason begins of what was submitted and did not run.
NOT_RUN = "did not run"
#: Told by the message about the nodes.
_NODES = "unfit_nodes"


@dataclass
class Seen:
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
        return next((night.created_ns for night in reversed(self.nights) if _ran(night)), 0)


@dataclass(frozen=True)
class Missing:
    """``bad`` are stale or broken; ``known`` those of which the nights say so or not; ``gone`` are no longer expected."""

    bad: dict[Subject, Bad]
    known: frozenset[Subject]
    gone: dict[Subject, str]


def nightly(nights: Iterable[Night], default_branch: str) -> dict[Subject, Seen]:
    """Return the nightly first attempts of each benchmark, oldest first, by a subject of kind ``stale``."""
    found: dict[Subject, Seen] = {}
    for night in nights:
        if night.purpose == "nightly" and feeds(night, default_branch):
            found.setdefault(_subject(Kind.STALE, night), Seen()).nights.append(night)
    return found


def stale(seen: dict[Subject, Seen], now_ns: int, limit_ns: int = NIGHT_NS) -> Missing:
    """Return the benchmarks of which nothing was recorded for *limit_ns*, or only that they did not run.

    Where nothing at all was recorded of a partition, all its benchmarks are stale together as soon as the newest is.
    """
    newest: dict[tuple[str, str], int] = {}
    for subject, one in seen.items():
        place = subject.system, subject.partition
        newest[place] = max(newest.get(place, 0), one.newest.created_ns)
    bad, gone = {}, {}
    expected = {subject: one for subject, one in seen.items() if one.expected}
    for subject, one in expected.items():
        silent = newest[subject.system, subject.partition] < now_ns - limit_ns
        if not silent and one.newest.created_ns < now_ns - RETIRED_NS:
            gone[subject] = (
                f"not recorded for {RETIRED_NS // DAY_NS} days while others were: no longer expected"
            )
        elif one.newest.created_ns < now_ns - limit_ns:
            bad[subject] = _silent(subject, one, limit_ns)
        elif not _ran(one.newest) and one.newest.verdict != _NODES:
            bad[subject] = _not_run(subject, one)
    return Missing(bad, frozenset(expected), gone)


def broken(seen: dict[Subject, Seen]) -> Missing:
    """Return the benchmarks whose newest record is of a run that broke; those that did not run say nothing new."""
    bad, known = {}, set()
    for one in seen.values():
        ran = [night for night in one.nights if _ran(night)]
        if not ran:
            continue
        subject = _subject(Kind.FAILURE, ran[-1])
        known.add(subject)
        if ran[-1].verdict in _BROKEN:
            bad[subject] = _broken(subject, ran)
    return Missing(bad, frozenset(known), {})


def _silent(subject: Subject, one: Seen, limit_ns: int) -> Bad:
    last_ns = one.newest.created_ns
    reason = f"nothing recorded since {minutes(last_ns)}"
    if not _ran(one.newest):
        reason += f", which was {_words(one.newest)}"
    return Bad(subject, last_ns, last_ns + limit_ns, reason=reason)


def _not_run(subject: Subject, one: Seen) -> Bad:
    first = _first_of_streak(one.nights, lambda night: not _ran(night))
    before_ns = one.measured_ns()
    return Bad(subject, before_ns, first.created_ns, reason=f"{NOT_RUN}: {_words(one.newest)}")


def _broken(subject: Subject, ran: Sequence[Night]) -> Bad:
    first = _first_of_streak(ran, lambda night: night.verdict in _BROKEN)
    good = [night.created_ns for night in ran if night.created_ns < first.created_ns]
    newest = ran[-1]
    return Bad(
        subject, good[-1] if good else 0, first.created_ns, nodes=newest.nodes, reason=_words(newest)
    )  # fmt: skip


def _first_of_streak(nights: Sequence[Night], bad: Callable[[Night], bool]) -> Night:
    """Return the first of the bad nights at the end."""
    first = nights[-1]
    for night in reversed(nights):
        if not bad(night):
            break
        first = night
    return first


def _ran(night: Night) -> bool:
    return night.verdict not in INFRASTRUCTURE


def _words(night: Night) -> str:
    text = night.failure.removeprefix(f"{night.verdict}: ")
    return one_line(f"{night.verdict}: {text}" if text else night.verdict, 300)


def _subject(kind: Kind, night: Night) -> Subject:
    """Device model and fingerprint are left out: a run that did not begin knows neither."""
    return Subject(kind, night.system, night.partition, night.environment, benchmark=night.benchmark)
