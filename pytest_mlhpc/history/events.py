"""Events of a system: changes such as a new driver, at which baseline epochs begin, and maintenance, during which nothing runs.

Open it also for the journal: what became of alerts, and which commit and software nights began to run with. The journal explains
charts and begins no epoch::

    STATE/events/ID.json                an event, ID.removed.json that it was a mistake
                 journal/MONTH.jsonl    the journal, of which lines are only ever appended
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.history.series import Night, Point, Series, day_of, feeds
from pytest_mlhpc.judge.baseline_files import PLACE
from pytest_mlhpc.node.files import append_lines, read_json, sync_folder
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.locations import is_shared, make_directories, open_regular
from pytest_mlhpc.store.store import json_line, month_of, read_lines

T = TypeVar("T")

_ID = re.compile(r"[0-9a-f]{8}\Z")
_REMOVED = ".removed.json"
#: An event is a line that people read; a file that is longer is none.
_MOST_TEXT, _MOST_BYTES = 500, 16 << 10
#: A maintenance explains what did not run for so long before and after it: jobs that would not end before it are not submitted,
#: and nodes come back one by one. A night's session is taken to last no longer.
REACH_NS = 6 * 3600 * 10**9


@dataclass(frozen=True)
class Event:
    """``at_ns`` is since when it holds, ``made_ns`` when it was noted; an empty ``partition`` is all of the system.

    ``until_ns`` is the end of a maintenance, whose reason is the ``text``; 0 for a change, which begins a baseline epoch.
    """

    id: str
    system: str
    text: str
    at_ns: int
    partition: str = ""
    by: str = ""
    made_ns: int = 0
    until_ns: int = 0
    schema: int = SCHEMA

    @property
    def is_maintenance(self) -> bool:
        """Whether it ends, and no epoch begins with it."""
        return self.until_ns > 0

    @property
    def label(self) -> str:
        """What a chart says of it."""
        return f"maintenance: {self.text}" if self.is_maintenance else self.text

    def explains(self, at_ns: int) -> bool:
        """Return whether what should have run at *at_ns* did not because of this maintenance."""
        return self.is_maintenance and self.at_ns - REACH_NS <= at_ns < self.until_ns + REACH_NS

    def concerns(self, system: str, partition: str) -> bool:
        """Whether figures of this partition are affected."""
        return self.system == system and self.partition in {"", partition}


@dataclass(frozen=True)
class Removal:
    """That an event was a mistake."""

    id: str
    by: str
    made_ns: int
    schema: int = SCHEMA


def new_event(
    system: str, partition: str, text: str, *, at_ns: int, by: str, now_ns: int, until_ns: int = 0
) -> Event:
    """Return an event with an id of its own; with *until_ns* it is a maintenance.

    Raises:
        UsageError: it names no system or says nothing, or more than a line, or ends before it begins.
    """
    one_text = " ".join(text.split())
    if not one_text or not system:
        raise UsageError(
            "an event needs a system and a text: mlhpc history event add --system NAME 'driver 570 to 580'"
        )
    if len(one_text) > _MOST_TEXT:
        raise UsageError(
            f"the text has {len(one_text)} characters, more than {_MOST_TEXT}: an event is one line"
        )
    if 0 < until_ns <= at_ns:
        raise UsageError("a maintenance ends after it began: --until is not after --on")
    return Event(secrets.token_hex(4), system, one_text, at_ns, partition, by, now_ns, until_ns)


def planned(system: str, partition: str, reason: str, at_ns: int, until_ns: int, *, by: str) -> Event:
    """Return a maintenance that a scheduler or systems.yaml announces; its id stays where only its end changes."""
    one_text = " ".join(reason.split())[:_MOST_TEXT]
    content = "\0".join((system, partition, one_text, str(at_ns)))
    name = hashlib.sha256(content.encode()).hexdigest()[:8]
    return Event(name, system, one_text, at_ns, partition, by, at_ns, until_ns)


def record_planned(state_dir: Path, found: Iterable[Event], now_ns: int) -> None:
    """Store what is announced now, in place of what was announced before of the same maintenance.

    One with another beginning is the same if the earlier beginning is still to come: it was moved. What a user removed stays
    removed.

    Raises:
        StoreError: it cannot be stored.
    """
    announced = {one.id: one for one in found}
    if not announced:
        return
    places = {(one.system, one.partition, one.text) for one in announced.values()}
    known = {one.id: one for one in events(state_dir)}
    for one in known.values():
        moved = one.is_maintenance and one.at_ns > now_ns and one.id not in announced
        if moved and (one.system, one.partition, one.text) in places:
            remove(state_dir, Removal(one.id, one.by, now_ns))
    for one in announced.values():
        removed = (_folder(state_dir) / f"{one.id}{_REMOVED}").exists()
        if not removed and known.get(one.id) != one:
            _put(state_dir, f"{one.id}.json", one, replace=True)


def add(state_dir: Path, event: Event) -> Path:
    """Store *event* durably; return its file.

    Raises:
        StoreError: it cannot be stored, or its id is taken.
    """
    return _put(state_dir, f"{event.id}.json", event)


def remove(state_dir: Path, removal: Removal) -> None:
    """Store that an event was a mistake. Done twice, it is done.

    Raises:
        StoreError: it cannot be stored.
    """
    if not (_folder(state_dir) / f"{removal.id}{_REMOVED}").exists():
        _put(state_dir, f"{removal.id}{_REMOVED}", removal)


def events(state_dir: Path, on_problem: Callable[[str], None] | None = None) -> tuple[Event, ...]:
    """Return all events that were not removed, oldest first; what cannot be read is reported to *on_problem* and left out.

    Raises:
        StoreError: their folder cannot be listed.
    """
    tell = on_problem or (lambda _text: None)
    names = set(_names(_folder(state_dir)))
    found = []
    for name in names:
        identity, _, rest = name.partition(".")
        if rest != "json" or not _ID.match(identity) or f"{identity}{_REMOVED}" in names:
            continue
        path = _folder(state_dir) / name
        try:
            event = _read(path)
        except (OSError, SchemaError) as error:
            tell(f"{path}: {getattr(error, 'strerror', None) or error} (left out, left as it is)")
            continue
        if event.id != identity:
            tell(f"{path}: it is the event {event.id!r}, not {identity!r} (left out, left as it is)")
            continue
        found.append(event)
    return tuple(sorted(found, key=_order))


def known_events(
    state_dir: Path, source: object, on_problem: Callable[[str], None] | None = None
) -> tuple[Event, ...]:
    """Return the events of the state directory and those that *source* holds besides, as InfluxDB does; oldest first.

    The state directory is nearer: what was removed or moved there is so.

    Raises:
        StoreError: either cannot be read.
    """
    ask = getattr(source, "events", None)
    removed = {name[:8] for name in _names(_folder(state_dir)) if name[8:] == _REMOVED}
    found = {one.id: one for one in (ask() if ask else ()) if one.id not in removed}
    found |= {one.id: one for one in events(state_dir, on_problem)}
    return tuple(sorted(found.values(), key=_order))


def _order(event: Event) -> tuple[int, int, str]:
    return event.at_ns, event.made_ns, event.id


def _read(path: Path) -> Event:
    with open_regular(path) as file:
        return _parsed(Event, file.read(_MOST_BYTES + 1))


def _parsed(cls: type[T], data: bytes, most: int = _MOST_BYTES) -> T:
    """Return what *data* is the JSON form of.

    Raises:
        SchemaError: it is damaged, too long, or of another schema.
    """
    if len(data) > most:
        raise SchemaError(f"longer than {most} bytes")
    try:
        return from_json(cls, read_json(data))
    except SchemaError:
        raise
    except (ValueError, RecursionError) as error:
        raise SchemaError(str(error)) from error


def event_files(state_dir: Path) -> list[Path]:
    """Return the files of all events and of their removals, sorted.

    Raises:
        StoreError: their folder cannot be listed.
    """
    folder = _folder(state_dir)
    names = sorted(_names(folder))
    return [folder / name for name in names if _ID.match(name[:8]) and name[8:] in {".json", _REMOVED}]


def event_of_line(path: Path, line: bytes) -> tuple[Event, bool]:
    """Return the event to which *line* of the file *path* belongs, and whether it was removed.

    Raises:
        SchemaError: it is damaged, or of another schema; or the event that was removed cannot be read.
    """
    identity = path.name[:8]
    own = path.with_name(f"{identity}.json")
    removed = path != own or path.with_name(f"{identity}{_REMOVED}").exists()
    if path == own:
        event = _parsed(Event, line)
    else:
        _parsed(Removal, line)
        try:
            event = _read(own)
        except OSError as error:
            raise SchemaError(f"{own.name} cannot be read: {error.strerror}") from error
    if event.id != identity:
        raise SchemaError(f"it is the event {event.id!r}, not {identity!r}")
    return event, removed


def _names(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{folder}: cannot be listed: {error.strerror}") from error


def _put(state_dir: Path, name: str, content: Event | Removal, *, replace: bool = False) -> Path:
    folder = _folder(state_dir)
    path = folder / name
    draft = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        make_directories(folder, state_dir)
        mode = 0o664 if is_shared(state_dir) else 0o644
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(to_json(content), file)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and not replace:
            raise FileExistsError(17, "it is there already", str(path))
        draft.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise StoreError(f"{path}: cannot be stored: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return path


def _folder(state_dir: Path) -> Path:
    return state_dir / "events"


def epoch_start(events: Sequence[Event], system: str, partition: str, accepted_ns: int, now_ns: int) -> int:
    """Return since when figures belong to the epoch of *now_ns*, in ns UTC.

    That is the newest of when the baseline was accepted and the events of the partition; events of the future do not count
    yet.
    """
    found = (e for e in events if not e.is_maintenance and e.concerns(system, partition))
    starts = (e.at_ns for e in found if e.at_ns <= now_ns)
    return max([accepted_ns, *starts])


@dataclass(frozen=True)
class Beginning:
    """When the present epoch of a series began, in ns UTC, and what changed then."""

    at_ns: int
    what: str


def began(before: Night, after: Night) -> str:
    """Return what changed from one night of a series to the next, if a new epoch begins there; empty if none does."""
    return changed(before.epoch, after.epoch)


def present_epoch(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return those of *points* whose figures may be compared with the newest."""
    if not points:
        return ()
    newest = points[-1].night.epoch
    return tuple(point for point in points if not changed(point.night.epoch, newest))


def epoch_beginning(points: Sequence[Point]) -> Beginning | None:
    """Return how the epoch of the newest of *points* began; None where nothing of another epoch lies before it."""
    for before, after in zip(reversed(points[:-1]), reversed(points), strict=False):
        if what := began(before.night, after.night):
            return Beginning(after.night.created_ns, what)
    return None


def events_of_series(events: Sequence[Event], series: Series) -> tuple[Event, ...]:
    """Return the events that start an epoch of *series*: those of its partition within its time, oldest first."""
    if not series.points:
        return ()
    last_ns = series.points[-1].night.created_ns
    found = (
        event
        for event in events
        if not event.is_maintenance
        and event.concerns(series.key.system, series.key.partition)
        and series.points[0].night.created_ns <= event.at_ns <= last_ns
    )
    return tuple(sorted(found, key=lambda event: event.at_ns))


def maintenance_of(events: Sequence[Event], system: str, partition: str, at_ns: int) -> Event | None:
    """Return the maintenance that explains why nothing ran on a partition at *at_ns*, of several the one that ends last."""
    found = (one for one in events if one.concerns(system, partition) and one.explains(at_ns))
    return max(found, key=lambda one: (one.until_ns, one.id), default=None)


def events_near(events: Sequence[Event], points: Sequence[Point], first: int, last: int) -> tuple[Event, ...]:
    """Return the events that may be what changed the level between the points *first* and *last* (inclusive), nearest first.

    People note an event by its day, or on the morning after: one night more on each side is looked at.
    """
    if not points:
        return ()
    key = points[0].night
    begin = points[max(0, first - 2)].night.created_ns
    end = points[min(len(points) - 1, last + 1)].night.created_ns
    middle = points[first].night.created_ns
    found = [e for e in events if e.concerns(key.system, key.partition) and begin < e.at_ns <= end]
    return tuple(sorted(found, key=lambda event: abs(event.at_ns - middle)))


#: A longer line of the journal is none.
_MOST_ENTRY = 1 << 20
#: Tests that an entry names, at most.
MOST_TESTS = 100


@dataclass(frozen=True)
class JournalEntry:
    """One thing that happened on a system at ``at_ns``; an empty ``partition`` is all of it.

    ``kind`` is alert_opened, alert_closed, alert_acknowledged or alert_unacknowledged, with the ``id`` of the alert; or commit or
    environment, with an id that its place and day determine.
    """

    id: str
    kind: str
    system: str
    text: str
    at_ns: int
    partition: str = ""
    by: str = ""
    until_ns: int = 0  #: the end of an acknowledgement
    owner: str = ""
    benchmarks: tuple[str, ...] = ()
    schema: int = SCHEMA


def journal_files(state_dir: Path) -> list[Path]:
    """Return the files of the journal, oldest month first.

    Raises:
        StoreError: their folder cannot be listed.
    """
    folder = _folder(state_dir) / "journal"
    return [folder / name for name in sorted(_names(folder)) if name.endswith(".jsonl")]


def journal_entry_of(line: bytes) -> JournalEntry:
    """Return the entry in a line of the journal.

    Raises:
        SchemaError: it is damaged, or of another schema.
    """
    return _parsed(JournalEntry, line, _MOST_ENTRY)


def append_journal(state_dir: Path, entries: Iterable[JournalEntry]) -> None:
    """Append *entries* durably; those that are there already are not appended again. One process at a time may do so.

    Raises:
        StoreError: they cannot be stored.
    """
    months: dict[str, list[bytes]] = {}
    for entry in entries:
        months.setdefault(month_of(entry.at_ns), []).append(json_line(to_json(entry)))
    for month, lines in sorted(months.items()):
        path = _folder(state_dir) / "journal" / f"{month}.jsonl"
        try:
            make_directories(path.parent, state_dir)
            there = {line for _, line in read_lines(path)} if path.exists() else set()
            mode = 0o664 if is_shared(state_dir) else 0o644
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, mode)
            try:
                if new := b"".join(line for line in dict.fromkeys(lines) if line not in there):
                    append_lines(descriptor, new)
            finally:
                os.close(descriptor)
            sync_folder(path.parent)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


#: Parts of an environment that are named of one night and partition, at most.
_MOST_PARTS = 8


def software_changes(
    nights: Iterable[Night], since_ns: int, default_branch: str = "main"
) -> tuple[JournalEntry, ...]:
    """Return which commits and software the watched *nights*, oldest first, began to run with since the day of *since_ns*.

    A test is compared with its own night before: others may run in another image. Of each partition and day there is one entry
    for the commit and one for all else, whoever asks and how often.
    """
    before: dict[tuple[str, str, str, str], dict[str, str]] = {}
    found: dict[tuple[int, str, str, str], tuple[int, dict[str, None], set[str]]] = {}
    for night in nights:
        if not feeds(night, default_branch):
            continue
        software = {name: value for name, value in night.changes.items() if name not in PLACE}
        now = {"commit": night.commit, **software} if night.commit else software
        earlier = before.setdefault((night.system, night.partition, night.environment, night.benchmark), {})
        for name in sorted(now.keys() & earlier.keys()):
            if day_of(night.created_ns) >= day_of(since_ns) and now[name] != earlier[name]:
                kind = "commit" if name == "commit" else "environment"
                place = day_of(night.created_ns), night.system, night.partition, kind
                _, texts, tests = found.setdefault(place, (night.created_ns, {}, set()))
                texts[f"{name} {_brief(name, earlier[name])} -> {_brief(name, now[name])}"] = None
                tests.add(night.benchmark)
        earlier |= now
    return tuple(
        JournalEntry(
            id=hashlib.sha256("\0".join(map(str, place)).encode("utf-8", "surrogatepass")).hexdigest()[:16],
            kind=place[3],
            system=place[1],
            text=_listed(list(texts))[:_MOST_TEXT],
            at_ns=at_ns,
            partition=place[2],
            benchmarks=tuple(sorted(tests)[:MOST_TESTS]),
        )
        for place, (at_ns, texts, tests) in sorted(found.items())
    )


def _brief(name: str, value: str) -> str:
    return value[:12] if name == "commit" else " ".join(value.split())[:60]


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_PARTS} more" if len(texts) > _MOST_PARTS else ""
    return ", ".join(texts[:_MOST_PARTS]) + more
