"""Forked processes that do one thing, for tests of what several sessions do at once or in the middle of which one dies."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

#: The exit code of a process that ended itself where the test wanted it to.
DIED = 7


def start(work: Callable[[], object]) -> int:
    """Run *work* in a process of its own and return its id."""
    child = os.fork()
    if not child:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def codes_of(children: Sequence[int]) -> list[int]:
    """Wait for processes and return their exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_at_once(works: Sequence[Callable[[], object]]) -> list[int]:
    """Let processes of their own begin in the same moment; return their exit codes."""
    gate_out, gate_in = os.pipe()

    def wait_and(work: Callable[[], object]) -> None:
        os.close(gate_in)
        os.read(gate_out, 1)  # until the parent closes the other end
        work()

    children = [start(partial(wait_and, work)) for work in works]
    os.close(gate_out)
    os.close(gate_in)
    return codes_of(children)


def run(work: Callable[[], object]) -> int:
    """Run *work* in a process of its own and return its exit code."""
    return codes_of([start(work)])[0]


def killed_after(work: Callable[[], object]) -> None:
    """Let a process do *work*, say so, and wait; then kill it."""
    reading, writing = os.pipe()

    def works_and_waits() -> None:
        work()
        os.write(writing, b"x")
        signal.pause()

    child = start(works_and_waits)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        assert codes_of([child]) == [-signal.SIGKILL]


#: Calls that change a disk, but for `open`, which makes nothing but an empty file: death after it is death before the next.
_CHANGES = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "utime")


def die_at_change(number: int, *, torn: bool = False) -> None:
    """Let this process end as by SIGKILL before its *number*-th change of a disk; if *torn*, in the middle of that write."""
    left = itertools.count(number, -1)

    def dying(call: Callable[..., object], *args: object, **options: object) -> object:
        if next(left) == 0:
            if torn and call is write:
                write(args[0], args[1][: len(args[1]) // 2])  # type: ignore[arg-type, index]
            os._exit(DIED)
        return call(*args, **options)

    write = os.write
    for name in _CHANGES:
        setattr(os, name, partial(dying, getattr(os, name)))


def deaths(
    folder: Path,
    leave: Callable[[Path], object],
    work: Callable[[Path], object],
    *,
    torn: bool = False,
    numbers: range = range(200),
) -> Iterator[Path]:
    """Yield a state directory for each change of the disk that *work* makes: it died before, or within, that change.

    Each is new, and *leave* has written what was there before. In the last one *work* came to its end. *numbers*: of the
    changes.
    """
    for number in numbers:
        state = folder / "turns" / str(number)
        leave(state)
        code = run(lambda state=state, number=number: (die_at_change(number, torn=torn), work(state)))
        assert code in {0, DIED}, number
        yield state
        if code == 0:
            return
    raise AssertionError("it changes the disk without end")
