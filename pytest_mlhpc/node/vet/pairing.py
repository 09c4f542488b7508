"""PAYLOAD. Exchanges between two nodes, as the leader conducts them: a port of the first, then both at once."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.agents.wire import new_challenge
from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import Outcome
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.load_runner import PAIR_S, pair_args
from pytest_mlhpc.node.vet.report import PairResult
from pytest_mlhpc.node.vet.seats import Seat

#: How much longer than the limit that an agent keeps itself the leader waits for its answer, in seconds.
GRACE_S = 3.0


class Round:
    """One round: exchanges that are all done at once, but for those that share a machine. ``results`` are those that ended."""

    def __init__(
        self, leader: Leader, settings: Settings, number: int, pairs: Sequence[Tuple[str, str]], *, stage: str
    ) -> None:
        seats = {seat.host: seat for seat in leader.seats}
        self._leader = leader
        self._args = pair_args(settings, number)
        self._limit_s = PAIR_S[settings.level] + GRACE_S
        self._waiting = [Exchange(leader, seats[one], seats[two], number, stage) for one, two in pairs]
        self._under_way: List[Exchange] = []
        self.results: List[PairResult] = []

    def run(self, until: float) -> bool:
        """Do it, if it can be done until then; return whether it was."""
        if time.monotonic() + self._limit_s > until:
            return False
        return self._leader.until(self._go_on, until)

    def _go_on(self) -> bool:
        for one in [one for one in self._under_way if one.settled()]:
            self._under_way.remove(one)
            self.results.append(one.result)
        busy = {machine for one in self._under_way for machine in one.machines}
        for one in [one for one in self._waiting if one.can_begin()]:
            if not busy & one.machines:
                busy |= one.machines
                self._waiting.remove(one)
                self._under_way.append(one)
                one.begin(self._args, self._limit_s)
        return not self._waiting and not self._under_way


class Exchange:
    """One exchange between two nodes. ``machines`` are those that it keeps busy."""

    def __init__(self, leader: Leader, first: Seat, second: Seat, number: int, stage: str) -> None:
        self._leader, self._first, self._second = leader, first, second
        self.machines = {seat.machine for seat in (first, second)}
        self.result = PairResult(number, first.host, second.host, stage=stage)
        self._port = self._limit = 0.0
        self._args: Dict[str, object] = {}
        self._limit_s = 0.0
        self._asked: Dict[str, Tuple[Seat, int]] = {}

    def can_begin(self) -> bool:
        """Return whether no child is still being started again."""
        return all(seat.ready or seat.no_child or not seat.there for seat in (self._first, self._second))

    def begin(self, args: Mapping[str, object], limit_s: float) -> None:
        """Ask the first node for a port; the rest follows in ``settled``."""
        self._args, self._limit_s = dict(args), limit_s
        self._limit = time.monotonic() + limit_s
        self._asked = {"port": (self._first, self._leader.ask(self._first, "port", limit_s))}

    def settled(self) -> bool:
        """Go on as far as that goes; return whether ``result`` is final."""
        over = time.monotonic() > self._limit
        answers = {name: seat.answers.get(number) for name, (seat, number) in self._asked.items()}
        if "port" in answers:
            port = answers["port"]
            if port is None and not over and self._first.there:
                return False
            if port is None or not port.get("port"):
                return self._end(trouble=f"{self._first.host} gave no port", blamed=self._first.host)
            self._both(int(str(port["port"])))
            return False
        silent = [seat.host for name, (seat, _) in self._asked.items() if answers[name] is None]
        if silent and not over and all(seat.there for seat, _ in self._asked.values()):
            return False
        return self._judge({name: answer or {} for name, answer in answers.items()}, silent)

    def _both(self, port: int) -> None:
        address = address_for(self._first, self._second)
        self._limit = time.monotonic() + self._limit_s + GRACE_S
        shared = {**self._args, "address": address, "port": port, "exchange": new_challenge()}
        self._asked = {}
        for name, seat in (("first", self._first), ("second", self._second)):
            args = {**shared, "first": name == "first"}
            self._asked[name] = (seat, self._leader.ask(seat, "pair", self._limit_s, args))

    def _judge(self, answers: Mapping[str, Mapping[str, Any]], silent: Sequence[str]) -> bool:
        bad = {name for name, answer in answers.items() if "outcome" not in answer}
        broken = [
            name
            for name in bad
            if answers[name].get("hung") or answers[name].get("died") or answers[name].get("lost")
        ]
        for name in broken:
            if answers[name].get("restarting"):
                self._asked[name][0].ready = False
            else:
                self._asked[name][0].no_child = str(answers[name].get("error"))
        if bad:
            blamed = silent or [self._asked[name][0].host for name in broken]
            words = [str(answers[name].get("error") or "no answer") for name in sorted(bad)]
            return self._end(trouble="; ".join(words)[:500], blamed=blamed[0] if len(blamed) == 1 else "")
        outcomes: List[Outcome] = [answer["outcome"] for answer in answers.values()]
        readings = [reading for outcome in outcomes for reading in outcome.readings]
        if not readings:
            words = [finding.reason for outcome in outcomes for finding in outcome.findings]
            return self._end(trouble="; ".join(words)[:500] or "it brought no figure")
        slowest = min(readings, key=lambda reading: reading.value)
        return self._end(value=slowest.value, key=slowest.key)

    def _end(self, value: float = 0.0, trouble: str = "", blamed: str = "", key: str = "") -> bool:
        kept = self.result
        self.result = PairResult(kept.round, kept.first, kept.second, value, trouble, blamed, kept.stage, key)
        return True


def address_for(first: Seat, second: Seat) -> str:
    """Return the address of *first* as *second* sees it, or as this node does; empty if that is not known."""
    wire = second.wire if first.rank == 0 else first.wire
    if wire is None or wire.socket.family == socket.AF_UNIX:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        name = wire.socket.getsockname() if first.rank == 0 else wire.socket.getpeername()
        address = str(name[0])
        return address.removeprefix("::ffff:")
    return ""
