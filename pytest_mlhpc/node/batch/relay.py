"""PAYLOAD. What the batch says to the controller: worker lines on one descriptor, one write each."""

from __future__ import annotations

import errno
import os
from typing import Any, Mapping, Protocol

from pytest_mlhpc.node.processes import CappedLog
from pytest_mlhpc.node.protocol.lines import Message, encode
from pytest_mlhpc.node.protocol.plan import RunPlan


class ControllerGone(Exception):  # noqa: N818 - what happened, in the words of the flow
    """Nobody reads our lines any more; the batch must end."""


class CannotWrite(ControllerGone):
    """Lines cannot be written any more: nothing that still runs could be told of. ``error`` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.error = error


class Lines(Protocol):
    """The way to the controller, whatever it is."""

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send one message of *run*.

        Raises:
            ControllerGone: nobody will read it.
        """

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Take note of a new log of *run*: of the rank *number*, or of its launcher (-1)."""


class Relay:
    """Numbers and writes worker lines. Blocks while the controller is slow to read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seq = 0

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send one message of *run*.

        Raises:
            ControllerGone: the channel is closed.
            CannotWrite: a file system is full or read-only. The line may be there in part, which its reader sees.
        """
        for line in encode(Message(run.run_id, run.nonce, kind, body), self._seq):
            try:
                count = os.write(self._fd, line)
            except BrokenPipeError as error:
                raise ControllerGone from error
            except OSError as error:
                raise CannotWrite(error) from error
            if count < len(line):
                raise CannotWrite(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            self._seq += 1

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Do nothing: who reads our lines sees the logs as well."""
