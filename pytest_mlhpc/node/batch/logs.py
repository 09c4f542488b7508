"""PAYLOAD. The logs of one run: one for each rank, and one for what the launcher prints."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Callable, Dict, Optional

from pytest_mlhpc.node.batch.ranks import LAUNCHER, RankBook
from pytest_mlhpc.node.batch.words import PODRUN
from pytest_mlhpc.node.processes import CappedLog
from pytest_mlhpc.node.unwritten import NO_ROOM, unwritten

#: Most bytes of output that are kept of one rank.
LOG_CAP = 16 * 1024 * 1024


class RunLogs:
    """Logs of the run of *book*, made in *directory* when something is written; what cannot be written fails the run.

    *opened* is told of each log that is made. ``own`` is whose log takes the output of the process that the batch starts itself: rank 0's or the launcher's.
    """

    def __init__(
        self, book: RankBook, directory: Path, opened: Optional[Callable[[int, CappedLog], None]] = None
    ) -> None:
        self.own = 0
        self._opened = opened
        self._book = book
        self._directory = directory
        self._logs: Dict[int, CappedLog] = {}

    def open(self, number: int) -> Optional[CappedLog]:
        """Return the log of a rank, or of ``LAUNCHER``; None if it cannot be made."""
        if number not in self._logs:
            path = self._directory / ("launcher.log" if number == LAUNCHER else f"rank{number}.log")
            with contextlib.suppress(OSError):  # of a first start; who reads that one goes on reading it
                path.unlink()
            try:
                log = self._logs[number] = CappedLog(path, LOG_CAP)
                if self._opened is not None:
                    self._opened(number, log)
            except OSError as error:
                self.no_room(error, path)
                return None
        return self._logs[number]

    def write(self, number: int, data: bytes) -> None:
        """Append what a rank has printed."""
        log = self.open(number)
        try:
            if log is not None:
                log.write(data)
        except OSError as error:
            self.no_room(error, self._directory)

    def path(self, number: Optional[int]) -> str:
        """Return the path of a rank's log, or of the nearest one that there is."""
        log = self._nearest(number)
        return str(log.path) if log else ""

    def last_words(self, number: Optional[int], lines: int = 5, characters: int = 600) -> str:
        """Return the last lines of a rank's output, or of the nearest log that there is, without what only we read."""
        log = self._nearest(number)
        if log is None:
            return ""
        said = [line for line in log.tail(lines + 2, characters).splitlines() if PODRUN not in line]
        return "\n".join(said[-lines:]).strip()

    def no_room(self, error: OSError, path: Path) -> None:
        """Note that a file could not be written."""
        hint = "; free space, or choose another state directory" if error.errno in NO_ROOM else ""
        self._book.fail(unwritten(error), f"cannot write {error.filename or path}: {error.strerror}{hint}")

    def close(self) -> None:
        """Close all."""
        for log in self._logs.values():
            log.close()

    def _nearest(self, number: Optional[int]) -> Optional[CappedLog]:
        return None if number is None else self._logs.get(number) or self._logs.get(self.own)
