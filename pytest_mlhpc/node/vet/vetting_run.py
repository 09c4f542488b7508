"""One vetting from the first agent to the report: which node does what, in which order, alone or in pairs."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

from pytest_mlhpc.node.agents.wire import new_challenge
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Fact,
    Finding,
    NodeReport,
    PairResult,
    Reading,
    Report,
    Severity,
    joined,
)
from pytest_mlhpc.node.vet.judge import CLOCKS, ClockOffset, compare_clocks
from pytest_mlhpc.node.vet.leader import Leader, NodeState, alive
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.workers import PAIR_S, Work, budget_of, limit_of, pair_args, works

#: How much longer than the limit that an agent keeps itself the leader waits for its answer, in seconds.
GRACE_S = 3.0


class Round:
    """One round: exchanges that are all done at once, but for those that share a machine. ``results`` are those that ended."""

    def __init__(
        self,
        leader: Leader,
        settings: VetSettings,
        number: int,
        pairs: Sequence[Tuple[str, str]],
        *,
        stage: str,
    ) -> None:
        states = {state.host: state for state in leader.states}
        self._leader = leader
        self._args = pair_args(settings, number)
        self._limit_s = PAIR_S[settings.level] + GRACE_S
        self._waiting = [PairExchange(leader, states[one], states[two], number, stage) for one, two in pairs]
        self._under_way: List[PairExchange] = []
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


class PairExchange:
    """One exchange between two nodes. ``machines`` are those that it keeps busy."""

    def __init__(self, leader: Leader, first: NodeState, second: NodeState, number: int, stage: str) -> None:
        self._leader, self._first, self._second = leader, first, second
        self.machines = {state.machine for state in (first, second)}
        self.result = PairResult(number, first.host, second.host, stage=stage)
        self._port = self._limit = 0.0
        self._args: Dict[str, object] = {}
        self._limit_s = 0.0
        self._asked: Dict[str, Tuple[NodeState, int]] = {}

    def can_begin(self) -> bool:
        """Return whether no child is still being started again."""
        return all(state.ready or state.no_child or not state.there for state in (self._first, self._second))

    def begin(self, args: Mapping[str, object], limit_s: float) -> None:
        """Ask the first node for a port; the rest follows in ``settled``."""
        self._args, self._limit_s = dict(args), limit_s
        self._limit = time.monotonic() + limit_s
        self._asked = {"port": (self._first, self._leader.ask(self._first, "port", limit_s))}

    def settled(self) -> bool:
        """Go on as far as that goes; return whether ``result`` is final."""
        over = time.monotonic() > self._limit
        answers = {name: state.answers.get(number) for name, (state, number) in self._asked.items()}
        if "port" in answers:
            port = answers["port"]
            if port is None and not over and self._first.there:
                return False
            if port is None or not port.get("port"):
                return self._end(trouble=f"{self._first.host} gave no port", blamed=self._first.host)
            self._both(int(str(port["port"])))
            return False
        silent = [state.host for name, (state, _) in self._asked.items() if answers[name] is None]
        if silent and not over and all(state.there for state, _ in self._asked.values()):
            return False
        return self._judge({name: answer or {} for name, answer in answers.items()}, silent)

    def _both(self, port: int) -> None:
        address = address_for(self._first, self._second)
        self._limit = time.monotonic() + self._limit_s + GRACE_S
        shared = {**self._args, "address": address, "port": port, "exchange": new_challenge()}
        self._asked = {}
        for name, state in (("first", self._first), ("second", self._second)):
            args = {**shared, "first": name == "first"}
            self._asked[name] = (state, self._leader.ask(state, "pair", self._limit_s, args))

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
            reasons = [str(answers[name].get("error") or "no answer") for name in sorted(bad)]
            return self._end(trouble="; ".join(reasons)[:500], blamed=blamed[0] if len(blamed) == 1 else "")
        outcomes: List[CheckOutcome] = [answer["outcome"] for answer in answers.values()]
        readings = [reading for outcome in outcomes for reading in outcome.readings]
        if not readings:
            reasons = [finding.reason for outcome in outcomes for finding in outcome.findings]
            return self._end(trouble="; ".join(reasons)[:500] or "it brought no figure")
        slowest = min(readings, key=lambda reading: reading.value)
        return self._end(value=slowest.value, key=slowest.key)

    def _end(self, value: float = 0.0, trouble: str = "", blamed: str = "", key: str = "") -> bool:
        result = self.result
        self.result = PairResult(
            result.round, result.first, result.second, value, trouble, blamed, result.stage, key
        )
        return True


def address_for(first: NodeState, second: NodeState) -> str:
    """Return the address of *first* as *second* sees it, or as this node does; empty if that is not known."""
    wire = second.wire if first.rank == 0 else first.wire
    if wire is None or wire.socket.family == socket.AF_UNIX:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        name = wire.socket.getsockname() if first.rank == 0 else wire.socket.getpeername()
        address = str(name[0])
        return address.removeprefix("::ffff:")
    return ""


#: So many nodes on one machine may take the usual time each; where more take turns, a quick vetting would not be quick.
FEW = 2

#: How often such nodes come round with each work, for a part of its time: a machine that is shared goes faster and slower, and
#: a node that had its one turn in a slow moment would be blamed for it. Each keeps its best.
PASSES = 3


@dataclass(frozen=True)
class _Doing:
    work: Work
    state: NodeState
    number: int
    limit: float


class LoadRound:
    """One round of *work* on *states*. What came of it stands in the states, also what was not done."""

    def __init__(
        self,
        leader: Leader,
        settings: VetSettings,
        work: Iterable[Work],
        states: Sequence[NodeState],
        round_number: int,
    ) -> None:
        self._leader, self._settings, self._round = leader, settings, round_number
        machines: Dict[str, List[NodeState]] = {}
        for state in states:
            machines.setdefault(state.machine, []).append(state)
        works = list(work)
        self._sharing = {name: len(of) for name, of in machines.items()}
        self._turns: Dict[str, List[Tuple[Work, NodeState]]] = {
            name: [
                (one, state)
                for one in works
                for _ in range(self._passes(name, one))
                for state in of
                if one.purpose or not state.reused
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
            one.state.note(one.work.name, severity, text, "deadline")
        left = {
            (work.name, state.rank): (work, state) for turns in self._turns.values() for work, state in turns
        }
        for work, state in left.values():
            if _known(state, work, self._round):
                continue  # of several turns it has had some
            text = f"{work.name} was not begun: the time for vetting was over"
            state.note(work.name, severity, text, "deadline")

    def _go_on(self) -> bool:
        for name, turns in self._turns.items():
            self._settle(name)
            while name not in self._doing and turns:
                self._begin(name, *turns.pop(0))
        return not self._doing and not any(self._turns.values())

    def _begin(self, name: str, work: Work, state: NodeState) -> None:
        if not state.there or state.no_child:
            return
        limit_s = limit_of(work, self._settings)
        number = self._leader.ask(state, work.name, limit_s, self._arguments(name, work))
        state.unfinished = work.name
        self._doing[name] = _Doing(work, state, number, time.monotonic() + limit_s + GRACE_S)

    def _arguments(self, name: str, work: Work) -> Dict[str, float]:
        """Return what a command receives: which round it is, how many nodes vet together, and to be short where many take turns."""
        found: Dict[str, float] = {"round": self._round, "nodes": len(self._leader.states)}
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
        answer = doing.state.answers.pop(doing.number, None)
        if answer is None and doing.state.there and time.monotonic() < doing.limit:
            return
        del self._doing[name]
        if answer is not None:
            _take(doing.state, doing.work, answer, self._round)
        elif doing.state.there:
            self._leader.lose(doing.state, doing.state.hung(doing.work.name))


def _take(state: NodeState, work: Work, answer: Mapping[str, Any], round_number: int) -> None:
    if "outcome" in answer:
        _keep(state, work, answer["outcome"], round_number)
        return
    lost = bool(answer.get("hung") or answer.get("died"))
    if lost:
        state.no_child = str(answer.get("error"))
    hung = bool(answer.get("hung")) or answer.get("why") == "hung"
    rule = "hung" if hung else "died" if lost else "failed"
    severity = Severity.CRITICAL if hung or lost else Severity.UNKNOWN
    state.note(work.name, severity, str(answer.get("error"))[:1000], rule)


def _keep(state: NodeState, work: Work, outcome: CheckOutcome, round_number: int) -> None:
    """Add what came of a turn; of several within one round there is one outcome, with the best figures."""
    known = state.works.setdefault(work.name, [])
    if work.again and _known(state, work, round_number):
        before = known.pop()
        state.outcomes.remove(before)
        outcome = joined(before, outcome)
    known.append(outcome)
    state.outcomes.append(outcome)


def _known(state: NodeState, work: Work, round_number: int) -> bool:
    """Return whether a turn of this round has brought figures."""
    known = state.works.get(work.name, ())
    return bool(known and known[-1].readings and known[-1].readings[0].round == round_number)


#: How long nodes may take to come, as a share of the whole time, and at most in seconds: they start within seconds of each
#: other, and one that is slow to start delays all others.
COME_SHARE, COME_MOST_S = 0.3, 60.0

#: A child that does not begin is its node's fault where it began on at least so many times as many nodes in all: a third may be
#: bad before peers decide nothing (figures.py).
LONELY = 3

#: What is reserved for ends of watches and exchanges of the last answers, in seconds.
END_S, END_SHARE = 13.0, 0.1


class VettingRun:
    """Conducts one vetting through *leader* until *deadline* (monotonic)."""

    def __init__(
        self, leader: Leader, settings: VetSettings, policy: Policy, *, begun: float, deadline: float
    ) -> None:
        self._leader, self._settings, self._policy = leader, settings, policy
        self._begun, self._deadline = begun, deadline
        self._pairs: List[PairResult] = []
        self.reused: Tuple[str, ...] = ()

    def run(
        self, earlier: Optional[Mapping[str, NodeReport]] = None, pairs: Sequence[PairResult] = ()
    ) -> Report:
        """Return what was found; never later than the deadline.

        What *earlier* says of nodes that have not been booted since is not measured again, nor are exchanges where *pairs*
        has those between all nodes.
        """
        self._gather()
        self._compare_clocks()
        work, late = works(self._settings)
        for one in late:
            self._note_all(
                one.name, Severity.INFO, f"left out: {one.name} takes more than the time for vetting leaves"
            )
        for state in alive(self._leader.states) if work else ():
            self._reuse(state, (earlier or {}).get(state.host))
        if work and len(self.reused) == len(self._leader.states) and (pairs or len(self.reused) == 1):
            self._pairs.extend(pairs)
            self._job_only(work)
        elif work and self._await_children():
            self._load(work, 0)
            self._repeat(work)
            self._exchange()
        self._end_watches()
        return self.report()

    def _reuse(self, state: NodeState, earlier: Optional[NodeReport]) -> None:
        """Take over what was measured before, if that was this node since its last boot."""
        if earlier is None or not state.boot_id or earlier.boot_id != state.boot_id:
            return
        fresh = {check for outcome in state.outcomes for check in checks_of(outcome)}
        result = [outcome for outcome in earlier.outcomes if not checks_of(outcome) & {*fresh, CLOCKS}]
        state.outcomes.extend(result)
        state.models.update(earlier.models)
        state.reused = True
        self.reused = (*self.reused, state.host)

    def _job_only(self, work: Sequence[Work]) -> None:
        """Do what is about the job alone: that is never taken from earlier."""
        about_job = [one for one in work if one.purpose]
        if about_job and self._await_children():
            for state in self._leader.states:
                state.reused = False
            self._load(about_job, 0)

    def report(self) -> Report:
        """Return what is known now."""
        nodes = tuple(
            NodeReport(
                host=state.host,
                boot_id=state.boot_id,
                models=dict(state.models),
                outcomes=tuple(state.outcomes),
                missing=state.missing,
                unfinished=state.unfinished if state.missing else "",
            )
            for state in self._leader.states
        )
        seconds = round(time.monotonic() - self._begun, 3)
        return Report(nodes, tuple(_keyed(self._pairs)), self._settings.level, seconds)

    # --- who is there, and the checks

    def _gather(self) -> None:
        share = min(COME_MOST_S, COME_SHARE * budget_of(self._settings))
        come_by = min(self._deadline, self._begun + share)
        states = self._leader.states
        self._leader.until(lambda: all(state.came or state.missing for state in states), come_by)
        for state in states:
            if not state.came and not state.missing:
                state.missing = f"it never came: no word from it within {share:g} s"
        self._leader.refuse_from_now(f"it comes too late: the other nodes waited {share:g} s")
        # Agents end each check after its own limit; this one is for agents that do not.
        checked_by = min(
            self._deadline - self._reserve_s(), self._begun + max(share, 0.5 * budget_of(self._settings))
        )
        self._leader.until(lambda: all(state.checked or not state.there for state in states), checked_by)
        for state in alive(states):
            if not state.checked:
                self._leader.lose(state, state.hung("the checks"))

    def _compare_clocks(self) -> None:
        known = [state for state in self._leader.states if state.clock is not None]
        clocks = [ClockOffset(state.host, *(state.clock or (0.0, 0.0))) for state in known]
        for state, (_, finding) in zip(known, compare_clocks(clocks, self._policy)):
            if state.outcomes or finding.severity is not Severity.PASS:
                state.outcomes.append(CheckOutcome((finding,)))  # by a pass alone nobody was examined

    def _reserve_s(self) -> float:
        """Return what is reserved of the time for what comes last."""
        return min(END_S, END_SHARE * budget_of(self._settings))

    def _await_children(self) -> bool:
        """Wait for the children; return whether any can be asked.

        One that does not begin in time is a fault of its node only where it began on most: many at once may wait for one
        slow file system.
        """
        states = self._leader.states
        self._leader.until(
            lambda: all(state.ready or state.no_child or not state.there for state in states),
            self._deadline - self._reserve_s(),
        )
        slow = [state for state in alive(states) if state.slow_start or not (state.ready or state.no_child)]
        lonely = LONELY * len(slow) <= len(alive(states))
        for state in alive(states):
            if not state.ready:
                severity = Severity.CRITICAL if state in slow and lonely else Severity.UNKNOWN
                why = state.no_child or f"{state.unfinished or 'the process for it'} did not end in time"
                state.note("compute", severity, f"nothing can be computed: {why}", "no_child")
        return any(state.ready for state in alive(states))

    # --- computing

    def _load(self, work: Iterable[Work], round_number: int) -> None:
        turns = LoadRound(self._leader, self._settings, work, self._workers(), round_number)
        turns.run(self._deadline - self._reserve_s())

    def _workers(self) -> List[NodeState]:
        return [state for state in alive(self._leader.states) if state.ready]

    def _note_all(self, check: str, severity: Severity, text: str) -> None:
        for state in alive(self._leader.states):
            state.note(check, severity, text, "budget")

    def _repeat(self, work: Sequence[Work]) -> None:
        """Have all nodes repeat what one node was slow in."""
        from pytest_mlhpc.node.vet.figures import keys_to_repeat

        keys = set(keys_to_repeat(self.report(), self._settings, self._policy))
        again = [one for one in work if self._has(one, keys)]
        for state in self._leader.states if again else ():
            state.reused = False
        if again:
            self._load(again, 1)

    def _has(self, work: Work, keys: Set[str]) -> bool:
        return any(
            reading.key in keys
            for state in self._leader.states
            for outcome in state.works.get(work.name, ())
            for reading in outcome.readings
        )

    # --- pairs

    def _exchange(self) -> None:
        """Do all rounds of pairs, and then what the judge wants confirmed."""
        if self._settings.single or len(self._workers()) < 2:
            return
        from pytest_mlhpc.node.vet.pairs import confirm_schedule, pair_schedule

        hosts = [state.host for state in self._workers()]
        for number, pairs in enumerate(pair_schedule(hosts, self._settings.level)):
            if not self._round(number, pairs, "rounds"):
                return
        for number, pairs in enumerate(confirm_schedule(self.report(), self._policy)):
            if not self._round(number, pairs, "confirm"):
                return

    def _round(self, number: int, pairs: Sequence[Tuple[str, str]], stage: str) -> bool:
        """Do one round; return whether time is left."""
        a_round = Round(self._leader, self._settings, number, pairs, stage=stage)
        done = a_round.run(self._deadline - self._reserve_s())
        self._pairs.extend(a_round.results)
        return done

    def _end_watches(self) -> None:
        states = alive(self._leader.states)
        asked = [(state, self._leader.ask(state, "end", END_S)) for state in states]

        def done() -> bool:
            return all(number in state.answers or not state.there for state, number in asked)

        ends = min(self._deadline, time.monotonic() + END_S + GRACE_S)
        whole = ends < self._deadline
        self._leader.until(done, ends)
        for state, number in asked:
            if number not in state.answers and state.there and whole:
                self._leader.lose(state, state.hung("the end of the watches"))
            elif number not in state.answers and state.there:
                text = "the time for vetting was over before all checks had said what they saw under load"
                state.note("watches", Severity.UNKNOWN, text, "deadline")


def checks_of(outcome: CheckOutcome) -> Set[str]:
    """Return the names of the checks that speak in an outcome."""
    said: List[Union[Finding, Reading, Fact]] = [*outcome.findings, *outcome.readings, *outcome.facts]
    return {one.check for one in said}


def _keyed(pairs: Sequence[PairResult]) -> List[PairResult]:
    """Return the exchanges, those that failed with the key of those that did not: all were asked for the same."""
    keys = {pair.key for pair in pairs if pair.key}
    return [replace(pair, key=min(keys)) if len(keys) == 1 and not pair.key else pair for pair in pairs]
