"""What the session does about signals: SIGTERM and SIGHUP end pytest in order; a terminal that is gone is written to no more."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class Signals:
    """What the session does about signals, in the main thread. ``notify`` is called before pytest is ended."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._before: dict[int, Any] = {}  #: signal -> what was done about it before

    def catch(self) -> None:
        """From here on a runner's time-out and a dropped connection end pytest in order; what nohup ignores stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._notify()
        if number == signal.SIGHUP:
            leave_terminal()
        pytest.exit(
            f"{signal.Signals(number).name}: the session ends", returncode=int(pytest.ExitCode.INTERRUPTED)
        )

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """While closing, another SIGTERM or SIGHUP changes nothing."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else lambda *_: leave_terminal())
        try:
            yield
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """For what takes no time and must be whole: a Ctrl-C changes nothing."""
        if not self._before:
            yield
            return
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def leave_terminal() -> None:
    """Let what goes to a terminal that is gone go nowhere: each write to it would be an error, and the last we could say."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:  # no OSError
            if error.args[0] == errno.EIO:
                os.dup2(nowhere, descriptor, os.get_inheritable(descriptor))
    os.close(nowhere)
