"""The leader: accepts the agents of all nodes, applies what they report to the state of each node, and sends orders."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import select
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.wire import Handshake, Wire
from pytest_mlhpc.node.protocol.channel import keep_alive
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.place import PROOF_S, VetPlace, version


@dataclass
class NodeState:
    """What is known of one node. ``works`` is what its child was asked, by the outcome that came of it."""

    rank: int
    host: str
    wire: Optional[Wire] = None
    came: bool = False
    boot_id: str = ""
    clock: Optional[Tuple[float, float]] = (
        None  #: how far it is ahead of the leader's, and the error, in seconds
    )
    models: Dict[str, int] = field(default_factory=dict)
    outcomes: List[CheckOutcome] = field(default_factory=list)
    works: Dict[str, List[CheckOutcome]] = field(default_factory=dict)
    checked: bool = False  #: the checks have all spoken
    ready: bool = False  #: the child can be asked
    no_child: str = ""  #: why it cannot
    slow_start: bool = False  #: because it did not begin in time
    missing: str = ""
    unfinished: str = ""
    reused: bool = False  #: what it would compute is known from before
    answers: Dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        """Whether it can be spoken to."""
        return self.wire is not None and not self.wire.ended and not self.missing

    def miss(self) -> str:
        """Return why it does not say more, empty if it can; a connection that has ended is noticed."""
        if self.wire is not None and self.wire.ended and not self.missing:
            self.missing = f"its agent was lost: {self.wire.ended}"
        return self.missing

    @property
    def machine(self) -> str:
        """What is equal for nodes that share a machine."""
        return self.boot_id or f"of {self.host}"

    def note(self, check: str, severity: Severity, text: str, rule: str) -> None:
        """Add one finding of our own."""
        self.outcomes.append(CheckOutcome((Finding(check, severity, text, rule=rule),)))

    def hung(self, what: str) -> str:
        """Return why nobody waits for it any longer."""
        begun = f"{self.unfinished} had begun" if self.unfinished else "nothing had begun"
        return f"it hung in {what}: {begun}, and no word came in time"


def apply_message(seat: NodeState, message: Mapping[str, Any]) -> None:
    """Take in one message. What cannot be read is a finding: it is that node that says it."""
    kind = message["kind"]
    act = _ACTS.get(kind)
    if act is None:
        return  # a sign of life, or of a newer version
    try:
        act(seat, message)
    except (SchemaError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{seat.host} said {kind!r} with what cannot be read: {error}"
        seat.note("vetting", Severity.UNKNOWN, text[:500], "unreadable")


def _plan(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.boot_id = str(message["boot_id"])


def _begun(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.unfinished = str(message["what"])[:300]


def _checked(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.unfinished = ""
    seat.outcomes.append(from_json(CheckOutcome, message["outcome"]))


def _checks_done(seat: NodeState, _message: Mapping[str, Any]) -> None:
    seat.checked, seat.unfinished = True, ""


def _ready(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.ready = True
    models = [str(model) for model in message["ready"].get("models", ())]
    seat.models = {model: models.count(model) for model in models}


def _no_child(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.no_child = str(message["text"])[:1000]
    seat.slow_start = bool(message.get("hung"))


def _answer(seat: NodeState, message: Mapping[str, Any]) -> None:
    seat.unfinished = ""
    answer = {name: value for name, value in message.items() if name != "outcome"}
    seat.answers[int(message["id"])] = answer
    if "outcome" in message:
        answer["error"] = "its outcome cannot be read"
        answer["outcome"] = from_json(CheckOutcome, message["outcome"])


def _leaving(seat: NodeState, message: Mapping[str, Any]) -> None:
    if seat.wire is not None:
        seat.wire.end(str(message.get("text"))[:300])


_ACTS = {
    "plan": _plan,
    "begun": _begun,
    "checked": _checked,
    "checks_done": _checks_done,
    "ready": _ready,
    "no_child": _no_child,
    "answer": _answer,
    "leaving": _leaving,
}


def alive(seats: Iterable[NodeState]) -> List[NodeState]:
    """Return those that can be spoken to."""
    return [seat for seat in seats if seat.there]


#: Most connections that have not proved who they are, beside one of each node; the oldest goes first. And how long they may take,
#: in seconds: longer than an agent waits for us, who may have hundreds to serve.
MOST_STRANGERS, PATIENCE_S = 64, 2 * PROOF_S

#: Time between two looks at all connections, in seconds.
LOOK_S = 0.1

#: Time between two signs of life, and how long an agent may be silent before it counts as lost, in seconds.
BEAT_S, SILENCE_S = 2.0, 15.0

#: How long agents are given to hear that all is over, in seconds.
FAREWELL_S = 2.0


class Leader:
    """Keeps a seat for each node. *first* is the connection of the agent in this process, *listening* for the others."""

    def __init__(self, place: VetPlace, key: bytes, first: Wire, listening: Optional[socket.socket]) -> None:
        self.seats = [NodeState(rank, place.name_of(rank)) for rank in range(place.nodes)]
        self._key, self._listening = key, listening
        self._numbers = itertools.count(1)
        self._strangers: List[Wire] = []  #: they may get a seat, or are shown out
        self._closed = ""
        self._next_beat = self._next_look = 0.0
        self._selector = selectors.DefaultSelector()
        self._acts: Dict[int, Callable[[], None]] = {}
        self._events: Dict[int, int] = {}
        if listening is not None:
            self._selector.register(listening, selectors.EVENT_READ, self._accept_stranger)
        first.trusted = True
        self._seat(self.seats[0], first)
        self.seats[0].clock = (0.0, 0.0)

    # --- for who conducts

    def until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Hear and be heard until *done*, or the time is over; return whether it was done."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(min(left, 0.5)):
                key.data()
            self._tend()
        return True

    def ask(
        self, seat: NodeState, what: str, limit_s: float, args: Optional[Mapping[str, Any]] = None
    ) -> int:
        """Ask a node to do something; the answer will be in ``seat.answers`` by the number that is returned."""
        number = next(self._numbers)
        if seat.wire is None or not seat.there:
            seat.answers[number] = {"error": f"{seat.host} is not there", "lost": True}
        else:
            seat.wire.send(
                {"kind": "do", "id": number, "do": what, "args": dict(args or {}), "limit_s": limit_s}
            )
        return number

    def lose(self, seat: NodeState, why: str) -> None:
        """Give a node up."""
        if not seat.missing:
            seat.missing = why
        if seat.wire is not None:
            self._drop(seat.wire)

    def refuse_from_now(self, why: str) -> None:
        """Take in nobody any more."""
        self._closed = why

    def close(self) -> None:
        """Tell all that it is over."""
        for seat in self.seats:
            if seat.wire is not None:
                seat.wire.send({"kind": "over"})
        deadline = time.monotonic() + FAREWELL_S
        self.until(lambda: not any(seat.wire and not seat.wire.ended for seat in self.seats), deadline)
        for wire in [*(seat.wire for seat in self.seats if seat.wire), *self._strangers]:
            wire.close()
        self._selector.close()
        if self._listening is not None:
            self._listening.close()

    # --- connections

    def _tend(self) -> None:
        """Look after all connections, but not each time that one of them has something to say."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        beat = now >= self._next_beat
        if beat:
            self._next_beat = now + BEAT_S
        for seat in self.seats:
            if seat.wire is not None:
                self._serve(seat, seat.wire, now, beat=beat)
        most = MOST_STRANGERS + len(self.seats)
        late = [wire for wire in self._strangers if wire.ended or now - wire.since > PATIENCE_S]
        late += [one for one in self._strangers[: max(0, len(self._strangers) - most)] if one not in late]
        for wire in late:
            self._strangers.remove(wire)
            self._drop(wire)

    def _serve(self, seat: NodeState, wire: Wire, now: float, *, beat: bool) -> None:
        if beat:
            wire.send({"kind": "beat"})
        # Who has said something that we have not come to read yet is not silent.
        if now - wire.heard > SILENCE_S and not wire.ended and not _readable(wire.socket):
            wire.end(f"no sign of life for {SILENCE_S:g} s")
        if wire.ended:
            seat.miss()
            self._drop(wire)
        else:
            self._listen_to(wire)

    def _add(self, wire: Wire, act: Callable[[], None]) -> None:
        fd = wire.socket.fileno()
        if fd in self._acts:
            self._selector.unregister(fd)
        self._acts[fd], self._events[fd] = act, selectors.EVENT_READ
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _listen_to(self, wire: Wire) -> None:
        fd = wire.socket.fileno()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.waiting else 0)
        if fd in self._acts and self._events[fd] != events:
            self._events[fd] = events
            self._selector.modify(fd, events, self._acts[fd])

    def _drop(self, wire: Wire) -> None:
        fd = wire.socket.fileno()
        if self._acts.pop(fd, None) is not None:
            self._selector.unregister(fd)
        wire.close()

    def _accept_stranger(self) -> None:
        with contextlib.suppress(OSError):  # who connected has gone, or no descriptor is free
            for _ in range(64 if self._listening is not None else 0):
                accepted, _ = self._listening.accept()  # type: ignore[union-attr]  # looked at a line before
                keep_alive(accepted)
                handshake = Handshake(accepted, self._key)
                self._strangers.append(handshake.wire)
                self._add(handshake.wire, lambda handshake=handshake: self._prove(handshake))  # type: ignore[misc]  # mypy cannot infer a lambda's default

    def _prove(self, handshake: Handshake) -> None:
        hello = handshake.greeting()
        if hello is None:
            return
        why = self._welcome(handshake.wire, hello)
        handshake.welcome(refused=why)
        if not why:
            self._strangers.remove(handshake.wire)  # else it closes the connection when it has read why

    def _welcome(self, wire: Wire, text: str) -> str:
        """Give a node its seat; return why not, or nothing."""
        try:
            hello = json.loads(text)
            rank, host, of = int(hello["rank"]), str(hello["host"])[:256], str(hello["of"])
            told = float(hello.get("time", "nan"))  # absent: another version, which is said below
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return "its greeting cannot be read"
        if not 0 < rank < len(self.seats):
            return f"it is node {rank}, but there are {len(self.seats)} nodes"
        seat = self.seats[rank]
        if of != version():
            seat.missing = f"it runs another version of vetting ({of}) than the first node ({version()})"
            return seat.missing
        if seat.came and not self._has_left(seat):
            return f"node {rank} has come before, from {seat.host}"
        if self._closed:
            return self._closed
        if seat.host == f"node {rank}":
            taken = any(other.host == host for other in self.seats)
            seat.host = f"{host}#{rank}" if taken else host
        seat.clock = _clock(told, wire)
        self._seat(seat, wire)
        return ""

    def _has_left(self, seat: NodeState) -> bool:
        """Return whether a node has gone before it said anything: it waited for us too long, and tries again."""
        wire = seat.wire
        if wire is not None and not wire.ended:
            self._read(seat, wire)
        if wire is None or not wire.ended or seat.boot_id or seat.outcomes:
            return False
        self._drop(wire)
        seat.missing = ""
        return True

    def _seat(self, seat: NodeState, wire: Wire) -> None:
        wire.trusted = True
        seat.wire, seat.came = wire, True
        self._add(wire, lambda: self._read(seat, wire))

    # --- what agents say

    def _read(self, seat: NodeState, wire: Wire) -> None:
        wire.flush()
        for message in wire.read():
            apply_message(seat, message)


def _clock(told: float, wire: Wire) -> Optional[Tuple[float, float]]:
    """Return how far a clock that said *told* just now is ahead of ours, and how wrong that may be, in seconds.

    We challenged its node when the connection was made, and it answered between then and now.
    """
    half = (time.monotonic() - wire.since) / 2.0
    ahead = told - (time.time() - half)
    return (ahead, half) if math.isfinite(ahead) else None


def _readable(connected: socket.socket) -> bool:
    """Return whether something has arrived; by poll, as select takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))
