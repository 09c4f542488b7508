"""A connection between processes of one allocation: JSON lines on a stream socket, signs of life, and the proof of who is there.

Whoever reaches a port of ours may connect. Both sides prove that they hold the same plan, without showing it: who listens (a hub,
or a run's batch) sends a challenge, who came (an agent, or a rank) answers with its own and an HMAC (RFC 2104) over both and
its greeting, and who listens with one over both. What follows is as safe as the network between the nodes, on which the
ranks' own traffic goes unprotected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.plan import Plan

#: Longest line before and after the other side has proved who it is, in bytes. An environment may have 2 MB (Linux'
#: default of a quarter of an 8 MiB stack), which JSON makes longer.
MAX_HANDSHAKE, MAX_LINE = 4096, 16 * 1024 * 1024

#: Longest time between two signs of life, in seconds; a sixth of the silence that ends a connection where that is less.
BEAT_S = 5.0

#: How long the proof may take, in seconds.
PROOF_S = 30.0

#: After how many seconds without an answer the other node counts as dead: a probe after the first, three more with the
#: second between them (tcp(7)).
KEEPALIVE_S, PROBE_S, PROBES = 15, 5, 3

#: Most connections that may wait to be accepted; the kernel has a limit of its own (net.core.somaxconn, usually 4,096).
BACKLOG = 4096


def keep_alive(connection: socket.socket) -> None:
    """Let both ends of a TCP connection notice that the other's node is dead, also while data is under way."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    patience_ms = 1000 * (KEEPALIVE_S + PROBE_S * PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)


def listen(ports: Sequence[int], host: str = "") -> socket.socket:
    """Return a socket that listens at the first free one of *ports*: at *host*, or at all addresses of both kinds.

    Raises:
        OSError: all are taken.
    """
    trouble = OSError("there are no ports")
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            dual = family == socket.AF_INET6
            if dual and (host or not socket.has_dualstack_ipv6()):
                continue
            try:
                made = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
            except OSError as error:  # taken, or a kernel whose IPv6 is switched off
                trouble = error
                continue
            made.setblocking(False)
            return made
    raise trouble


def connect(host: str, port: int, limit_s: float) -> socket.socket:
    """Return a connection to another node.

    Raises:
        OSError: nobody listens there, within *limit_s* seconds; or there is no such host.
    """
    try:
        connection = socket.create_connection((host, port), limit_s)
    except UnicodeError as error:  # a host name that is none
        raise OSError(str(error)) from error
    keep_alive(connection)
    return connection


def address_of(text: str) -> Tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``address`` or ``[address]:port``; port 0 where none is given.

    Raises:
        ValueError: it is no address.
    """
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(f"the address {text!r:.80} is none")
    return host, int(port or 0)


def key_of(plan: Plan) -> bytes:
    """Return what only agents of this allocation know: a digest of its id and its runs' secrets."""
    return _digest(plan.allocation_id, *(f"{run.run_id} {run.secret}" for run in plan.runs))


def key_of_run(run_id: str, secret: str) -> bytes:
    """Return what only the batch and the ranks of one attempt of a run know."""
    return _digest(f"{run_id} {secret}")


def _digest(*fields: str) -> bytes:
    return hashlib.sha256("\n".join(fields).encode("utf-8", "surrogatepass")).digest()


def new_challenge() -> str:
    """Return a text that nobody has used before."""
    return secrets.token_hex(32)


def proof(key: bytes, who: str, *fields: str) -> str:
    """Return the HMAC by which *who* (agent or hub) shows that it holds the key."""
    text = json.dumps([who, *fields]).encode("ascii")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def proved(key: bytes, given: object, who: str, *fields: str) -> bool:
    """Return whether *given* is that HMAC, in a time that tells nothing of it."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode("utf-8", "replace"), proof(key, who, *fields).encode("ascii")
    )


class Wire:
    """One connection. Nothing here waits or raises: ``ended`` says why it is over, empty while it is not.

    ``trusted`` is for who uses it to set; before that, lines are short.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.trusted = False
        self.ended = ""
        self.since = self.heard = time.monotonic()
        self._next_beat = 0.0
        self._in = bytearray()
        self._out = bytearray()
        self._unread: List[Dict[str, Any]] = []

    @property
    def waiting(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._out)

    @property
    def arrived(self) -> bool:
        """Whether ``read`` has something to return although nothing arrives."""
        return bool(self._unread)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, as far as that goes now; ``flush`` sends the rest."""
        if not self.ended:
            self._out += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as that goes now."""
        try:
            while self._out and not self.ended:
                del self._out[: self.socket.send(memoryview(self._out)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(error.strerror or str(error))

    def tend(self, silence_s: float) -> None:
        """Send a sign of life where one is due, and end a connection on which nothing came for *silence_s* seconds.

        Who has said something that was not read yet is not silent.
        """
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + beat_every(silence_s)
            self.send({"kind": "beat"})
        if now - self.heard > silence_s and not self.ended and not _readable(self.socket):
            self.end(f"no sign of life for {silence_s:g} s")

    def read(self) -> List[Dict[str, Any]]:
        """Return what has arrived, less signs of life. What is no message ends the connection."""
        try:
            for _ in range(16):  # then the others' turn
                data = self.socket.recv(1 << 16)
                if not data:
                    self.end("it closed the connection")
                    break
                self.heard = time.monotonic()
                self._in += data
                if len(self._in) > (MAX_LINE if self.trusted else MAX_HANDSHAKE):
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(error.strerror or str(error))
        unread, self._unread = self._unread, []
        return unread + self._split()

    def unread(self, messages: List[Dict[str, Any]]) -> None:
        """Take back what was read too early: several messages may arrive as one piece."""
        self._unread = messages + self._unread

    def _split(self) -> List[Dict[str, Any]]:
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        found: List[Dict[str, Any]] = []
        for line in lines:
            message = _parse(line)
            if message is None:
                self.end("it sent something that is no message")
                break
            if message["kind"] != "beat":
                found.append(message)
        if len(rest) > (MAX_LINE if self.trusted else MAX_HANDSHAKE):
            self.end("it sent a line that is too long")
        return found

    def end(self, why: str) -> None:
        """Note why the connection is over, unless it was before."""
        self.ended = self.ended or why

    def close(self) -> None:
        """Close it."""
        self.end("closed")
        with contextlib.suppress(OSError):  # closing is all we can do
            self.socket.close()


class Handshake:
    """Whoever came to a port of ours, challenged at once, until they have proved that they hold *key*."""

    def __init__(self, accepted: socket.socket, key: bytes) -> None:
        self.wire = Wire(accepted)
        self._key, self._challenge, self._theirs = key, new_challenge(), ""
        self.wire.send({"kind": "challenge", "challenge": self._challenge})

    def greeting(self) -> Optional[str]:
        """Return the greeting of who has proved to be one of ours, which ``welcome`` is to answer. Who has not is done with."""
        self.wire.flush()
        for message in self.wire.read()[:1]:
            hello, theirs = str(message.get("hello")), str(message.get("challenge"))
            if proved(self._key, message.get("mac"), "agent", self._challenge, theirs, hello):
                self._theirs = theirs
                return hello
            self.wire.end("it does not know our key")
        return None

    def welcome(self, refused: str = "") -> None:
        """Show that we hold the key too; *refused* is why who came is not wanted all the same."""
        mac = proof(self._key, "hub", self._theirs, self._challenge)
        self.wire.send({"kind": "welcome", "mac": mac, "refused": refused})


class Refused(ConnectionError):  # noqa: N818 - an answer, not a defect
    """Who listens knows the key, and does not want us: the text says why. Another attempt is of no use."""


def greet(wire: Wire, key: bytes, hello: Callable[[], str], limit_s: float) -> None:
    """Show who listens who we are and be shown that it is ours. From then on the wire is trusted.

    *hello* is asked for when the other side waits for it: it may hold the time.

    Raises:
        OSError: it went away, said nothing for *limit_s* seconds, or does not know the key; another attempt may do.
        Refused: it does not want us.
    """
    own = new_challenge()
    theirs = str(expect(wire, "challenge", limit_s).get("challenge"))
    said = hello()
    wire.send(
        {"kind": "hello", "hello": said, "challenge": own, "mac": proof(key, "agent", theirs, own, said)}
    )
    welcome = expect(wire, "welcome", limit_s)
    if not proved(key, welcome.get("mac"), "hub", own, theirs):
        wire.close()
        raise OSError("the process that listens there does not know the key")
    if welcome.get("refused"):
        wire.close()
        raise Refused(str(welcome["refused"])[:1000])
    wire.trusted = True


def expect(wire: Wire, kind: str, limit_s: float) -> Mapping[str, Any]:
    """Return the next message, which must be of this kind; later ones that came with it stay to be read.

    Raises:
        OSError: it is another one, or none came within *limit_s* seconds; the wire is closed.
    """
    deadline = time.monotonic() + limit_s
    while not wire.ended and time.monotonic() < deadline:
        wire.flush()
        if not wire.arrived and not _readable(wire.socket, 0.5):
            continue
        messages = wire.read()
        if messages:
            message, *later = messages
            wire.unread(later)
            if message["kind"] == kind:
                return message
            wire.end(f"it sent {message['kind'][:40]!r} instead of a {kind}")
    wire.close()
    raise OSError(f"no {kind} from there: {wire.ended or 'it is silent'}")


def _parse(line: bytes) -> Optional[Dict[str, Any]]:
    try:
        data = read_json(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("kind"), str) else None


def beat_every(silence_s: float) -> float:
    """Return the time between two signs of life where so long a silence ends the connection, in seconds."""
    return min(BEAT_S, silence_s / 6)


def _readable(connected: socket.socket, limit_s: float = 0.0) -> bool:
    """Return whether something has arrived, or does in *limit_s* seconds; by poll, as select takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(1000.0 * limit_s))
