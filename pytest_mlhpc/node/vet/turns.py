"""PAYLOAD. Computing on all nodes: each does one work after the other, and those that share a machine take turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import Outcome, Reading, Severity
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.load_runner import Work, limit_of
from pytest_mlhpc.node.vet.pairing import GRACE_S
from pytest_mlhpc.node.vet.seats import Seat

#: So many nodes on one machine may take the usual time each; where more take turns, a quick vetting would not be quick.
FEW = 2

#: How often such nodes come round with each work, for a part of its time: a machine that is shared goes faster and slower, and
#: a node that had its one turn in a slow moment would be blamed for it. Each keeps its best.
PASSES = 3


@dataclass(frozen=True)
class _Doing:
    work: Work
    seat: Seat
    number: int
    limit: float


class Turns:
    """One round of *work* on *seats*. What came of it stands in the seats, also what was not done."""

    def __init__(
        self,
        leader: Leader,
        settings: Settings,
        work: Iterable[Work],
        seats: Sequence[Seat],
        round_number: int,
    ) -> None:
        self._leader, self._settings, self._round = leader, settings, round_number
        machines: Dict[str, List[Seat]] = {}
        for seat in seats:
            machines.setdefault(seat.machine, []).append(seat)
        works = list(work)
        self._sharing = {name: len(of) for name, of in machines.items()}
        self._turns: Dict[str, List[Tuple[Work, Seat]]] = {
            name: [
                (one, seat)
                for one in works
                for _ in range(self._passes(name, one))
                for seat in of
                if one.purpose or not seat.reused
            ]
            for name, of in machines.items()
        }
        self._doing: Dict[str, _Doing] = {}

    def run(self, until: float) -> None:
        """Do it. What is not done by then is said to be unknown, unless it was only to be repeated."""
        if self._leader.until(self._go_on, until):
            return
        severity = Severity.UNKNOWN if self._round == 0 else Severity.INFO
        for one in self._doing.values():
            text = f"{one.work.name} had not ended when the time for vetting was over"
            one.seat.note(one.work.name, severity, text, "deadline")
        left = {
            (work.name, seat.rank): (work, seat) for turns in self._turns.values() for work, seat in turns
        }
        for work, seat in left.values():
            if _known(seat, work, self._round):
                continue  # of several turns it has had some
            text = f"{work.name} was not begun: the time for vetting was over"
            seat.note(work.name, severity, text, "deadline")

    def _go_on(self) -> bool:
        for name, turns in self._turns.items():
            self._settle(name)
            while name not in self._doing and turns:
                self._begin(name, *turns.pop(0))
        return not self._doing and not any(self._turns.values())

    def _begin(self, name: str, work: Work, seat: Seat) -> None:
        if not seat.there or seat.no_child:
            return
        limit_s = limit_of(work, self._settings)
        number = self._leader.ask(seat, work.name, limit_s, self._arguments(name, work))
        seat.unfinished = work.name
        self._doing[name] = _Doing(work, seat, number, time.monotonic() + limit_s + GRACE_S)

    def _arguments(self, name: str, work: Work) -> Dict[str, float]:
        """Return what a command is told: which round it is, how many nodes vet together, and to be short where many take turns."""
        found: Dict[str, float] = {"round": self._round, "nodes": len(self._leader.seats)}
        if self._settings.level == "quick" and self._sharing[name] > FEW and work.shared_s:
            found["seconds"] = work.shared_s / self._passes(name, work)
        return found

    def _passes(self, name: str, work: Work) -> int:
        """Return how often the nodes of one machine come round with *work*."""
        crowded = self._settings.level == "quick" and self._sharing[name] > FEW
        return PASSES if crowded and work.shared_s and work.again else 1

    def _settle(self, name: str) -> None:
        """Take in the answer to what a machine was doing, if it is there or overdue."""
        doing = self._doing.get(name)
        if doing is None:
            return
        answer = doing.seat.answers.pop(doing.number, None)
        if answer is None and doing.seat.there and time.monotonic() < doing.limit:
            return
        del self._doing[name]
        if answer is not None:
            _take(doing.seat, doing.work, answer, self._round)
        elif doing.seat.there:
            self._leader.lose(doing.seat, doing.seat.hung(doing.work.name))


def _take(seat: Seat, work: Work, answer: Mapping[str, Any], round_number: int) -> None:
    if "outcome" in answer:
        _keep(seat, work, answer["outcome"], round_number)
        return
    lost = bool(answer.get("hung") or answer.get("died"))
    if lost:
        seat.no_child = str(answer.get("error"))
    hung = bool(answer.get("hung")) or answer.get("why") == "hung"
    rule = "hung" if hung else "died" if lost else "failed"
    severity = Severity.CRITICAL if hung or lost else Severity.UNKNOWN
    seat.note(work.name, severity, str(answer.get("error"))[:1000], rule)


def _keep(seat: Seat, work: Work, outcome: Outcome, round_number: int) -> None:
    """Add what came of a turn; of several within one round there is one outcome, with the best figures."""
    known = seat.works.setdefault(work.name, [])
    if work.again and _known(seat, work, round_number):
        before = known.pop()
        seat.outcomes.remove(before)
        outcome = joined(before, outcome)
    known.append(outcome)
    seat.outcomes.append(outcome)


def _known(seat: Seat, work: Work, round_number: int) -> bool:
    """Return whether a turn of this round has brought figures."""
    known = seat.works.get(work.name, ())
    return bool(known and known[-1].readings and known[-1].readings[0].round == round_number)


def joined(one: Outcome, other: Outcome) -> Outcome:
    """Return one outcome of two turns: of each figure the better, of what was said otherwise everything once."""
    best: Dict[Tuple[str, str], Reading] = {}
    for reading in (*one.readings, *other.readings):
        key = (reading.key, reading.device)
        known = best.get(key)
        if known is None or (reading.value > known.value) == (reading.better == "higher"):
            best[key] = reading
    return Outcome(
        tuple(dict.fromkeys((*one.findings, *other.findings))),
        tuple(best.values()),
        tuple(dict.fromkeys((*one.facts, *other.facts))),
        one.seconds + other.seconds,
    )
