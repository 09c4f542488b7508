"""The leader: what the agents of all nodes report (``node/agents/hub.py``), as the state of each node; and orders to them."""

from __future__ import annotations

import itertools
import math
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Type

from pytest_mlhpc.node.agents.hub import Hub
from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Reading, Severity
from pytest_mlhpc.node.vet.place import VetPlace


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


#: Most findings, readings and facts that are remembered to be shared.
MOST_SHARED = 1 << 18


class OutcomeReader:
    """Reads outcomes. Nodes that say the same share one value: thousands of nodes have few versions of anything."""

    def __init__(self) -> None:
        self._known: Dict[Tuple[Any, ...], Any] = {}

    def read(self, data: Any) -> CheckOutcome:
        """Return what came of a check.

        Raises:
            SchemaError: it is none.
        """
        if not isinstance(data, dict):
            return from_json(CheckOutcome, data)
        outcome = from_json(CheckOutcome, {name: data[name] for name in data if name not in _PARTS})
        parts: Dict[str, Any] = {
            name: self._all(cls, data[name], name) for name, cls in _PARTS.items() if name in data
        }
        return replace(outcome, **parts)

    def _all(self, cls: Type[Any], items: Any, where: str) -> Tuple[Any, ...]:
        if not isinstance(items, list):
            raise SchemaError(f"{where}: expected a list, got {type(items).__name__}")
        return tuple(self._one(cls, item, where) for item in items)

    def _one(self, cls: Type[Any], item: Any, where: str) -> Any:
        try:  # the types, too: 1, 1.0 and true are equal
            key = (cls, *item.items(), *map(type, item.values()))
            found = self._known.get(key)
        except (AttributeError, TypeError):
            return from_json(cls, item, where)
        if found is None:
            found = from_json(cls, item, where)
            if len(self._known) < MOST_SHARED:
                self._known[key] = found
        return found


_PARTS: Mapping[str, Type[Any]] = {"findings": Finding, "readings": Reading, "facts": Fact}


def apply_message(state: NodeState, message: Mapping[str, Any], outcomes: OutcomeReader) -> None:
    """Take in one message. What cannot be read is a finding: it is that node that says it."""
    try:
        _apply(state, message, outcomes)
    except (SchemaError, ValueError, TypeError, KeyError, AttributeError) as error:
        text = f"{state.host} said {message['kind']!r} with what cannot be read: {error}"
        state.note("vetting", Severity.UNKNOWN, text[:500], "unreadable")


def _apply(state: NodeState, message: Mapping[str, Any], outcomes: OutcomeReader) -> None:
    kind = message["kind"]
    if kind in {"checked", "checks_done", "answer"}:
        state.unfinished = ""
    if kind == "plan":
        state.boot_id = str(message["boot_id"])
    elif kind == "begun":
        state.unfinished = str(message["what"])[:300]
    elif kind == "checked":
        state.outcomes.append(outcomes.read(message["outcome"]))
    elif kind == "checks_done":
        state.checked = True
    elif kind == "ready":
        state.ready = True
        models = [str(model) for model in message["ready"].get("models", ())]
        state.models = {model: models.count(model) for model in models}
    elif kind == "no_child":
        state.no_child = str(message["text"])[:1000]
        state.slow_start = bool(message.get("hung"))
    elif kind == "answer":
        answer = {name: value for name, value in message.items() if name != "outcome"}
        state.answers[int(message["id"])] = answer
        if "outcome" in message:
            answer["error"] = "its outcome cannot be read"
            answer["outcome"] = outcomes.read(message["outcome"])


def alive(states: Iterable[NodeState]) -> List[NodeState]:
    """Return those that can be spoken to."""
    return [state for state in states if state.there]


#: How long an agent may be silent before it counts as lost, in seconds.
SILENCE_S = 15.0

#: How long agents are given to hear that all is over, in seconds.
FAREWELL_S = 2.0


class Leader:
    """Keeps the state of each node. *first* is the connection of the agent in this process, *listening* for the others."""

    def __init__(self, place: VetPlace, key: bytes, first: Wire, listening: Optional[socket.socket]) -> None:
        self.states = [NodeState(rank, place.name_of(rank)) for rank in range(place.nodes)]
        self._numbers = itertools.count(1)
        self._closed = ""
        self._outcomes = OutcomeReader()
        self._hub = Hub(self, key, place.nodes, listening, SILENCE_S)
        self._hub.join(0, first)
        self.states[0].wire, self.states[0].came, self.states[0].clock = first, True, (0.0, 0.0)
        self.until = self._hub.until

    def ask(
        self, state: NodeState, what: str, limit_s: float, args: Optional[Mapping[str, Any]] = None
    ) -> int:
        """Ask a node to do something; the answer will be in ``state.answers`` by the number that is returned."""
        number = next(self._numbers)
        order = {"kind": "do", "id": number, "do": what, "args": dict(args or {}), "limit_s": limit_s}
        if not (state.there and self._hub.send(state.rank, order)):
            state.answers[number] = {"error": f"{state.host} is not there", "lost": True}
        return number

    def lose(self, state: NodeState, why: str) -> None:
        """Give a node up."""
        state.missing = state.missing or why
        self._hub.drop(state.rank)

    def refuse_from_now(self, why: str) -> None:
        """Take in no further nodes."""
        self._closed = why

    def close(self) -> None:
        """Tell all that it is over."""
        self._hub.close({"kind": "over"}, FAREWELL_S)

    # --- what the hub asks and says

    def name_of(self, rank: int) -> str:
        """Return how the scheduler calls a node."""
        return f"node {rank}, {self.states[rank].host},"

    def admit(self, rank: int, name: str, hello: Mapping[str, Any], wire: Wire, /) -> str:
        """Give a node its state; return why not, or nothing."""
        state = self.states[rank]
        clock = _clock(float(hello.get("time", "nan")), wire)
        refused = self._hub.other_version(hello)
        if refused:
            state.missing = refused
        if refused or self._closed:
            return refused or self._closed
        if state.host == f"node {rank}":
            state.host = f"{name}#{rank}" if any(other.host == name for other in self.states) else name
        state.wire, state.came, state.clock, state.missing = wire, True, clock, ""
        return ""

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        """Apply what an agent says."""
        apply_message(self.states[rank], message, self._outcomes)

    def lost(self, rank: int, why: str, _left: bool, /) -> None:
        """Note that an agent is gone."""
        state = self.states[rank]
        state.missing = state.missing or f"its agent was lost: {why}"


def _clock(remote: float, wire: Wire) -> Optional[Tuple[float, float]]:
    """Return how far a clock that said *remote* just now is ahead of ours, and how wrong that may be, in seconds.

    We challenged its node when the connection was made, and it answered between then and now.
    """
    half = (time.monotonic() - wire.since) / 2.0
    ahead = remote - (time.time() - half)
    return (ahead, half) if math.isfinite(ahead) else None
