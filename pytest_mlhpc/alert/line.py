"""The connection under one exchange with a peer, which another thread can cut: while it is made, shakes hands, or waits.

A socket's own time limit knows only of silence; a peer that dribbles a byte a second would stretch it for ever. Who keeps the
time (``alert/channels/limits.py``, ``provision/kubernetes/transport.py``) holds a line and cuts it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading


class LineCut(OSError):  # noqa: N818 - what happened
    """The line was cut before there was a connection."""


class Line:
    """The connection of one exchange. ``why`` it was cut is empty as long as it was not."""

    def __init__(self) -> None:
        self.why = ""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def hold(self, connected: socket.socket) -> None:
        """Remember the connection, by a descriptor of our own: TLS takes the socket's away while it shakes hands.

        Raises:
            LineCut: The line was cut before there was a connection.
        """
        with self._lock:
            if self.why:
                raise LineCut(self.why)
            self._drop()
            self._socket = socket.socket(fileno=os.dup(connected.fileno()))

    def cut(self, why: str) -> None:
        """End the connection: who reads from it or writes to it is woken at once. The first reason stays."""
        with self._lock:
            self.why = self.why or why
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the other side was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Let go of the connection, which may serve another exchange now."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
