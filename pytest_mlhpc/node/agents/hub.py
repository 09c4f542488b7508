"""The hub of an allocation: its first node listens, its other nodes find it, and all learn when one of them is gone.

Pods (``node/batch/pod_hub.py``) and vetting (``node/vet/leader.py``) differ in what they say, and in nothing here: who connects
is a stranger until it has proved that it knows the allocation's key, has ``PROOF_S`` seconds and 4 KiB for that, and changes
nothing before. Then it is the peer of its rank. Both sides send signs of life; a silence, a closed connection and a farewell
(``leaving``) are each a reason by which its owner hears that a peer is lost.
"""

from __future__ import annotations

import contextlib
import functools
import json
import selectors
import socket
import time
from typing import Any, Callable, Dict, Mapping, Optional, Protocol, Sequence, Set, Tuple

from pytest_mlhpc.node.agents.wire import PROOF_S, Handshake, Refused, Wire, connect, greet, keep_alive
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.channel import running_payload

#: Version of what peers and hub say to each other.
PROTOCOL = 3

#: Most connections that have not proved who they are, beside one of each peer; the oldest goes first.
MOST_STRANGERS = 64

#: Time between two checks of all connections, in seconds.
LOOK_S = 0.5

#: Most connections that are accepted in one go.
AT_ONCE = 64


def version() -> str:
    """Return what a hub and its peers must have equal."""
    return f"{PROTOCOL} {running_payload()}"


def greeting(rank: int, name: str, **more: Any) -> str:
    """Return what the peer of *rank* says of itself to the hub."""
    return json.dumps({"rank": rank, "name": name, "version": version(), **more})


class HubOwner(Protocol):
    """Who listens to the peers of a hub. All is called by the thread that calls ``Hub.turn``."""

    def name_of(self, rank: int) -> str:
        """Return how people call the node of *rank*."""
        ...

    def admit(self, rank: int, name: str, hello: Mapping[str, Any], wire: Wire, /) -> str:
        """Take in a peer that has proved to know the key; return why not, or nothing.

        What it raises of a greeting that it cannot read (ValueError, TypeError, KeyError, OverflowError) refuses the peer.
        """
        ...

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        """Take a message of a peer."""
        ...

    def lost(self, rank: int, why: str, left: bool, /) -> None:
        """Learn that a peer is gone; *left*: it said so itself."""
        ...


class Hub:
    """Connections of one first node with its peers, the ranks 1 to *count* - 1.

    Args:
        owner: who listens to the peers.
        key: what only processes of this allocation know.
        count: of nodes, the first included.
        listening: where peers come; None if none can.
        silence_s: how long a peer may give no sign of life, in seconds.
    """

    def __init__(
        self, owner: HubOwner, key: bytes, count: int, listening: Optional[socket.socket], silence_s: float
    ) -> None:
        self.peers: Dict[int, Wire] = {}
        self._paused = False
        self._owner, self._key, self._count, self._silence_s = owner, key, count, silence_s
        self._listening, self._version = listening, version()
        self._came: Set[int] = {0}
        self._spoke: Set[int] = set()
        self._left: Set[int] = set()
        self._strangers: Dict[
            Wire, None
        ] = {}  #: in the order in which they came: they may become peers, or are shown out
        self._selector = selectors.DefaultSelector()
        self._acts: Dict[int, Callable[[], None]] = {}
        self._events: Dict[int, int] = {}
        self._next_check = 0.0
        self._over = False
        if listening is not None:
            self.watch(listening.fileno(), self._accept)

    @property
    def paused(self) -> bool:
        """Whether peers are not read, as what they say cannot be passed on. They are not silent for that."""
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        if value != self._paused:
            self._paused = value
            for wire in self.peers.values():
                self.listen_to(wire, reading=not value)

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        """Call *act* whenever *fd* can be read."""
        if self._events.get(fd):
            self._selector.unregister(fd)
        self._acts[fd], self._events[fd] = act, selectors.EVENT_READ
        self._selector.register(fd, selectors.EVENT_READ)

    def other_version(self, hello: Mapping[str, Any]) -> str:
        """Return why a peer that greets so cannot be spoken to; empty if it can."""
        theirs = str(hello.get("version"))[:100]
        if theirs == self._version:
            return ""
        return f"it runs another version of pytest-mlhpc ({theirs}) than the first node ({self._version})"

    def until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Serve all connections until *done*, or the time is over; return whether it was done."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.turn(left)
        return True

    def turn(self, limit_s: float) -> None:
        """Serve what is ready, or wait for it, at most *limit_s* seconds."""
        for key, _ in self._selector.select(min(limit_s, LOOK_S)):
            act = self._acts.get(key.fd)
            if act is not None:  # else it was dropped in this turn
                act()
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + LOOK_S
            self._tend_all(now)

    def join(self, rank: int, wire: Wire) -> None:
        """Have a peer on *wire*, which needs no proof (any more)."""
        wire.trusted = True
        self._came.add(rank)
        self.peers[rank] = wire
        self.watch(wire.socket.fileno(), functools.partial(self._receive, rank, wire))

    def send(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Send a message to a peer; return whether there is such a peer."""
        wire = self.peers.get(rank)
        if wire is None or wire.ended:
            return False
        wire.send(message)
        self._settle(rank, wire)
        return not wire.ended

    def listen_to(self, wire: Wire, *, reading: bool = True) -> None:
        """Watch for what matters now: whether it can be read, and whether there is room for what waits to be sent."""
        fd = wire.socket.fileno()
        events = (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if wire.waiting else 0)
        before = self._events.get(fd)
        if before is None or events == before:
            return
        self._events[fd] = events
        if not before:
            self._selector.register(fd, events)
        elif not events:
            self._selector.unregister(fd)
        else:
            self._selector.modify(fd, events)

    def drop(self, rank: int) -> None:
        """Close the connection of a peer; its owner does not hear of it."""
        wire = self.peers.pop(rank, None)
        if wire is not None:
            self.forget(wire)

    def forget(self, wire: Wire) -> None:
        """Close a connection, and watch it no more."""
        fd = wire.socket.fileno()
        self._acts.pop(fd, None)
        if self._events.pop(fd, 0):
            self._selector.unregister(fd)
        wire.close()

    def close(self, farewell: Mapping[str, Any], limit_s: float) -> None:
        """Tell all peers that it is over, wait until they have gone, at most *limit_s* seconds, and listen no more. Idempotent."""
        if self._over:
            return
        self.paused, self._over = False, True
        if self._listening is not None:
            self._acts.pop(self._listening.fileno(), None)
            self._selector.unregister(self._listening)
            self._listening.close()
        for rank in list(self.peers):
            self.send(rank, farewell)
        self.until(lambda: not self.peers, time.monotonic() + limit_s)
        for wire in [*self.peers.values(), *self._strangers]:
            self.forget(wire)
        self._selector.close()

    def _tend_all(self, now: float) -> None:
        """Tend all connections, as often as signs of life are due."""
        for rank, wire in list(self.peers.items()):
            wire.tend(self._silence_s)
            self._settle(rank, wire)
        surplus = max(0, len(self._strangers) - MOST_STRANGERS - self._count)
        late = [
            wire
            for number, wire in enumerate(self._strangers)
            if number < surplus or wire.ended or now - wire.since > PROOF_S
        ]
        for wire in late:
            del self._strangers[wire]
            self.forget(wire)

    def _settle(self, rank: int, wire: Wire) -> None:
        """Let go of a peer whose connection has ended."""
        if self.peers.get(rank) is not wire:
            return
        if not wire.ended:
            self.listen_to(wire, reading=not self._paused)
            return
        self.drop(rank)
        if not self._over:
            self._owner.lost(rank, wire.ended, rank in self._left)

    def _receive(self, rank: int, wire: Wire) -> None:
        wire.flush()
        for message in () if self._paused else wire.read():
            if message["kind"] == "leaving":
                wire.ended = str(message.get("text"))[:300]  # that it closes the connection then is no news
                self._left.add(rank)
            elif not self._over:
                self._spoke.add(rank)
                self._owner.receive(rank, message)
        self._settle(rank, wire)

    # --- strangers

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # none waits; who connected has gone; or no descriptor is free
            for _ in range(AT_ONCE if self._listening is not None else 0):
                accepted, _ = self._listening.accept()  # type: ignore[union-attr]  # looked at a line before
                keep_alive(accepted)
                handshake = Handshake(accepted, self._key)
                self._strangers[handshake.wire] = None
                self.watch(accepted.fileno(), functools.partial(self._prove, handshake))

    def _prove(self, handshake: Handshake) -> None:
        wire = handshake.wire
        text = handshake.greeting()
        if text is None:
            if wire.ended:
                del self._strangers[wire]
                self.forget(wire)
            return
        rank, why = self._admit(wire, text)
        handshake.welcome(refused=why)
        if why:  # it closes the connection when it has read why; closed here, with bytes unread, the reason would be lost
            self.watch(wire.socket.fileno(), functools.partial(self._show_out, wire))
        else:
            del self._strangers[wire]
            self.join(rank, wire)
        self.listen_to(wire)

    @staticmethod
    def _show_out(wire: Wire) -> None:
        wire.flush()
        wire.read()

    def _admit(self, wire: Wire, text: str) -> Tuple[int, str]:
        """Return the rank of who has greeted so, and why it is refused, or nothing."""
        try:
            hello = read_json(text)
            rank, name = int(hello["rank"]), str(hello["name"])[:256]
            if not 0 < rank < self._count:
                return rank, f"it is number {rank}, but there are {self._count}"
            if rank in self._came and not self._has_left(rank):
                return rank, f"{self._owner.name_of(rank)} has come before"
            return rank, self._owner.admit(rank, name, hello, wire)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return 0, "its greeting cannot be read"

    def _has_left(self, rank: int) -> bool:
        """Return whether a peer has gone before it said anything: it waited for us too long, and tries again."""
        wire = self.peers.get(rank)
        if wire is not None:
            self._receive(rank, wire)  # which may learn that it has gone
        return rank not in self.peers and rank not in self._spoke | self._left


class FirstNodeNotReached(RuntimeError):  # noqa: N818 - named for what happened
    """The first node was not reached in time, or refuses us; the text says why."""


class FirstNodeRefuses(FirstNodeNotReached):
    """It answered, and does not want us."""


def find_hub(
    places: Callable[[], Sequence[Tuple[str, int]]],
    key: bytes,
    hello: Callable[[], str],
    *,
    limit_s: float,
    each_s: float,
    pause: Callable[[], bool],
) -> Wire:
    """Return the proved connection to the hub of the first node.

    Args:
        places: asked again in each round for host and port of where it may be; ValueError says why that is not known.
        key: what only processes of this allocation know.
        hello: what is said of this node, asked for when it is said.
        limit_s: how long to look; one round is made in any case.
        each_s: longest wait for one connection, in seconds.
        pause: waits between two rounds; returns whether to go on.

    Raises:
        FirstNodeRefuses: it does not want us.
        FirstNodeNotReached: it was not reached in time, or *pause* said to end.
    """
    deadline = time.monotonic() + limit_s
    trouble = "its address is not known"
    going_on = True
    while going_on:
        try:
            for place in places():
                wire, trouble = _attempt(place, key, hello, each_s)
                if wire is not None:
                    return wire
        except ValueError as error:
            trouble = str(error)
        going_on = time.monotonic() < deadline and pause()
    raise FirstNodeNotReached(f"within {limit_s:g} s: {trouble}")


def _attempt(
    place: Tuple[str, int], key: bytes, hello: Callable[[], str], limit_s: float
) -> Tuple[Optional[Wire], str]:
    """Return the connection to the hub at *place*, or None and why there is none.

    Raises:
        FirstNodeRefuses: it does not want us.
    """
    try:
        wire = Wire(connect(*place, limit_s))
        greet(wire, key, hello, PROOF_S)
    except Refused as error:
        raise FirstNodeRefuses(str(error)) from error
    except OSError as error:
        return None, f"{place[0]} port {place[1]}: {error.strerror or error}"
    return wire, ""
