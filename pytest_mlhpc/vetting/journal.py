"""What vettings found, kept in the state directory: one file of JSON lines for each process, only appended to, no locks.

    vetting/history/YYYY-MM-DD/<writer>.jsonl   a line for each node, one for each quantity's figures: small, kept
    vetting/reports/YYYY-MM-DD/<writer>.jsonl   all that nodes said, to be used again (``reuse.py``): taken away after days

Lines of one vetting are one write, synced. Whoever dies while writing leaves a torn last line, which readers name and skip.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.files import append_lines, read_json
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.locations import is_shared, make_directories
from pytest_mlhpc.store.store import read_lines

HISTORY, REPORTS = "history", "reports"

#: How the folder of one day is called.
_DAY = "%Y-%m-%d"

#: A writer whose clock is that far ahead cannot be believed, in ns.
AHEAD_NS = 3_600_000_000_000

_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")

#: Where a line of figures says what they are of; see :func:`quantity_of`.
QUANTITY = re.compile(rb'"key":"(?:[^"\\]|\\.)*","model":"(?:[^"\\]|\\.)*"')

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class NodeEntry:
    """What one vetting said of one node.

    ``host`` is the node's own name, ``fitness`` a Fitness's value, ``reason`` the worst one with its prefix; ``scope`` says what
    was left out: empty (nothing), ``single`` (what takes several nodes), ``no_load`` (what computes; it implies the other).
    """

    vetting: str
    at_ns: int
    system: str
    partition: str
    level: str
    scope: str
    host: str
    boot_id: str
    fitness: str
    reason: str = ""
    check: str = ""  #: of the worst finding, where there is trouble
    device: str = ""
    kind: str = "node"
    schema: int = SCHEMA


@dataclass(frozen=True)
class FigureEntry:
    """Figures of one quantity in one vetting: host of a good node -> a value for each of its devices, in ``unit``."""

    vetting: str
    at_ns: int
    system: str
    partition: str
    key: str
    model: str
    unit: str
    values: Mapping[str, tuple[float, ...]]
    kind: str = "figures"
    schema: int = SCHEMA


@dataclass(frozen=True)
class EpochEntry:
    """From here on figures are learned anew: driver, firmware or the machine itself have changed, as ``reason`` says."""

    at_ns: int
    system: str
    partition: str
    reason: str
    user: str
    kind: str = "epoch"
    schema: int = SCHEMA


def append(state_dir: Path, what: str, writer: str, at_ns: int, entries: Sequence[Any]) -> Path | None:
    """Append *entries* in one durable write to the writer's own file; return it, None where there is nothing to write.

    Where the state directory is writable for its group, so is what is made in it: users can share one.

    Args:
        state_dir: the state directory.
        what: :data:`HISTORY` or :data:`REPORTS`.
        writer: id of this session or vetting; nobody else writes a file of this name.
        at_ns: when, ns UTC; chooses the folder.
        entries: dataclasses of this module or of ``reuse.py``.

    Raises:
        StoreError: it cannot be written; nothing torn is left behind.
    """
    if not entries:
        return None
    if not _WRITER.match(writer):
        raise StoreError(f"{writer!r:.120} cannot be a file name")
    path = state_dir / "vetting" / what / day_of(at_ns) / f"{writer}.jsonl"
    try:
        lines = [json.dumps(to_json(entry), allow_nan=False, separators=(",", ":")) for entry in entries]
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path}: a vetting cannot be stored as JSON: {error}") from error
    try:
        make_directories(path.parent, state_dir)
        _append(path, "".join(f"{line}\n" for line in lines).encode())
        if is_shared(state_dir):
            with contextlib.suppress(OSError):  # another user's file is as they made it
                path.chmod(0o664)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def _append(path: Path, content: bytes) -> None:
    """Append *content* whole, or leave the file as it was."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o664)
    try:
        append_lines(descriptor, content)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class JournalQuery:
    """What is looked for: entries from ``since_ns`` on whose fields equal ``where`` (``{"system": "alps"}``), as of ``now_ns``.

    Torn and damaged lines, a newer schema, files that cannot be read, and times that have not come yet are told to
    ``on_problem`` and skipped.
    """

    since_ns: int
    now_ns: int
    where: Mapping[str, str] = field(default_factory=dict)
    on_problem: Callable[[str], None] | None = None

    def tell(self, problem: str) -> None:
        """Tell it, if anybody listens."""
        if self.on_problem is not None:
            self.on_problem(problem)

    def also(self, name: str, value: str) -> JournalQuery:
        """Return this query with one more field that is to be equal."""
        return replace(self, where={**self.where, name: value})


def node_entries_since(state_dir: Path, query: JournalQuery) -> Iterator[NodeEntry]:
    """Yield what is known of nodes, streaming, oldest day first."""
    for day in days_since(state_dir, HISTORY, query):
        yield from entries_of_day(state_dir, HISTORY, day, NodeEntry, query.also("kind", "node"))


def days_since(state_dir: Path, what: str, query: JournalQuery) -> list[str]:
    """Return the days of which there are files, oldest first."""
    folder, first = state_dir / "vetting" / what, day_of(query.since_ns)
    try:
        return sorted(path.name for path in folder.iterdir() if path.name >= first)
    except FileNotFoundError:
        return []
    except OSError as error:
        query.tell(f"{folder}: cannot be listed: {error.strerror}")
        return []


def entries_of_day(
    state_dir: Path,
    what: str,
    day: str,
    cls: type[Entry],
    query: JournalQuery,
    *,
    skip: Callable[[bytes], bool] = lambda _line: False,
) -> Iterator[Entry]:
    """Yield one day's entries of *cls*, files in order of name; *skip* may refuse lines before they are parsed."""
    unlike = _unlike(query.where)
    folder = state_dir / "vetting" / what / day
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    except OSError as error:
        query.tell(f"{folder}: cannot be listed: {error.strerror}")
        return
    for path in paths:
        try:
            for offset, line in read_lines(path, query.tell):
                if unlike(line) or skip(line):
                    continue
                entry = _entry(line, f"{path}: byte {offset}", cls, query)
                if entry is not None:
                    yield entry
        except StoreError as error:
            query.tell(str(error))


def _unlike(where: Mapping[str, str]) -> Callable[[bytes], bool]:
    """Return whether a line surely has another value of some field: most lines need not be parsed to be refused.

    All writers are :func:`append`, so a field and its value always stand there in the same bytes.
    """
    tokens = [
        (f'"{name}":'.encode(), f'"{name}":{json.dumps(value)}'.encode()) for name, value in where.items()
    ]
    return lambda line: any(whole not in line and name in line for name, whole in tokens)


def _entry(line: bytes, place: str, cls: type[Entry], query: JournalQuery) -> Entry | None:
    data = _parsed(line, place, query.tell)
    if data is None or any(data.get(name) != value for name, value in query.where.items()):
        return None
    at_ns = data.get("at_ns")
    if isinstance(at_ns, int) and at_ns < query.since_ns:
        return None
    if isinstance(at_ns, int) and at_ns > query.now_ns + AHEAD_NS:
        query.tell(f"{place}: is of a time that has not come yet (skipped, left as it is)")
        return None
    try:
        return from_json(cls, data)
    except SchemaError as error:
        query.tell(f"{place}: {error} (skipped, left as it is)")
        return None


def _parsed(line: bytes, place: str, tell: Callable[[str], None]) -> dict[str, Any] | None:
    try:
        data = read_json(line)
    except (ValueError, RecursionError) as error:
        tell(f"{place}: damaged line: {error} (skipped, left as it is)")
        return None
    if not isinstance(data, dict):
        tell(f"{place}: is no object (skipped, left as it is)")
        return None
    return data


def quantity_of(entry: FigureEntry) -> bytes:
    """Return how the quantity of *entry* stands in its line, as :data:`QUANTITY` finds it."""
    return f'"key":{json.dumps(entry.key)},"model":{json.dumps(entry.model)}'.encode()


def day_of(moment_ns: int) -> str:
    """Return the name of the folder for a moment, UTC."""
    return dt.datetime.fromtimestamp(max(0, moment_ns) / 1e9, tz=dt.UTC).strftime(_DAY)
