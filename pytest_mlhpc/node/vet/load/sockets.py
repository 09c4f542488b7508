"""PAYLOAD, no torch. An exchange by TCP: both nodes send and receive at the same time, over two connections."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import List, Sequence

from pytest_mlhpc.node.vet.load.link import Deadline, Link, dead, hung
from pytest_mlhpc.node.vet.load.protocol import Failed

#: Connections: more than one, since each way of one is the work of one core; equal everywhere, as it is part of the key.
STREAMS = 2

#: Most bytes of one call, so that progress is seen.
PIECE = 1 << 20

#: Who made no progress for so long when time is over hangs; who did is slow. In seconds.
SILENT_S = 1.0


class Sockets:
    """The connections of one exchange, and what is sent over them. ``links`` are as many on both sides, in one order."""

    def __init__(self, links: Sequence[Link], size: int, deadline: Deadline, partner: str) -> None:
        self._links, self._deadline, self._partner = links, deadline, partner
        self._each = max(1, size // len(links))
        self._outgoing = bytes(range(256)) * (min(PIECE, self._each) // 256 + 1)
        self._done = [[0, 0] for _ in links]
        self._moved_at = time.monotonic()

    @property
    def size(self) -> int:
        """Return the bytes that each side sends."""
        return self._each * len(self._links)

    def exchange(self) -> float:
        """Send and receive all of it once; return the seconds that it took here.

        Raises:
            Failed: dead, hung, slow or network.
        """
        self._done = [[0, 0] for _ in self._links]
        problems: List[BaseException] = []
        threads = [
            threading.Thread(target=self._guarded, args=(number, way, problems), daemon=True)
            for number in range(len(self._links))
            for way in (0, 1)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if problems:
            raise problems[0]
        return seconds

    def _guarded(self, number: int, way: int, problems: List[BaseException]) -> None:
        try:
            (self._send, self._receive)[way](number)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for this one
            problems.append(error)

    def _send(self, number: int) -> None:
        connection, view = self._links[number].socket, memoryview(self._outgoing)
        while self._done[number][0] < self._each:
            self._wait(connection, sending=True)
            left = min(self._each - self._done[number][0], len(view))
            try:
                sent = connection.send(view[:left], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except OSError as error:
                raise dead(self._partner) from error
            self._moved(number, 0, sent)

    def _receive(self, number: int) -> None:
        connection, buffer = self._links[number].socket, memoryview(bytearray(min(PIECE, self._each)))
        while self._done[number][1] < self._each:
            self._wait(connection, sending=False)
            left = min(self._each - self._done[number][1], len(buffer))
            try:
                got = connection.recv_into(buffer[:left], left, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise dead(self._partner) from error
            if not got:
                raise dead(self._partner)
            self._moved(number, 1, got)

    def _moved(self, number: int, way: int, count: int) -> None:
        self._done[number][way] += count
        self._moved_at = time.monotonic()

    def _wait(self, connection: socket.socket, *, sending: bool) -> None:
        """Wait until something can be sent or received.

        Raises:
            Failed: time is over.
        """
        wanted = [connection]
        ready = select.select([] if sending else wanted, wanted if sending else [], [], self._deadline.left)
        if self._deadline.left:
            return
        if not any(ready) and time.monotonic() - self._moved_at > min(SILENT_S, self._deadline.seconds / 2):
            raise hung(
                self._partner, self._deadline, "stopped in the middle of an exchange, and did not go on"
            )
        got = sum(way for one in self._done for way in one)
        text = (
            f"the exchange with {self._partner} is too slow: {got / 2**20:.1f} of {self.size * 2 / 2**20:.1f} MiB within "
            f"{self._deadline.seconds:g} s"
        )
        raise Failed("slow", text)
