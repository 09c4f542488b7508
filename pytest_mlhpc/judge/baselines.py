"""The baseline files of all systems and the provisional ones of this machine, as one book to look up and write in.

Here records become accepted values, and the series of a session are compared with what is accepted.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import ConfigError, Problem, StoreError, UsageError, did_you_mean
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.judge import baseline_files
from pytest_mlhpc.judge.baseline_files import BaselineFile, Entry, environment_digest, render, series_of
from pytest_mlhpc.judge.judge import accept_command, make_entry
from pytest_mlhpc.judge.rules import NIGHTS
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import make_directories, replace_file
from pytest_mlhpc.store.record import (
    AGAINST,
    GOOD,
    NOTABLE,
    WORSE,
    Epoch,
    Judgement,
    Record,
    SeriesKey,
    Verdict,
    user_name,
)
from pytest_mlhpc.store.text import iso

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")


class BaselineBook:
    """Baselines: ``directory/<system>.yaml`` (in git), and ``state_dir/provisional/<system>-<fingerprint>.yaml``.

    Files are read when a system is first asked for; a reviewed entry wins over a provisional one.
    """

    def __init__(self, directory: Path, state_dir: Path) -> None:
        self._directory = directory
        self._provisional = state_dir / "provisional"
        self._read: dict[Path, dict[SeriesKey, Entry]] = {}
        self._changes: dict[Path, dict[SeriesKey, Entry | None]] = {}
        self._used: set[SeriesKey] = set()
        self._asked: set[SeriesKey] = set()  #: with neither benchmark nor metric: machines that were used

    def path(self, key: SeriesKey, *, provisional: bool = False) -> Path:
        """Return the file that the entry of *key* lies in.

        Raises:
            ConfigError: the system's name cannot be a file name.
        """
        if provisional:
            return self._provisional / f"{_file_name(key.system, key.fingerprint)}.yaml"
        return self.system_path(key.system)

    def system_path(self, system: str) -> Path:
        """Return the reviewed file of *system*.

        Raises:
            ConfigError: the name cannot be a file name.
        """
        if not _FILE_NAME.match(system):
            raise ConfigError([Problem(str(self._directory), "", f"system {system!r} cannot be a file name")])
        return self._directory / f"{system}.yaml"

    def lookup(self, key: SeriesKey, epoch: Epoch | None = None, *, provisional: bool = True) -> Entry | None:
        """Return the entry of one series, a *provisional* one only if wanted, and remember that it was used.

        A provisional entry of *epoch* wins over an accepted one of another epoch, which it cannot be judged by.

        Raises:
            ConfigError: the file is damaged; every problem with file and line.
            StoreError: the file cannot be read.
        """
        self._used.add(key)
        self._asked.add(_machine(key))
        return self._find(key, epoch, provisional=provisional)

    def usual_s(self, spec: JobSpec) -> float | None:
        """Return how long the timed steps of *spec* take at its baseline's throughput, in seconds; None where that is not known.

        Only of trainings for so many steps: in one to a quality they are as many as it takes. Safe beside other calls.
        """
        batch, metric = spec.parameters.get("global_batch"), "effective_throughput"
        steps = spec.steps if spec.parameters.get("until") != "quality" else 0
        if not batch or not steps or metric not in spec.judged or spec.parameters.get("bagging"):
            return None
        epoch = Epoch(spec.definition, "")
        entry = self._find(series_of(spec, metric), epoch, provisional=True)
        return None if entry is None or changed(entry.epoch, epoch) else steps * batch / entry.value

    def _find(self, key: SeriesKey, epoch: Epoch | None, *, provisional: bool) -> Entry | None:
        found = [self._entries(self.path(key), key.system).get(key)]
        if key.fingerprint and provisional:
            found.append(self._entries(self.path(key, provisional=True), key.system).get(key))
        entries = [entry for entry in found if entry is not None]
        same = (entry for entry in entries if epoch is None or not changed(entry.epoch, epoch))
        return next(same, entries[0] if entries else None)

    def for_spec(self, spec: JobSpec, device_model: str, *, provisional: bool = True) -> dict[str, Entry]:
        """Return metric -> entry for the judged metrics of *spec* that have one; ``device_model`` is what the run reported."""
        epoch = Epoch(spec.definition, device_model)
        found = ((m, self.lookup(series_of(spec, m), epoch, provisional=provisional)) for m in spec.judged)
        return {metric: entry for metric, entry in found if entry is not None}

    def entries(self, system: str) -> Mapping[SeriesKey, Entry]:
        """Return the reviewed entries of *system*.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return dict(self._entries(self.system_path(system), system))

    def provisional_entries(self, system: str) -> Mapping[SeriesKey, Entry]:
        """Return all provisional entries of *system* in this state directory.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        found: dict[SeriesKey, Entry] = {}
        for path in self._provisional_files():
            found.update(self._entries(path, ""))
        return {key: entry for key, entry in found.items() if key.system == system}

    def provisional_systems(self) -> frozenset[str]:
        """Return the systems that have provisional entries in this state directory.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return frozenset(key.system for path in self._provisional_files() for key in self._entries(path, ""))

    def systems(self) -> tuple[str, ...]:
        """Return the systems that have a reviewed file."""
        return tuple(sorted(path.stem for path in self._directory.glob("*.yaml")))

    def count(self) -> int:
        """Return how many series have a reviewed entry, on all systems together.

        Raises:
            ConfigError: as :meth:`lookup`.
            StoreError: as :meth:`lookup`.
        """
        return sum(len(self._entries(self.system_path(system), system)) for system in self.systems())

    def put(self, key: SeriesKey, entry: Entry, *, provisional: bool = False) -> None:
        """Note an entry to be written by :meth:`save`; :meth:`lookup` finds it at once."""
        path = self.path(key, provisional=provisional)
        self._entries(path, key.system)[key] = entry
        self._changes.setdefault(path, {})[key] = entry

    def remove(self, key: SeriesKey, *, provisional: bool = False) -> None:
        """Note an entry to be removed by :meth:`save`."""
        path = self.path(key, provisional=provisional)
        self._entries(path, key.system).pop(key, None)
        self._changes.setdefault(path, {})[key] = None

    def save(self) -> tuple[Path, ...]:
        """Write what was put, and return the files that changed. Each is read again first, then replaced whole.

        Two processes that write one file at the same moment do not tear it; between reading and replacing there is a
        moment in which one's entries can be lost to the other, because the files must work without locks.

        Raises:
            ConfigError: a file was damaged meanwhile; it is left as it is.
            StoreError: a file cannot be written; names it.
        """
        changed = []
        for path, changes in sorted(self._changes.items()):
            system = next(iter(changes)).system
            content = baseline_files.read(path, system, comments=True) or BaselineFile(system, {})
            merged = {
                key: entry for key, entry in {**content.entries, **changes}.items() if entry is not None
            }
            text = render(dataclasses.replace(content, entries=merged))
            if merged != content.entries or not path.exists():
                self._make_folder(path)
                replace_file(path, text)
                changed.append(path)
        self._changes.clear()
        return tuple(changed)

    def unused(self) -> tuple[SeriesKey, ...]:
        """Return entries that nobody asked for, on those machines (partition, environment) that were used."""
        entries = {key for found in self._read.values() for key in found}
        unused = {key for key in entries - self._used if _machine(key) in self._asked}
        return tuple(sorted(unused, key=lambda key: (key.system, key.partition, key.benchmark, key.metric)))

    def problems(self, systems: Iterable[str]) -> None:
        """Read the files of *systems*, and all provisional ones, so that damage is found before anything is started.

        Raises:
            ConfigError: as :meth:`lookup`, of all files at once.
            StoreError: as :meth:`lookup`.
        """
        found: list[Problem] = []
        paths = [(self.system_path(system), system) for system in sorted(set(systems))]
        for path, system in [*paths, *((path, "") for path in self._provisional_files())]:
            try:
                self._entries(path, system)
            except ConfigError as error:
                found += error.problems
        if found:
            raise ConfigError(found)

    def _make_folder(self, path: Path) -> None:
        """Make the folder of provisional files so that others of a group can write beside us, where they share it."""
        if path.parent != self._provisional:
            return
        try:
            make_directories(path.parent, path.parent.parent)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def _provisional_files(self) -> list[Path]:
        return sorted(self._provisional.glob("*.yaml"))

    def _entries(self, path: Path, system: str) -> dict[SeriesKey, Entry]:
        if path not in self._read:
            content = baseline_files.read(path, system)
            self._read.setdefault(path, dict(content.entries) if content else {})
        return self._read[path]


def _machine(key: SeriesKey) -> SeriesKey:
    return dataclasses.replace(key, benchmark="", metric="")


def _file_name(system: str, fingerprint: str) -> str:
    """Return a file name for both: their readable letters, and a digest that no other two share.

    The system is part of it because two systems of one machine have one fingerprint, and a file is of one system.
    """
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{system}-{fingerprint}").strip("-")[:80]
    digest = hashlib.sha256(f"{system}\0{fingerprint}".encode("utf-8", "replace")).hexdigest()[:12]
    return f"{readable}-{digest}".lstrip("-")


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
