"""Reading a ledger file: what of it is open, who holds it, and until when."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.lease import Owner
from pytest_mlhpc.jobs.submitted import Submitted
from pytest_mlhpc.results.schema import SchemaError, from_json

#: Version of the lines. 1 had ids only; files of both are read.
SCHEMA = 2
#: A session's name in the name of its file; ``@`` parts it from its claimer's.
NAME = r"[A-Za-z0-9._+-]{1,100}"
#: A longer file is none of ours: an entry has about 1 kB, a session some thousands.
MAX_BYTES = 64 << 20
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class LedgerFile:
    """One file as it was read. ``known`` are the ids of all that was ever in it, ``open`` of what has not ended."""

    path: Path
    session: str
    owner: Owner
    until_ns: int | None  #: end of the lease of a detached session
    open: dict[str, Submitted]
    known: frozenset[str]
    mtime_ns: int
    torn: bool  #: its last line has no end: a new one must begin with a line break
    damage: tuple[str, ...] = ()  #: lines that were skipped

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
        open=reader.open,
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
        self.open: dict[str, Submitted] = {}
        self.known: set[str] = set()
        self.damage: list[str] = []

    def take(self, number: int, raw: bytes) -> None:
        where = f"{self.path}:{number}"
        try:
            line = json.loads(raw)
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
            line.pop("from", None)
            entry = from_json(Submitted, line)
            self.open[entry.id] = dataclasses.replace(entry, session=entry.session or self.session)
            self.known.add(entry.id)
        elif event == "accepted":
            entry = self.open[line["id"]]
            self.open[entry.id] = dataclasses.replace(entry, native_id=str(line["native_id"]))
        elif event == "ended":
            self.open.pop(line["id"], None)
        elif event == "moved":
            for one in line["ids"]:
                self.open.pop(one, None)
        elif event == "lease":
            self.until_ns = int(line["until_ns"])
