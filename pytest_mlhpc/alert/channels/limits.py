"""A time limit around one exchange with a peer, whatever the peer does: refuse, hang, or dribble a byte a second."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: How long an exchange whose connection was cut may take to notice, in seconds.
_NOTICE_S = 2.0


class Line:
    """The connection of one exchange, which another thread can cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut = False
        self._socket: socket.socket | None = None

    def hold(self, connected: socket.socket) -> None:
        """Remember the connection, by a descriptor of our own: TLS takes the socket's away while it shakes hands.

        Raises:
            TimeoutError: The time was over before there was a connection.
        """
        with self._lock:
            if self._cut:
                raise TimeoutError
            self._drop()
            self._socket = socket.socket(fileno=os.dup(connected.fileno()))

    def cut(self) -> None:
        """End the connection: who reads from it or writes to it is woken at once."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the other side was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Let go of the connection."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def within(limit_s: float, work: Callable[[Line], T]) -> T:
    """Return what *work* returns, if it does so in time.

    A socket's own time limit knows only of silence, and none reaches the resolver of names: hence a thread, left behind as a
    daemon in the worst case, when the resolver hangs.

    Args:
        limit_s: Of the whole exchange, in seconds.
        work: Does it, and gives its connection to the line it receives.

    Raises:
        TimeoutError: It was not done in time.
        BaseException: What *work* raised.
    """
    line = Line()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work(line))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            failed.append(error)
        finally:
            line.release()

    thread = threading.Thread(target=run, name="mlhpc-alert", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        line.cut()
        thread.join(_NOTICE_S)
        raise TimeoutError  # also if it returned something now: what is cut off may look whole
    if failed:
        raise failed[0]
    return done[0]
