"""One stream of a run, rebuilt from pieces that say where they belong."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

#: Most bytes of one stream that are kept: what an agent prints of it at most (``batch/logs.py``).
OUTPUT_CAP = 16 * 1024 * 1024


@dataclass
class Output:
    """One stream of a run: what of it lies in ``path``, and what the agent says that it was."""

    path: Path
    ranges: list[tuple[int, int]] = field(
        default_factory=list
    )  #: bytes that were seen, in order, not touching
    size: int | None = None  #: in bytes, as the agent says; None: its end has not been heard of
    dropped: int = 0  #: printed beyond what is kept
    sha256: str = ""
    good: bool = False
    error: str = ""  #: why the file cannot be written
    _fd: int = -1

    @property
    def seen(self) -> int:
        """How many bytes are in the file."""
        return sum(end - start for start, end in self.ranges)

    @property
    def problem(self) -> str:
        """Say what is wrong with it, or nothing."""
        if self.good:
            return ""
        if self.error:
            return f"cannot write {self.path}: {self.error}"
        if self.size is None:
            return f"of {self.path.name} {self.seen} bytes came, and not its end"
        if self.seen != self.size:
            return f"of the {self.size} bytes of {self.path.name} {self.seen} came"
        return f"{self.path.name} is not what the program printed: its SHA-256 is another"

    def write(self, offset: int, data: bytes) -> None:
        """Put *data* where it belongs."""
        if self.good or self.error or offset + len(data) > OUTPUT_CAP:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.pwrite(self._fd, data, offset)
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self._cover(offset, offset + len(data))

    def _cover(self, start: int, end: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], end)
            return
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self.ranges, (start, end)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            elif low < high:
                merged.append((low, high))
        self.ranges = merged

    def check(self) -> None:
        """Find out whether the file is what the program printed; say in it what was not kept, as a batch does."""
        if self.good or self.error or self.size is None or self.seen != self.size:
            return
        try:
            self.path.touch()
            with self.path.open("r+b") as file:
                file.truncate(self.size)
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return
                if self.dropped:
                    file.write(f"\n[{self.dropped} more bytes were not kept]\n".encode())
        except OSError as error:
            self.error = error.strerror or str(error)
            return
        self.good = True
        self.close()

    def close(self) -> None:
        """Give the descriptor back; what comes later opens the file again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def unescape(text: bytes) -> bytes | None:
    r"""Return what a program printed, with the newline unless the line goes on; None: *text* is not of our form.

    Our escapes are ``\\`` and ``\xHH``, which Python's own decoder knows; a single backslash at the end is no part of it.
    """
    if b"\\" not in text:
        return text + b"\n"
    more = (len(text) - len(text.rstrip(b"\\"))) % 2
    try:
        data = text[: len(text) - more].decode("unicode_escape").encode("latin-1")
    except (UnicodeError, ValueError):
        return None
    return data if more else data + b"\n"
