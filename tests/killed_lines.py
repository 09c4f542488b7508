"""A child process that SIGKILL ends when a line of the product is about to run: for each line the first time, and the last."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

Line = tuple[str, int]


def lines_run(traced: Collection[str], action: Callable[[], object]) -> list[Line]:
    """Return the lines of the files *traced* that *action* runs, in their order."""
    found: list[Line] = []

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in traced:
            return None
        if event == "line":
            found.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return found


def killed_at(traced: Collection[str], number: int, action: Callable[[], object]) -> bool:
    """Let a child do it, and be killed when the product is about to run its line of that number; return whether it was."""
    child = os.fork()
    if child == 0:
        left = [number]

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            if frame.f_code.co_filename not in traced:
                return None
            if event == "line":
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return trace

        try:
            sys.settrace(trace)
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def moments(lines: Sequence[Line]) -> list[int]:
    """Return the numbers of the first and of the last time that each line is run."""
    first: dict[Line, int] = {}
    last: dict[Line, int] = {}
    for number, line in enumerate(lines):
        first.setdefault(line, number)
        last[line] = number
    return sorted({*first.values(), *last.values()})
