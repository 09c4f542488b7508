"""Forked processes that do one thing, for tests of what several sessions do at once or in the middle of which one dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

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
