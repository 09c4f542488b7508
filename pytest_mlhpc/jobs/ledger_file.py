"""Reading a ledger file: what of it is open, who holds it, and until when."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.lease import Owner
from pytest_mlhpc.jobs.submitted import Submitted
from pytest_mlhpc.results.foreign import read_json
from pytest_mlhpc.results.schema import SchemaError, from_json

#: Version of the lines. 1 had ids only, 2 no leases of single entries; files of all are read.
SCHEMA = 3
#: A session's name in the name of its file; ``@`` parts it from its claimer's.
NAME = r"[A-Za-z0-9._+-]{1,100}"
#: A longer file is none of ours: an entry has about 1 kB, a session some thousands.
MAX_BYTES = 64 << 20
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class LedgerFile:
    """One file as it was read. ``known`` are the ids of all that was ever in it, ``open`` of what has not ended.

    Leases count once nobody watches any more: the owner is dead, or has ``left`` what is open.
    """

    path: Path
    session: str
    owner: Owner
    until_ns: int | None  #: end of the lease of all that has none of its own
    own_until_ns: Mapping[str, int]  #: id -> end of its own lease
    left: bool
    open: dict[str, Submitted]
    known: frozenset[str]
    mtime_ns: int
    torn: bool  #: its last line has no end: a new one must begin with a line break
    damage: tuple[str, ...] = ()  #: lines that were skipped

    def lease_of(self, allocation_id: str) -> int | None:
        """Return the end of the lease of *allocation_id* (ns UTC), None where it has none.

        Processes of `local` runs have none: nobody can go on with them once their session is gone.
        """
        if self.open[allocation_id].scheduler == "local":
            return None
        return self.own_until_ns.get(allocation_id, self.until_ns)

    @property
    def name(self) -> str:
        """The session's name in the name of the file."""
        return self.path.stem.partition("@")[0]

    @property
    def claimer(self) -> str:
        """Who claimed it, empty for nobody."""
        return self.path.stem.partition("@")[2]


def read_ledger(path: Path) -> LedgerFile:
    """Return what is in *path*. A damaged line (its writer died, the disk was full) is skipped, and named in ``damage``.

    Raises:
        StoreError: it cannot be read, is no ledger, another user's, or of a newer schema; names the path.
    """
    content, info = _content(path)
    reader = _Reader(path)
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip(b"\0 "):
            reader.take(number, raw)
    if reader.owner is None:
        raise StoreError(f"{path}: nobody's ledger: its first line is missing (left as it is)")
    return LedgerFile(
        path=path,
        session=reader.session,
        owner=reader.owner,
        until_ns=reader.until_ns,
        own_until_ns=reader.own_until_ns,
        left=reader.left,
        open=reader.entries(),
        known=frozenset(reader.known),
        mtime_ns=info.st_mtime_ns,
        torn=bool(content) and not content.endswith(b"\n"),
        damage=tuple(reader.damage),
    )


def _content(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        file = os.open(path, _OPEN)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
                raise StoreError(f"{path}: no ledger: no regular file of at most {MAX_BYTES >> 20} MiB")
            with open(file, "rb", closefd=False) as stream:
                return stream.read(MAX_BYTES), info
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


class _Reader:
    """Takes line after line and keeps what holds after all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = path.stem.partition("@")[0]
        self.owner: Owner | None = None
        self.until_ns: int | None = None
        self.own_until_ns: dict[str, int] = {}
        self.left = False
        self.open: dict[str, Submitted] = {}
        self.known: set[str] = set()
        self.damage: list[str] = []
        self._entry_of: dict[str, str] = {}  # run id -> allocation id
        self._concluded: dict[str, set[str]] = {}  # allocation id -> run ids

    def entries(self) -> dict[str, Submitted]:
        """Return what is open, with what was concluded of it."""
        for one, runs in self._concluded.items():
            if one in self.open:
                runs.update(self.open[one].concluded)
                self.open[one] = dataclasses.replace(self.open[one], concluded=tuple(sorted(runs)))
        return self.open

    def take(self, number: int, raw: bytes) -> None:
        where = f"{self.path}:{number}"
        try:
            line = read_json(raw)
            schema = line.pop("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                raise StoreError(
                    f"{where}: schema {schema} is newer than {SCHEMA}, the newest this version reads (left as it is)"
                )
            self._event(line.pop("event"), line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SchemaError) as error:
            self.damage.append(f"{where}: damaged line skipped: {error!r}")

    def _event(self, event: str, line: dict[str, Any]) -> None:
        if event == "opened" and self.owner is None:
            self.owner = from_json(Owner, line["owner"])
            self.session = str(line.get("session") or self.session)
        elif event in {"submitted", "adopted"}:
            self._begin(line)
        elif event == "accepted":
            entry = self.open[line["id"]]
            self.open[entry.id] = dataclasses.replace(entry, native_id=str(line["native_id"]))
        elif event in {"ended", "moved"}:
            for one in line["ids"] if event == "moved" else [line["id"]]:
                self.open.pop(one, None)
        elif event == "concluded":
            self._conclude(line["runs"])
        elif event == "lease":
            self._lease(int(line["until_ns"]), line.get("ids"))
        elif event == "left":
            self.left = True

    def _begin(self, line: dict[str, Any]) -> None:
        line.pop("from", None)
        until_ns = line.pop("until_ns", None)
        entry = from_json(Submitted, line)
        self.open[entry.id] = dataclasses.replace(entry, session=entry.session or self.session)
        self.known.add(entry.id)
        self._entry_of.update({run.run_id: entry.id for run in entry.runs})
        if until_ns is not None:
            self.own_until_ns[entry.id] = int(until_ns)

    def _conclude(self, runs: list[str]) -> None:
        for run in runs:
            if run in self._entry_of:
                self._concluded.setdefault(self._entry_of[run], set()).add(run)

    def _lease(self, until_ns: int, ids: list[str] | None) -> None:
        if ids is None:  # of all; what comes later counts
            self.until_ns = until_ns
            self.own_until_ns.clear()
        else:
            self.own_until_ns.update(dict.fromkeys(ids, until_ns))
