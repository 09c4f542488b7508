"""From records to accepted values: of runs that were recorded, or of runs made for the purpose."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.entry import Entry, environment_digest
from pytest_mlhpc.judge.judge import make_entry
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record, SeriesKey, user_name
from pytest_mlhpc.store.text import iso

#: Verdicts of whole measurements: what they judge may be wrong, what they measured is not.
ACCEPTABLE = frozenset({
    "passed", "improved", "new", "suspect", "inconclusive", "regressed", "drifted", "no_baseline", "reruns_incomplete",
})  # fmt: skip


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


def accept(book: BaselineBook, index: Index, test: str, reason: str) -> list[Accepted]:
    """Accept the last run of a test with all its attempts, one record by its id, or all that is new in a session.

    *test* is a node id, or an identity: then it is accepted wherever its last session ran it.

    Raises:
        UsageError: nothing of that name was recorded, or what was recorded is no whole measurement.
    """
    if records := index.newest(session=test, limit=_MOST):
        return _accept_new(book, records, reason)
    if newest := index.newest(test=test, limit=1):
        records = index.newest(session=newest[0].session, test=test, limit=_MOST)
        found = [one for one in records if one.measurement or not one.attempt]
    else:
        found = list(index.find(test)) if len(test) >= _LEAST_ID else []
        if len(found) > 1:
            raise UsageError(f"several records' ids start with {test!r}")
    if not found:
        raise UsageError(
            f"nothing was recorded for {test!r}: no such test or record; see `mlhpc records list`"
        )
    broken = sorted(
        {one.verdict for one in found if one.measurement is None or one.verdict not in ACCEPTABLE}
    )
    if broken:
        raise UsageError(
            f"{test}: its last run ended as {', '.join(broken)}; only a whole measurement can be accepted"
        )
    return [one for records in _by_test(found) for one in put(book, records, reason)]


def _accept_new(book: BaselineBook, records: Sequence[Record], reason: str) -> list[Accepted]:
    """Accept of the *records* of one session all series that have no accepted baseline, and ended well."""
    accepted = []
    for found in _by_test(records):
        if not all(one.measurement and one.verdict in _WELL and neutral(one.overrides) for one in found):
            continue
        first = found[0]
        known = {
            name: book.lookup(first.series(name), first.epoch, provisional=False) for name in first.judged
        }
        new = [name for name, entry in known.items() if not entry or changed(entry.epoch, first.epoch)]
        accepted += put(book, found, reason, new) if new else []
    if not accepted:
        raise UsageError("nothing of that session is new: all that ended well has an accepted baseline")
    return accepted


def put(
    book: BaselineBook, records: Sequence[Record], reason: str, metrics: Sequence[str] | None = None
) -> list[Accepted]:
    """Put the medians of *records*, all of one test, in the book: of its judged metrics, or of *metrics* alone.

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
        old = book.lookup(key, first.epoch)
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
_MOST = 1_000_000
_WELL = frozenset({"passed", "improved", "suspect", "inconclusive", "new"})

#: A prefix of a record's id shorter than this names too many.
_LEAST_ID = 8


def _by_test(records: Iterable[Record]) -> Iterable[list[Record]]:
    """Return records with those of one test on one target together."""
    tests: dict[str, list[Record]] = {}
    for record in records:
        tests.setdefault(record.node_id, []).append(record)
    return tests.values()
