"""What a whole site hears in 60 nights: the judge, the alert and its incidents on real noise, drops planted into some series.

Each series of the site is one of the record, begun at another of its nights (round its end: nothing changed in it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.history_worlds import ATTEMPTS, Floats, judged_nights
from benchmarks.report import Row
from benchmarks.verdict_noise import Noise, planted_runs
from pytest_mlhpc.alert.channels.base import IncidentState
from pytest_mlhpc.alert.incidents import advance, place
from pytest_mlhpc.alert.messages import message_of, suspects_code
from pytest_mlhpc.alert.model import DAY_NS, Book, Incident
from pytest_mlhpc.alert.observe import Question, observe
from pytest_mlhpc.alert.slower_series import Rules
from pytest_mlhpc.history.series import Night, Point, Series
from pytest_mlhpc.judge.losses import limits_for
from pytest_mlhpc.store.record import SeriesKey

#: Nights of history before the site is watched, nights that are watched, and the last of them in which a drop may begin.
BEFORE, WATCHED, LAST = 40, 60, 45
NIGHTS = BEFORE + WATCHED
#: Planted drops: how many, how large. A drop is found within so many nights.
DROPS, SIZE, SOON = 100, 0.05, 14
MATTERS = 0.05


@dataclass(frozen=True)
class Site:
    """``runs`` (series x nights x attempts), the night of each series' drop (NIGHTS: none), the key of each series."""

    runs: Floats
    drops: NDArray[np.int64]
    keys: Sequence[SeriesKey]


@dataclass(frozen=True)
class Heard:
    """What people were told: messages of something new, those of no planted drop; of the drops how many were named, joined an incident in silence; claims of a cause, and wrong ones."""

    series: int
    messages: int
    false: int
    drops: int
    named: int
    silent: int
    claims: int
    wrong: int
    spells: int  #: tests that begin to fail falsely
    red_nights: int  #: nights in which one fails falsely


def site(noise: Sequence[Noise], systems: int, series: int, drops: int, seed: int) -> Site:
    """Return a site of *systems* with *series* each, *drops* of 5 % planted, each into one series in one night."""
    draw = np.random.default_rng([seed, systems, series])
    total = systems * series
    runs = np.empty((total, NIGHTS, ATTEMPTS))
    begins = np.full(total, NIGHTS)
    begins[draw.choice(total, drops, replace=False)] = draw.integers(BEFORE, BEFORE + LAST, drops)
    for row in range(total):
        one = noise[int(draw.integers(len(noise)))]
        turned = replace(one, values=np.roll(one.values, -int(draw.integers(len(one.values))))[:NIGHTS])
        runs[row] = planted_runs(turned, f"step {100 * SIZE:g}", int(begins[row]), draw)
    keys = [
        SeriesKey(f"system-{at}", "standard", "default", "", f"test_{number:04d}", "rate")
        for at in range(systems)
        for number in range(series)
    ]
    return Site(runs, begins, keys)


class Records:
    """A site's nights as a source of history, up to the night that is looked at."""

    def __init__(self, made: Site, reruns: NDArray[np.int64], failed: NDArray[np.bool_]) -> None:
        self.now_ns = 0
        self._series = [
            Series(key, "1/s", "higher", judged=True, points=tuple(_points(key, made.runs[row], reruns[row], failed[row])))
            for row, key in enumerate(made.keys)
        ]  # fmt: skip

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:  # noqa: ARG002 - a Source
        """Yield nothing: no run broke, no node was left out."""
        return iter(())

    def series(
        self,
        since_ns: int = 0,  # noqa: ARG002 - a Source
        until_ns: int | None = None,
        *,
        system: str = "",  # noqa: ARG002
        benchmark: str = "",  # noqa: ARG002
    ) -> Iterator[Series]:
        """Yield each series up to now."""
        for one in self._series:
            points = tuple(
                point for point in one.points if point.night.created_ns < (until_ns or self.now_ns)
            )
            yield replace(one, points=points)


def _points(
    key: SeriesKey, runs: Floats, reruns: NDArray[np.int64], failed: NDArray[np.bool_]
) -> Iterator[Point]:
    for night in range(len(runs)):
        verdict = "regressed" if failed[night] else "passed"
        for attempt in range(1 + int(reruns[night])):
            yield Point(_night(key, night, attempt, verdict), float(runs[night, attempt]))


def _night(key: SeriesKey, night: int, attempt: int, verdict: str) -> Night:
    return Night(
        id=f"{key.system} {key.benchmark} {night} {attempt}", session=f"{key.system}-{night}", node_id=key.benchmark,
        system=key.system, partition=key.partition, environment=key.environment, device_model="EPYC", fingerprint="",
        benchmark=key.benchmark, definition="w a=1", attempt=attempt, created_ns=(night + 1) * DAY_NS + attempt,
        verdict=verdict, purpose="nightly", branch="main", commit=f"{night:040x}",
    )  # fmt: skip


def heard(made: Site, rules: Rules, judged: tuple[NDArray[np.bool_], NDArray[np.int64]]) -> Heard:
    """Go through the nights as `mlhpc alert send` does, and count what is told."""
    failed, reruns = judged
    records = Records(made, reruns, failed)
    begins = {
        f"{key.system}:{key.partition}:{key.benchmark}": int(at)
        for key, at in zip(made.keys, made.drops, strict=True)
    }
    named: dict[str, int] = {}
    joined: dict[str, int] = {}
    messages = false = claims = wrong = 0
    book = Book(last_ns=BEFORE * DAY_NS)
    for night in range(BEFORE, NIGHTS):
        now_ns = records.now_ns = (night + 1) * DAY_NS + 3600 * 10**9
        found = observe(records, book, Question(now_ns, rules=rules))
        book, changes = advance(book, found.observation, found.companions)
        for change in changes:
            if change.state not in {IncidentState.NEW, IncidentState.WORSE}:
                continue
            text = message_of(change.incident, change.state, now_ns).text
            shown = [name for name in change.incident.named if name.replace(":test", " test") in text]
            fresh = [name for name in shown if name not in named]
            for name in shown:
                named.setdefault(name, night)
            messages += 1
            false += not any(begins[name] <= night for name in fresh or shown)
            right = _cause_is_right(change.incident)
            claims += right is not None
            wrong += right is False
        for incident in book.incidents:
            for member in incident.members:
                joined.setdefault(place(member.now), night)
    planted = {name: at for name, at in begins.items() if at < NIGHTS}
    in_time = {name for name, at in planted.items() if at <= named.get(name, NIGHTS) < at + SOON}
    silent = {
        name
        for name, at in planted.items()
        if name not in in_time and at <= joined.get(name, NIGHTS) < at + SOON
    }
    clean = failed & (np.arange(NIGHTS) < made.drops[:, None])
    begun = clean[:, BEFORE:] & ~failed[:, BEFORE - 1 : -1]
    return Heard(
        len(made.keys), messages, false, len(planted), len(in_time), len(silent), claims, wrong,
        int(begun.sum()), int(clean[:, BEFORE:].any(axis=0).sum()),
    )  # fmt: skip


def _cause_is_right(incident: Incident) -> bool | None:
    """Return whether the cause that a message gives is right; None where it gives none. Here each drop stands alone."""
    return False if suspects_code(incident) or incident.scope in {"all", "code"} else None


def measure(
    noise: Sequence[Noise],
    systems: int,
    series: int,
    drops: int,
    *,
    rules: Rules | None = None,
    seed: int = 0,
) -> Heard:
    """Return what is heard of one site."""
    made = site(noise, systems, series, drops, seed)
    judged = judged_nights(made.runs, limits_for(systems * series, MATTERS))
    return heard(made, rules or Rules(), judged)


#: Systems and series of each, planted drops, and how many such sites are looked at. Red spells are rare and may last for weeks:
#: few small sites say little about them.
SITES = ((1, 50, 5, 20), (1, 600, 30, 1), (1, 2_000, 100, 1), (10, 200, 100, 1))
#: The same of a quick run.
SMALL = ((1, 50, 5, 4), (2, 50, 5, 2))


def rows(noise: Sequence[Noise], *, quick: bool = False) -> Iterator[Row]:
    """Yield what each site hears."""
    for systems, series, drops, count in SMALL if quick else SITES:
        every = [measure(noise, systems, series, drops, seed=seed) for seed in range(count)]
        nights = count * WATCHED

        def total(name: str, every: Sequence[Heard] = tuple(every)) -> float:
            return sum(getattr(one, name) for one in every)

        planted = total("drops")
        words = (
            f"red on {total('red_nights'):.0f} of {nights} mornings without reason ({total('spells'):.0f} spells); {total('messages'):.0f} "
            f"messages, {total('false'):.0f} of them of nothing planted; of {planted:.0f} drops of {SIZE:.0%} "
            f"{100 * total('named') / planted:.0f} % named within {SOON} nights, {total('silent'):.0f} joined in silence; "
            f"{total('wrong'):.0f} of {total('claims'):.0f} causes wrong"
        )
        what = f"{count} x {systems} system{'s' * (systems > 1)}, {series:,} series each, {WATCHED} nights"
        yield Row(what, "-", words, None)
