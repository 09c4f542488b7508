"""The store: one append-only file of JSON lines per process. No locks, so that any file system will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_mlhpc.results.record import Record


class Store:
    """Records under ``state_dir/records/YYYY-MM/<session>.jsonl``; this process writes its own file only."""

    def __init__(self, state_dir: Path, session_id: str) -> None:
        raise NotImplementedError

    def append(self, record: Record) -> None:
        """Store *record* durably (one write, fsync).

        Raises:
            StoreError: disk full, over quota, not writable; names the path. Nothing torn is left behind.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Idempotent."""
        raise NotImplementedError


def read_records(state_dir: Path, on_problem: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Yield all records of all sessions, files in order of name, streaming.

    A torn last line (its writer died or is still writing), a damaged line and a newer schema are skipped and told to
    *on_problem* as ``path:line: what``.
    """
    raise NotImplementedError
