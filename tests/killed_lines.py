"""A child process that SIGKILL ends when a line of the product is about to run: at each line before which a file has changed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Hashable
from pathlib import Path
from types import FrameType
from typing import Any


def _each_line(traced: Collection[str], called: Callable[[], object]) -> None:
    """Let *called* be called from now on whenever this thread is about to run a line of the files *traced*."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in traced:
            return None
        if event == "line":
            called()
        return trace

    sys.settrace(trace)


def moments(traced: Collection[str], folder: Path, action: Callable[[], object]) -> list[int]:
    """Run *action*; return the numbers of the lines before which something below *folder* has changed, and of the first one.

    A kill at any other line leaves the same files as the one at the line before.
    """
    found: list[int] = []
    lines = 0
    before: Hashable = None

    def compare() -> None:
        nonlocal lines, before
        if (now := _content(folder)) != before:
            found.append(lines)
            before = now
        lines += 1

    _each_line(traced, compare)
    try:
        action()
    finally:
        sys.settrace(None)
    return found


def _content(folder: Path) -> Hashable:
    return tuple(
        (
            str(path),
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    )


def killed_at(traced: Collection[str], number: int, action: Callable[[], object]) -> bool:
    """Let a child do it, and be killed when the product is about to run its line of that number; return whether it was."""
    child = os.fork()
    if child == 0:
        left = number

        def count() -> None:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        try:
            _each_line(traced, count)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
