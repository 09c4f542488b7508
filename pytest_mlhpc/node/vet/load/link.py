"""A connection between two nodes: every wait ends, a dead peer differs from a slow one; and the exchange by TCP over it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.agents.wire import new_challenge, proof, proved
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.load.arguments import Failed
from pytest_mlhpc.node.vet.load.node_facts import at_once

#: Version of what is said.
VERSION = 2

#: Longest line, in bytes, and longest wait for the first line of somebody who connected, in seconds.
LONGEST, HELLO_S = 4096, 1.0

#: Pause before another try to connect, in seconds; the longest single try.
AGAIN_S, TRY_S = 0.05, 2.0


class Deadline:
    """A point in time on this node's clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the seconds until then, not below 0."""
        return max(0.0, self._end - time.monotonic())


class Link:
    """Lines of JSON over one connection."""

    def __init__(self, connection: socket.socket, deadline: Deadline, partner: str) -> None:
        self.socket, self._deadline, self.partner = connection, deadline, partner
        self._unread = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line.

        Raises:
            Failed: dead or hung.
        """
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            self.socket.settimeout(max(0.01, self._deadline.left))
            self.socket.sendall(data)
        except OSError as error:
            raise lost(error, self.partner, self._deadline) from error

    def receive(self, within_s: Optional[float] = None) -> Dict[str, Any]:
        """Return the next line.

        Raises:
            Failed: dead or hung, or it says something else than we expect (``garbage``).
        """
        until = time.monotonic() + min(
            self._deadline.left, self._deadline.left if within_s is None else within_s
        )
        while b"\n" not in self._unread:
            if len(self._unread) > LONGEST:
                raise Failed("garbage", f"{self.partner} sent a line that is too long")
            try:
                self.socket.settimeout(max(0.01, until - time.monotonic()))
                data = self.socket.recv(LONGEST)
            except OSError as error:
                raise lost(error, self.partner, self._deadline) from error
            if not data:
                raise dead(self.partner)
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            message = read_json(line)
        except (ValueError, RecursionError) as error:
            raise Failed("garbage", f"{self.partner} sent {line[:40]!r}, which is no message") from error
        if not isinstance(message, dict):
            raise Failed("garbage", f"{self.partner} sent {line[:40]!r}, which is no message")
        return message

    def check(self) -> None:
        """Look whether the partner is still there, without waiting.

        Raises:
            Failed: its process has ended.
        """
        if not self._unread and select.select([self.socket], [], [], 0)[0]:
            with contextlib.suppress(BlockingIOError):
                try:
                    if not self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        raise dead(self.partner)
                except ConnectionError as error:
                    raise dead(self.partner) from error

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def dead(partner: str) -> Failed:
    """Return what is said of a partner whose process has ended."""
    return Failed("dead", f"{partner} closed the connection: its process has ended or given up")


def hung(partner: str, deadline: Deadline, what: str = "did not answer") -> Failed:
    """Return what is said of a partner from whom nothing comes."""
    return Failed(
        "hung",
        f"{partner} {what} within {deadline.seconds:g} s: its process hangs, or the network between loses all",
    )


def lost(error: OSError, partner: str, deadline: Deadline) -> Failed:
    """Return what an error of a connection means."""
    if isinstance(error, (socket.timeout, TimeoutError)):  # two until Python 3.10
        return hung(partner, deadline)
    if isinstance(error, ConnectionError):
        return dead(partner)
    return Failed("network", f"the connection with {partner} broke: {os.strerror(error.errno or 0)}")


class Door:
    """Where the second comes to the first. Whoever does not say what we expect is turned away."""

    def __init__(self, port: int) -> None:
        try:
            self._socket = _listen(port)
        except OSError as error:
            text = f"port {port} of this node cannot be listened at: {os.strerror(error.errno or 0)}"
            raise Failed("port", text) from error

    def accept(self, key: bytes, deadline: Deadline, partner: str) -> Tuple[Link, Dict[str, Any]]:
        """Return the next connection that proves to know *key*, which goes over no network, and what it said of itself.

        Raises:
            Failed: nobody came (``absent``).
        """
        while deadline.left:
            self._socket.settimeout(max(0.01, deadline.left))
            try:
                connection, _ = self._socket.accept()
            except socket.timeout:
                break
            except OSError as error:  # somebody connected and went away again
                if error.errno in (errno.ECONNABORTED, errno.EINTR, errno.EAGAIN):
                    continue
                raise Failed(
                    "port", f"no connection can be accepted: {os.strerror(error.errno or 0)}"
                ) from error
            link = Link(connection, deadline, partner)
            hello = _authenticated(link, key)
            if hello is not None:
                return link, hello
            link.close()
        raise Failed(
            "absent",
            f"{partner} did not connect within {deadline.seconds:g} s: it never began, hangs, or cannot reach us",
        )

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def _authenticated(link: Link, key: bytes) -> Optional[Dict[str, Any]]:
    """Return what was said by who came, if that is a partner: both have proved to know the key."""
    ours = new_challenge()
    try:
        link.send({"challenge": ours})
        greeting = link.receive(HELLO_S)
        text, theirs = str(greeting.get("hello")), str(greeting.get("challenge"))
        if not proved(key, greeting.get("mac"), "second", ours, theirs, text):
            return None
        link.send({"mac": proof(key, "first", theirs, ours)})
        hello = read_json(text)
    except (Failed, ValueError):
        return None
    return hello if isinstance(hello, dict) and hello.get("mlhpc") == VERSION else None


def _greet(link: Link, key: bytes, hello: Mapping[str, Any]) -> None:
    """Prove to the first that we know the key, and have it prove the same.

    Raises:
        Failed: as :class:`Link`; it does not know the key (``secret``).
    """
    text, ours = json.dumps({"mlhpc": VERSION, **hello}), new_challenge()
    theirs = str(link.receive().get("challenge"))
    link.send({"hello": text, "challenge": ours, "mac": proof(key, "second", theirs, ours, text)})
    if not proved(key, link.receive().get("mac"), "first", ours, theirs):
        raise Failed(
            "secret", f"{link.partner} is not the partner: it does not know the key of this exchange"
        )


def _listen(port: int) -> socket.socket:
    """Listen at a port of all our addresses, of both kinds where this kernel has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=64)


def call(address: str, port: int, key: bytes, hello: Mapping[str, Any], deadline: Deadline) -> Link:
    """Connect to the first, which may not listen yet, and say *hello*.

    Raises:
        Failed: the name is unknown (``name``), nobody listens there (``dead``), nothing comes back (``hung``), or it is
            somebody else (``secret``).
    """
    where = f"{address}, port {port}"
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = f"the partner's name {address} does not resolve on this node: {error}"
        raise Failed("name", text) from error
    problem: Optional[OSError] = None
    while deadline.left:
        for family, kind, protocol, _, place in found:
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(max(0.01, min(TRY_S, deadline.left)))
            try:
                connection.connect(place)
            except OSError as error:
                problem = error
                connection.close()
                continue
            link = Link(connection, deadline, where)
            try:
                _greet(link, key, hello)
            except Failed:
                link.close()
                raise
            return link
        time.sleep(
            min(AGAIN_S, deadline.left)
        )  # nothing tells when somebody begins to listen on another node
    if isinstance(problem, ConnectionRefusedError):
        raise Failed(
            "dead",
            f"nothing listened at {where} within {deadline.seconds:g} s: the partner never began, or ended",
        )
    if problem is None or isinstance(problem, (socket.timeout, TimeoutError)):
        raise hung(where, deadline)
    raise Failed("network", f"{where} cannot be reached from this node: {os.strerror(problem.errno or 0)}")


def close_all(links: List[Link]) -> None:
    """Close connections."""
    for link in links:
        link.close()


#: Connections: more than one, since each way of one is the work of one core; equal everywhere, as it is part of the key.
STREAMS = 2

#: Most bytes of one call, so that progress is noticed.
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
        began = time.perf_counter()
        at_once(2 * len(self._links), lambda number, _: (self._send, self._receive)[number % 2](number // 2))
        return time.perf_counter() - began

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
