"""PAYLOAD. What the leader knows of one node, and how what its agent says changes that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.finding import Finding, Outcome, Severity


@dataclass
class Seat:
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
    outcomes: List[Outcome] = field(default_factory=list)
    works: Dict[str, List[Outcome]] = field(default_factory=dict)
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
        self.outcomes.append(Outcome((Finding(check, severity, text, rule=rule),)))

    def hung(self, what: str) -> str:
        """Return why nobody waits for it any longer."""
        begun = f"{self.unfinished} had begun" if self.unfinished else "nothing had begun"
        return f"it hung in {what}: {begun}, and no word came in time"


def hear(seat: Seat, message: Mapping[str, Any]) -> None:
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


def _plan(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.boot_id = str(message["boot_id"])


def _begun(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.unfinished = str(message["what"])[:300]


def _checked(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.unfinished = ""
    seat.outcomes.append(from_json(Outcome, message["outcome"]))


def _checks_done(seat: Seat, _message: Mapping[str, Any]) -> None:
    seat.checked, seat.unfinished = True, ""


def _ready(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.ready = True
    models = [str(model) for model in message["ready"].get("models", ())]
    seat.models = {model: models.count(model) for model in models}


def _no_child(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.no_child = str(message["text"])[:1000]
    seat.slow_start = bool(message.get("hung"))


def _answer(seat: Seat, message: Mapping[str, Any]) -> None:
    seat.unfinished = ""
    answer = {name: value for name, value in message.items() if name != "outcome"}
    seat.answers[int(message["id"])] = answer
    if "outcome" in message:
        answer["error"] = "its outcome cannot be read"
        answer["outcome"] = from_json(Outcome, message["outcome"])


def _leaving(seat: Seat, message: Mapping[str, Any]) -> None:
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


def alive(seats: Iterable[Seat]) -> List[Seat]:
    """Return those that can be spoken to."""
    return [seat for seat in seats if seat.there]
