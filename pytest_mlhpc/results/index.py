"""A SQLite index over the record files: rebuildable at will, never the truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.results.record import Record, SeriesKey


class Index:
    """Finds series and records fast. Every question first takes in what was appended since the last one."""

    def __init__(self, state_dir: Path) -> None:
        raise NotImplementedError

    def history(
        self,
        key: SeriesKey,
        *,
        limit: int = 30,
        since: str = "",
        default_branch: str = "main",
        calibration_reference: float | None = None,
    ) -> list[float]:
        """Return the last *limit* values of *key* that may feed the judge, oldest first.

        Attempt 0, verdict ``passed``; nightly records of the default branch only - on `local` (``key.fingerprint`` is
        set), which has no nightly runs, manual ones of any branch too. ``since`` (ISO 8601) is the entry's date.
        With ``calibration_reference``, rates of a machine that was slower then are corrected for it.
        """
        raise NotImplementedError

    def last_good(self, key: SeriesKey) -> Record | None:
        """Return the newest record of the benchmark of *key* (metric aside) that passed, or None."""
        raise NotImplementedError

    def newest(self, *, session: str = "", node_id: str = "", limit: int = 50) -> Sequence[Record]:
        """Return the newest records, newest first, of a session or a test where given."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the database. Idempotent."""
        raise NotImplementedError
