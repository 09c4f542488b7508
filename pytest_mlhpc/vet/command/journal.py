"""What vettings found, kept in the state directory: one file of JSON lines for each process, only appended to, no locks.

    vetting/history/YYYY-MM/<writer>.jsonl   a line for each node, one for each quantity's figures: small, kept
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.results.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.results.store import is_shared, make_directories, read_lines

HISTORY, REPORTS = "history", "reports"

#: How the folders of one day or month are called, finest last.
_MONTH, _DAY = "%Y-%m", "%Y-%m-%d"

#: A writer whose clock is that far ahead cannot be believed, in ns.
AHEAD_NS = 3_600_000_000_000

_WRITER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")

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
    form = _MONTH if what == HISTORY else _DAY
    folder = dt.datetime.fromtimestamp(at_ns / 1e9, tz=dt.UTC).strftime(form)
    path = state_dir / "vetting" / what / folder / f"{writer}.jsonl"
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
        size = os.fstat(descriptor).st_size
        if (
            size and os.pread(descriptor, 1, size - 1) != b"\n"
        ):  # an earlier process with this id died within a line
            content = b"\n" + content
        try:
            rest = memoryview(content)
            while rest:  # a short write: the disk is full or a limit was reached, and the next one says which
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def entries_since(
    state_dir: Path,
    cls: type[Entry],
    *,
    since_ns: int,
    now_ns: int,
    on_problem: Callable[[str], None] | None = None,
    where: Mapping[str, str] | None = None,
) -> Iterator[Entry]:
    """Yield the history's entries of *cls* since then, streaming, files in order of month and name.

    Only those whose fields equal *where* (``{"system": "alps"}``). Torn and damaged lines, a newer schema, files that cannot
    be read, and times that have not come yet are told to *on_problem* and skipped.
    """
    kind = "node" if cls is NodeEntry else "figures"
    yield from read_entries(
        state_dir,
        HISTORY,
        cls,
        since_ns=since_ns,
        now_ns=now_ns,
        on_problem=on_problem,
        where={"kind": kind, **(where or {})},
    )


def read_entries(
    state_dir: Path,
    what: str,
    cls: type[Entry],
    *,
    since_ns: int,
    now_ns: int,
    on_problem: Callable[[str], None] | None = None,
    where: Mapping[str, str] | None = None,
) -> Iterator[Entry]:
    """Yield entries of *cls* below one of the folders, as :func:`entries_since` does."""
    tell = on_problem or (lambda _text: None)
    wanted = dict(where or {})
    for path in _files(state_dir, what, since_ns, tell):
        try:
            for offset, line in read_lines(path, on_problem):
                place = f"{path}: byte {offset}"
                data = _parsed(line, place, tell)
                if data is None or any(data.get(name) != value for name, value in wanted.items()):
                    continue
                at_ns = data.get("at_ns")
                if isinstance(at_ns, int) and at_ns < since_ns:
                    continue
                if isinstance(at_ns, int) and at_ns > now_ns + AHEAD_NS:
                    tell(f"{place}: is of a time that has not come yet (skipped, left as it is)")
                    continue
                try:
                    entry = from_json(cls, data)
                except SchemaError as error:
                    tell(f"{place}: {error} (skipped, left as it is)")
                    continue
                yield entry
        except StoreError as error:
            tell(str(error))


def _parsed(line: bytes, place: str, tell: Callable[[str], None]) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        tell(f"{place}: damaged line: {error} (skipped, left as it is)")
        return None
    if not isinstance(data, dict):
        tell(f"{place}: is no object (skipped, left as it is)")
        return None
    return data


def _files(state_dir: Path, what: str, since_ns: int, tell: Callable[[str], None]) -> list[Path]:
    """Return the files that may hold entries since then: those of its own folder, which is a day or a month, and later ones."""
    folder = state_dir / "vetting" / what
    form = _MONTH if what == HISTORY else _DAY
    first = dt.datetime.fromtimestamp(max(0, since_ns) / 1e9, tz=dt.UTC).strftime(form)
    try:
        return sorted(path for path in folder.glob("*/*.jsonl") if path.parent.name >= first)
    except OSError as error:
        tell(f"{folder}: cannot be listed: {error.strerror}")
        return []
