"""PAYLOAD. Which modules run on leashes, and signals as something that a selector hears."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any, Dict

from pytest_mlhpc.node.vet.load_runner import CHILD


@dataclass(frozen=True)
class Programs:
    """Modules to be started; tests put scripted ones in their place."""

    passive: str = "pytest_mlhpc.node.vet.passive"
    child: str = CHILD


class Signals:
    """Signals to end, and threads that have news, as bytes on a pipe. ``told`` is the signal's number, 0 before.

    Outside the main thread, where Python sets no handlers, whoever called has to end the vetting.
    """

    def __init__(self) -> None:
        self.told = 0
        self.wakeup, self._waker = os.pipe()
        for fd in (self.wakeup, self._waker):
            os.set_blocking(fd, False)
        self._before: Dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._end)

    def _end(self, number: int, _frame: Any) -> None:
        self.told = self.told or number
        self.wake()

    def wake(self) -> None:
        """Let the selector look."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b".")

    def drain(self) -> None:
        """Take what has woken it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)

    def close(self) -> None:
        """Give signals back to whoever had them; the pipe stays, as a thread that hangs may still write to it."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
