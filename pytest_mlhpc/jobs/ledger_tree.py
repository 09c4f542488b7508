"""All ledger files of a user as they are at one moment, who has claimed which, and what of them is open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.lease import Lease, shared_now_ns
from pytest_mlhpc.jobs.ledger_file import LedgerFile, read_ledger
from pytest_mlhpc.jobs.submitted import Submitted
from pytest_mlhpc.results.dates import minutes

#: How often to list folders that do not stand still.
_LOOKS = 10


@dataclass(frozen=True)
class Entry:
    """One open allocation. ``state`` is ``held`` (a live session watches it), ``detached`` or ``expired``."""

    submitted: Submitted
    lease: Lease
    state: str
    here: bool  #: its owner ran on this host: processes of a `local` one would be here

    @property
    def claimable(self) -> bool:
        """Whether somebody else may take it over; what runs on another machine's own processes cannot be."""
        return self.state != "held" and (self.here or self.submitted.scheduler != "local")

    @property
    def reapable(self) -> bool:
        """Whether it is to be ended unless somebody takes it over."""
        return self.claimable and self.state == "expired"

    @property
    def why(self) -> str:
        """Why it has expired."""
        owner = self.lease.owner
        if self.lease.until_ns == 0:
            return f"its session on {owner.host} was done with it, and not sure that it is gone"
        if self.lease.until_ns is not None:
            return f"its lease ended {minutes(self.lease.until_ns)}"
        return f"its session on {owner.host} (process {owner.pid}) ended without detaching"


class Files:
    """All ledger files of this user as they were at one moment, and who claimed which."""

    def __init__(self, state_dir: Path) -> None:
        self.left_alone: list[str] = []
        self.moved = False  #: a file went elsewhere while this looked: what is in it may not be seen here
        self._files: list[LedgerFile] = []
        self._clock = False
        self.now_ns = time.time_ns()
        folder = state_dir / "ledger"
        try:
            paths = _all(folder)
        except OSError as error:
            raise StoreError(f"the ledgers in {error.filename} cannot be listed: {error.strerror}") from error
        if paths:
            self._ask_clock(folder)
        for path in paths:
            self._read(path)
        self.left_alone += [
            _orphan(file) for file in self._files if file.claimer and _is_orphan(file, folder)
        ]

    def _ask_clock(self, folder: Path) -> None:
        try:
            self.now_ns, self._clock = shared_now_ns(folder), True
        except OSError as error:  # a full or read-only disk: nothing can be claimed anyway
            self.left_alone.append(f"{folder}: {error.strerror}: sessions of other hosts count as alive")

    def _read(self, path: Path) -> None:
        try:
            info = path.lstat()
            if info.st_uid != os.getuid():
                self.left_alone.append(f"{path}: another user's, left alone")
                return
            if not info.st_size:
                return  # its session makes it at this moment
            file = read_ledger(path)
        except FileNotFoundError:
            self.moved = True  # put aside or claimed
            return
        except StoreError as error:
            if path.exists():
                self.left_alone.append(str(error))
            else:
                self.moved = True
            return
        if file.owner.uid != os.getuid():
            self.left_alone.append(f"{path}: written by user {file.owner.uid}, left alone")
            return
        self.left_alone += file.damage
        self._files.append(file)

    def find(self, name: str) -> LedgerFile | None:
        """Return the file of the session *name* that nobody has claimed."""
        return next((file for file in self._files if file.name == name and not file.claimer), None)

    def roots(self) -> list[LedgerFile]:
        """Return the files that are raced for."""
        return [file for file in self._files if not file.claimer]

    def below(self, root: LedgerFile) -> Iterator[LedgerFile]:
        """Yield what the session of *root* has claimed, and what those had, leaves first."""
        for file in self._files:
            if file.claimer == root.name:
                yield from self.below(file)
                yield file

    def alive(self, file: LedgerFile) -> bool:
        """Whether somebody watches what is in *file*: its owner, or whoever has claimed it."""
        root = self._root(file)
        silent_s = (self.now_ns - root.mtime_ns) / 1e9 if self._clock else 0.0
        return not root.left and root.owner.alive(silent_s)

    def entries(self, root: LedgerFile) -> Iterator[Entry]:
        """Yield all that is open in the tree of *root*."""
        for file in (*self.below(root), root):
            yield from self.entries_of(file)

    def entries_of(self, file: LedgerFile, *, claimed: bool = False) -> Iterator[Entry]:
        """Yield what is open in *file* and unknown to those who claimed it; *claimed* by whoever asks."""
        alive = not claimed and self.alive(file)
        known = frozenset().union(*(one.known for one in self._above(file)))
        for entry in file.open.values():
            if entry.id not in known:
                lease = (
                    Lease(self._root(file).owner, alive=True)
                    if alive
                    else Lease(file.owner, alive=False, until_ns=file.lease_of(entry.id))
                )
                yield Entry(entry, lease, lease.state(self.now_ns), file.owner.local())

    def _root(self, file: LedgerFile) -> LedgerFile:
        return [file, *self._above(file)][-1]

    def _above(self, file: LedgerFile) -> Iterator[LedgerFile]:
        while file.claimer:
            parent = next((one for one in self._files if one.name == file.claimer), None)
            if parent is None:
                return
            yield parent
            file = parent


def _is_orphan(file: LedgerFile, folder: Path) -> bool:
    """Whether the claimer has no file any more. A file only ever goes from ``ledger`` to ``claimed``, so look there last."""
    if (folder / f"{file.claimer}.jsonl").exists() or any(
        (folder / "claimed").glob(f"{file.claimer}@*.jsonl")
    ):
        return False
    return file.path.exists()


def _orphan(file: LedgerFile) -> str:
    back = file.path.parent.parent / f"{file.name}.jsonl"
    return (
        f"{file.path}: session {file.claimer} has claimed it and has no ledger any more: somebody moved files by hand; if "
        f"that session has ended, move it to {back}"
    )


def _all(folder: Path) -> list[Path]:
    """Return all files. One that is given back in between is in neither folder when that is listed: so look again."""
    for _ in range(_LOOKS):
        files, claimed = _listed(folder), _listed(folder / "claimed")
        if _listed(folder) == files:
            break
    return [*files, *claimed]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []
