"""From records to accepted values, and how the series of a session stand to what is accepted."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.judge.baseline_files import Entry, environment_digest
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.judge import accept_command, make_entry
from pytest_mlhpc.judge.rules import NIGHTS
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import AGAINST, Record, SeriesKey, user_name
from pytest_mlhpc.store.text import iso
from pytest_mlhpc.store.verdict import GOOD, NOTABLE, WORSE, Judgement, Verdict

#: Verdicts of whole measurements: what they judge may be wrong, what they measured is not.
ACCEPTABLE = frozenset({*GOOD, *NOTABLE, *WORSE, "no_baseline", "reruns_incomplete"})


@dataclass(frozen=True)
class Accepted:
    """One entry that was put in the book, and the one that it replaces."""

    key: SeriesKey
    entry: Entry
    old: Entry | None


def require_reason(reason: str) -> None:
    """Refuse an empty reason.

    Raises:
        UsageError: it is empty, or the placeholder that we print.
    """
    if not reason.strip() or reason.strip() == "TEXT":
        raise UsageError("--reason must say why the new value is right, for those who review the change")


def accept(
    book: BaselineBook, index: Index, test: str, reason: str, settled: Mapping[SeriesKey, Entry] | None = None
) -> list[Accepted]:
    """Accept the last run of a test with all its attempts, one record by its id, or all that is new in a session.

    *test* is a node id, with its target or without, or an identity: then it is accepted wherever its last session ran it; a name of a test function
    stands for all its identities, if they are in one file. Of a session's new series,
    those of *settled* are accepted with the level of their nights, which is better known than that of one run.

    Raises:
        UsageError: nothing of that name was recorded, or what was recorded is no whole measurement.
    """
    if records := index.newest(session=test, limit=_ALL_RECORDS):
        return _accept_new(book, records, reason, settled or {})
    if newest := index.newest(test=test, limit=1, compared=False):
        records = index.newest(session=newest[0].session, test=test, limit=_ALL_RECORDS)
        found = [one for one in records if one.measurement or not one.attempt]
    else:
        found = list(index.find(test)) if len(test) >= _LEAST_ID else []
        if len(found) > 1:
            raise UsageError(f"several records' ids start with {test!r}")
    if not found:
        return [
            one
            for identity in _identities(index, test)
            for one in accept(book, index, identity, reason, settled)
        ]
    broken = sorted(
        {one.verdict for one in found if one.measurement is None or one.verdict not in ACCEPTABLE}
    )
    if broken:
        raise UsageError(
            f"{test}: its last run ended as {', '.join(broken)}; only a whole measurement can be accepted"
        )
    levels = settled if found[0].verdict == Verdict.WRONG_BASELINE else None
    return [one for records in _by_test(found) for one in put(book, records, reason, levels=levels)]


def accept_series(book: BaselineBook, index: Index, keys: Iterable[SeriesKey], reason: str) -> list[Accepted]:
    """Accept of each series what its newest run measured, with all attempts of its session.

    A series whose newest run is no whole measurement, or not in this store, is left as it is.
    """
    accepted = []
    for key in keys:
        first = index.newest_of(key)
        if first is None or not _is_whole(first):
            continue
        found = index.newest(session=first.session, test=first.node_id, limit=_ALL_RECORDS)
        accepted += put(book, [one for one in found if _is_whole(one)], reason, [key.metric])
    return accepted


def _is_whole(record: Record) -> bool:
    return record.measurement is not None and record.verdict in ACCEPTABLE and record.purpose != AGAINST


def _identities(index: Index, function: str) -> list[str]:
    """Return the recorded identities of the test function that is called so, or has this node id on some target.

    Raises:
        UsageError: there is none, or there are several in different files.
    """
    known = index.benchmarks()
    found = [one for one in known if "::" in one and _function(one) == function]
    found = found or index.identities_of(function)
    if len({one.rpartition("::")[0] for one in found}) > 1:
        raise UsageError(f"{function!r} is a test in several files: {', '.join(found)}")
    if not found:
        meant = did_you_mean(function, dict.fromkeys(word for one in known for word in (one, _function(one))))
        raise UsageError(
            f"nothing was recorded for {function!r}: no such test or record{meant}; see `mlhpc records list`"
        )
    return found


def _function(identity: str) -> str:
    return identity.rpartition("::")[2].partition("[")[0]


def _accept_new(
    book: BaselineBook, records: Sequence[Record], reason: str, settled: Mapping[SeriesKey, Entry]
) -> list[Accepted]:
    """Accept of the *records* of one session all series that have no accepted baseline, and ended well."""
    accepted = []
    for found in _by_test(records):
        if not all(
            one.measurement and one.verdict in _ACCEPTED_VERDICTS and neutral(one.overrides) for one in found
        ):
            continue
        first = found[0]
        known = {
            name: book.lookup(first.series(name), first.epoch, provisional=False) for name in first.judged
        }
        new = [name for name, entry in known.items() if not entry or changed(entry.epoch, first.epoch)]
        if first.verdict == Verdict.WRONG_BASELINE:
            new += [name for name in known if name not in new and first.series(name) in settled]
        accepted += put(book, found, reason, new, settled) if new else []
    if not accepted:
        raise UsageError("nothing of that session is new: all that ended well has an accepted baseline")
    return accepted


def put(
    book: BaselineBook,
    records: Sequence[Record],
    reason: str,
    metrics: Sequence[str] | None = None,
    levels: Mapping[SeriesKey, Entry] | None = None,
) -> list[Accepted]:
    """Put the medians of *records*, all of one test, in the book: of its judged metrics, or of *metrics* alone.

    Where *levels* has what the nights of a series say, that is put in.

    Raises:
        UsageError: they are of different machines or benchmarks, or judge nothing.
    """
    first = records[0]
    if len({(record.series(), record.epoch) for record in records}) > 1:
        raise UsageError(
            f"{first.node_id}: its records are of different machines or benchmarks; accept them one by one"
        )
    if not first.judged:
        raise UsageError(f"{first.node_id}: it judges no metric, so there is nothing to accept")
    measurements = [record.measurement for record in records if record.measurement]
    accepted = []
    for metric in first.judged if metrics is None else metrics:
        key = first.series(metric)
        old, level = book.lookup(key, first.epoch), (levels or {}).get(key)
        if level is not None and not changed(level.epoch, first.epoch):
            entry = replace(level, reason=f"{reason.strip()} ({level.reason})")
            book.put(key, entry)
            accepted.append(Accepted(key, entry, old))
            continue
        try:
            entry = make_entry(
                metric,
                measurements,
                old,
                local=bool(first.fingerprint),
                accepted_by=user_name(),
                reason=reason.strip(),
                date=iso(time.time_ns()),
                environment=environment_digest(measurements[0].environment),
                definition=first.definition,
            )
        except ValueError as error:
            raise UsageError(f"{first.node_id}: {error}") from error
        book.put(key, entry)
        accepted.append(Accepted(key, entry, old))
    return accepted


#: Most records of a session, and verdicts of those that may be accepted without a look at each.
_ALL_RECORDS = 1_000_000
_ACCEPTED_VERDICTS = frozenset({*GOOD, *NOTABLE})

#: A prefix of a record's id shorter than this names too many.
_LEAST_ID = 8


def _by_test(records: Iterable[Record]) -> Iterable[list[Record]]:
    """Return records with those of one test on one target together."""
    tests: dict[str, list[Record]] = {}
    for record in records:
        tests.setdefault(record.node_id, []).append(record)
    return tests.values()


class BaselineStanding(enum.Enum):
    """What a judged figure that ended well has to do with the baseline files."""

    NEW = "new"
    CHANGED = "changed"  #: new, as what is computed is another than before
    PROVISIONAL = "provisional"  #: judged by a provisional baseline of this machine
    SETTLED = "settled"  #: judged by the level of its first nights, which is in no baseline file
    WRONG = "wrong"  #: its accepted baseline is another level than that of a month of nights
    WRITTEN = "written"  #: accepted by ``--mlhpc-baseline=update``
    AGREES = "agrees"  #: with its accepted baseline


#: What waits to be accepted.
WAITING = frozenset(
    {
        BaselineStanding.NEW,
        BaselineStanding.CHANGED,
        BaselineStanding.PROVISIONAL,
        BaselineStanding.SETTLED,
        BaselineStanding.WRONG,
    }
)
#: Changes that the line names; the rest is counted.
_SHOWN_CHANGES = 3

#: (node id, metric) -> how it stands.
Standings = Mapping[tuple[str, str], BaselineStanding]

_COMPARED = frozenset({Verdict.PASSED, Verdict.IMPROVED, Verdict.WRONG_BASELINE, Verdict.INCONCLUSIVE})


def standings_of(
    node_id: str, judgement: Judgement, accepted: Collection[str], *, update: bool, local: bool = False
) -> dict[tuple[str, str], BaselineStanding]:
    """Return how the metrics of one run stand; those of *accepted* had an accepted baseline of its epoch before it.

    Nothing of a run that failed waits to be accepted: the whole run would be.
    """
    if not update and judgement.verdict not in {*_COMPARED, Verdict.NEW}:
        return {}
    found = {}
    for metric in judgement.metrics:
        if metric.verdict is Verdict.NEW:
            new = BaselineStanding.CHANGED if judgement.epoch else BaselineStanding.NEW
            found[node_id, metric.name] = BaselineStanding.WRITTEN if update else new
        elif metric.verdict is Verdict.WRONG_BASELINE:
            found[node_id, metric.name] = BaselineStanding.WRONG
        elif metric.verdict in _COMPARED:
            other = BaselineStanding.PROVISIONAL if local else BaselineStanding.SETTLED
            found[node_id, metric.name] = BaselineStanding.AGREES if metric.name in accepted else other
    return found


def recorded_line(
    standings: Standings, epochs: Mapping[str, str], session: str, options: Sequence[str], *, apart: bool
) -> str:
    """Return what of a session waits to be accepted, and how; empty if nothing does.

    *epochs* has what changed of tests (by node id) that began a new epoch. What was measured *apart*, with other settings or on each node by itself, is no baseline for others.
    """
    counts = Counter(standings.values())
    waiting = [node_id for (node_id, _), one in standings.items() if one in WAITING]
    if not waiting:
        return ""
    new, provisional = counts[BaselineStanding.NEW], counts[BaselineStanding.PROVISIONAL]
    summaries = [f"{new} new series recorded"] * bool(new)
    if changed := counts[BaselineStanding.CHANGED]:
        begin = "begins" if changed == 1 else "begin"
        summaries.append(
            f"{changed} series {begin} a new epoch, not compared with earlier ones ({_changes(epochs)})"
        )
    summaries += [f"{provisional} series judged by provisional baselines of this machine"] * bool(provisional)
    if settled := counts[BaselineStanding.SETTLED]:
        summaries.append(
            f"{settled} series judged by the level of their first {NIGHTS} nights, not in git yet"
        )
    if wrong := counts[BaselineStanding.WRONG]:
        summaries.append(
            f"{wrong} {'baseline is' if wrong == 1 else 'baselines are'} wrong: a month without a change lies elsewhere"
        )
    # A test by its name is accepted as its last run measured it; a session takes what its nights have settled.
    target = waiting[0] if len(set(waiting)) == 1 and not counts[BaselineStanding.SETTLED] else session
    return ", ".join(summaries) + ("" if apart else f"; to accept: {accept_command(target, options)}")


def _changes(epochs: Mapping[str, str]) -> str:
    """Return what changed, of tests together of which the same did."""
    tests: dict[str, list[str]] = {}
    for node_id, what in epochs.items():
        tests.setdefault(what, []).append(node_id)
    shown = [
        f"{nodes[0].rpartition('::')[2] if len(nodes) == 1 else f'{len(nodes)} tests'}: {what}"
        for what, nodes in tests.items()
    ]
    more = len(shown) - _SHOWN_CHANGES
    return "; ".join(shown[:_SHOWN_CHANGES]) + (f"; and {more} more changes" if more > 0 else "")


def written_line(standings: Standings, epochs: Mapping[str, str], files: Sequence[str]) -> str:
    """Return what ``--mlhpc-baseline=update`` wrote to which *files*, or why nothing; of which tests an epoch began."""
    counts = Counter(standings.values())
    agree = f"{counts[BaselineStanding.AGREES]} series agree with their baselines, which stay as they are"
    if files:
        written = f"baselines of {counts[BaselineStanding.WRITTEN]} series written to {', '.join(files)}"
        written += f"; new epochs begin: {_changes(epochs)}" if epochs else ""
        return f"{written}; {agree}" if counts[BaselineStanding.AGREES] else written
    return f"no baseline written: {agree if counts[BaselineStanding.AGREES] else 'no test gave a figure to accept'}"
