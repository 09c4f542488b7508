"""From records to accepted values: of runs that were recorded, or of runs made for the purpose."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.entry import Entry, environment_digest
from pytest_mlhpc.judge.judge import make_entry
from pytest_mlhpc.provenance import user_name
from pytest_mlhpc.results.dates import iso
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record, SeriesKey

#: Verdicts of whole measurements: what they judge may be wrong, what they measured is not.
ACCEPTABLE = frozenset({
    "passed", "improved", "new", "inconclusive", "regressed", "drifted", "no_baseline", "reruns_incomplete",
})  # fmt: skip

#: Exit codes of pytest after which the runs so far count: all passed, or some failed their judgement.
_MEASURED = (0, 1)


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
    """Accept the last run of a test with all its attempts, or one record by its id.

    Raises:
        UsageError: nothing of that name was recorded, or what was recorded is no whole measurement.
    """
    found = list(index.newest(node_id=test, limit=1))
    if found:
        last = found[0]
        attempts = [
            one for one in index.newest(session=last.session, node_id=test, limit=100) if one.measurement
        ]
    else:
        attempts = list(index.find(test)) if len(test) >= _LEAST_ID else []
        if len(attempts) > 1:
            raise UsageError(f"several records' ids start with {test!r}")
    if not attempts:
        raise UsageError(
            f"nothing was recorded for {test!r}: no such test or record; see `mlhpc records list`"
        )
    broken = sorted(
        {one.verdict for one in attempts if one.measurement is None or one.verdict not in ACCEPTABLE}
    )
    if broken:
        raise UsageError(
            f"{test}: its last run ended as {', '.join(broken)}; only a whole measurement can be accepted"
        )
    return put(book, attempts, reason)


def put(book: BaselineBook, records: Sequence[Record], reason: str) -> list[Accepted]:
    """Put the medians of *records*, all of one test, in the book.

    Raises:
        UsageError: they are of different machines or benchmarks, or judge nothing.
    """
    first = records[0]
    if len({_identity(record) for record in records}) > 1:
        raise UsageError(
            f"{first.node_id}: its records are of different machines or benchmarks; accept them one by one"
        )
    if not first.judged:
        raise UsageError(f"{first.node_id}: it judges no metric, so there is nothing to accept")
    measurements = [record.measurement for record in records if record.measurement]
    accepted = []
    for metric in first.judged:
        key = SeriesKey(*_identity(first), metric)
        old = book.lookup(key)
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
            )
        except ValueError as error:
            raise UsageError(f"{first.node_id}: {error}") from error
        book.put(key, entry)
        accepted.append(Accepted(key, entry, old))
    return accepted


def learn(
    index: Index, arguments: Sequence[str], runs: int, baselines_dir: Path, state_dir: Path | None
) -> Mapping[str, list[Record]]:
    """Run pytest *runs* times and return node id -> the whole first attempts that it recorded.

    Raises:
        UsageError: pytest refused its arguments, was interrupted, or measured nothing.
    """
    if runs < 1:
        raise UsageError("--runs must be at least 1")
    command = [sys.executable, "-m", "pytest", *arguments, "--no-rerun", f"--baselines-dir={baselines_dir}"]
    if state_dir:
        command.append(f"--state-dir={state_dir}")
    began, found = time.time_ns(), dict[str, list[Record]]()
    for number in range(1, runs + 1):
        sys.stderr.write(f"run {number} of {runs}: {' '.join(arguments)}\n")
        code = subprocess.run(command, check=False, env=os.environ.copy()).returncode
        if code not in _MEASURED:
            raise UsageError(
                f"run {number} of {runs}: pytest ended with exit code {code}; nothing is accepted"
            )
    for record in reversed(index.since(began)):
        if record.attempt == 0 and record.measurement and record.judged and record.verdict in ACCEPTABLE:
            found.setdefault(record.node_id, []).append(record)
    return found


#: A prefix of a record's id shorter than this names too many.
_LEAST_ID = 8


def _identity(record: Record) -> tuple[str, str, str, str, str, str]:
    place = record.system, record.partition, record.environment
    return (*place, record.device_model, record.fingerprint, record.benchmark)
