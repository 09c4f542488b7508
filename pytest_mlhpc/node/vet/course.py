"""PAYLOAD. The course of one vetting, from the first agent to the report: what is asked of which node, in which order.

Every step has a limit and all of them one deadline; who is not done by then is named with what it had begun, and no other node
waits for it any longer. Nodes with one boot id are one machine, so they take turns.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Iterable, List, Mapping, Optional, Sequence, Set, Tuple, Union

from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.clocks import CLOCKS, Clock, compare_clocks
from pytest_mlhpc.node.vet.finding import Fact, Finding, Outcome, Reading, Severity
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.load_runner import Work, budget_of, works
from pytest_mlhpc.node.vet.pairing import GRACE_S, Round
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import NodeReport, PairResult, Report
from pytest_mlhpc.node.vet.seats import Seat, alive
from pytest_mlhpc.node.vet.turns import Turns

#: How long nodes may take to come, as a share of the whole time, and at most in seconds: they start within seconds of each
#: other, and one that is slow to start delays all others.
COME_SHARE, COME_MOST_S = 0.3, 60.0

#: A child that does not begin is its node's fault where it began on at least so many times as many nodes in all: a third may be
#: bad before peers decide nothing (rules.py).
LONELY = 3

#: What is kept for ends of watches and exchanges of the last answers, in seconds.
END_S, END_SHARE = 13.0, 0.1


class Course:
    """Conducts one vetting through *leader* until *deadline* (monotonic)."""

    def __init__(
        self, leader: Leader, settings: Settings, policy: Policy, *, begun: float, deadline: float
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
        for seat in alive(self._leader.seats) if work else ():
            self._reuse(seat, (earlier or {}).get(seat.host))
        if work and len(self.reused) == len(self._leader.seats) and (pairs or len(self.reused) == 1):
            self._pairs.extend(pairs)
            self._job_only(work)
        elif work and self._await_children():
            self._load(work, 0)
            self._repeat(work)
            self._exchange()
        self._end_watches()
        return self.report()

    def _reuse(self, seat: Seat, earlier: Optional[NodeReport]) -> None:
        """Take over what was measured before, if that was this node since its last boot."""
        if earlier is None or not seat.boot_id or earlier.boot_id != seat.boot_id:
            return
        fresh = {check for outcome in seat.outcomes for check in checks_of(outcome)}
        kept = [outcome for outcome in earlier.outcomes if not checks_of(outcome) & {*fresh, CLOCKS}]
        seat.outcomes.extend(kept)
        seat.models.update(earlier.models)
        seat.reused = True
        self.reused = (*self.reused, seat.host)

    def _job_only(self, work: Sequence[Work]) -> None:
        """Do what is about the job alone: that is never taken from earlier."""
        about_job = [one for one in work if one.purpose]
        if about_job and self._await_children():
            for seat in self._leader.seats:
                seat.reused = False
            self._load(about_job, 0)

    def report(self) -> Report:
        """Return what is known now."""
        nodes = tuple(
            NodeReport(
                host=seat.host,
                boot_id=seat.boot_id,
                models=dict(seat.models),
                outcomes=tuple(seat.outcomes),
                missing=seat.miss(),
                unfinished=seat.unfinished if seat.missing else "",
            )
            for seat in self._leader.seats
        )
        seconds = round(time.monotonic() - self._begun, 3)
        return Report(nodes, tuple(_keyed(self._pairs)), self._settings.level, seconds)

    # --- who is there, and the checks

    def _gather(self) -> None:
        share = min(COME_MOST_S, COME_SHARE * budget_of(self._settings))
        come_by = min(self._deadline, self._begun + share)
        seats = self._leader.seats
        self._leader.until(lambda: all(seat.came or seat.missing for seat in seats), come_by)
        for seat in seats:
            if not seat.came and not seat.missing:
                seat.missing = f"it never came: no word from it within {share:g} s"
        self._leader.refuse_from_now(f"it comes too late: the other nodes waited {share:g} s")
        # Agents end each check after its own limit; this one is for agents that do not.
        checked_by = min(
            self._deadline - self._kept(), self._begun + max(share, 0.5 * budget_of(self._settings))
        )
        self._leader.until(lambda: all(seat.checked for seat in alive(seats)), checked_by)
        for seat in alive(seats):
            if not seat.checked:
                self._leader.lose(seat, seat.hung("the checks"))

    def _compare_clocks(self) -> None:
        known = [seat for seat in self._leader.seats if seat.clock is not None]
        clocks = [Clock(seat.host, *(seat.clock or (0.0, 0.0))) for seat in known]
        for seat, (_, finding) in zip(known, compare_clocks(clocks, self._policy)):
            if seat.outcomes or finding.severity is not Severity.PASS:
                seat.outcomes.append(Outcome((finding,)))  # by a pass alone nobody was examined

    def _kept(self) -> float:
        """Return what is kept of the time for what comes last."""
        return min(END_S, END_SHARE * budget_of(self._settings))

    def _await_children(self) -> bool:
        """Wait for the children; return whether any can be asked.

        One that does not begin in time is a fault of its node only where it began on most: many at once may wait for one
        slow file system.
        """
        seats = self._leader.seats
        self._leader.until(
            lambda: all(seat.ready or seat.no_child for seat in alive(seats)), self._deadline - self._kept()
        )
        slow = [seat for seat in alive(seats) if seat.slow_start or not (seat.ready or seat.no_child)]
        lonely = LONELY * len(slow) <= len(alive(seats))
        for seat in alive(seats):
            if not seat.ready:
                severity = Severity.CRITICAL if seat in slow and lonely else Severity.UNKNOWN
                why = seat.no_child or f"{seat.unfinished or 'the process for it'} did not end in time"
                seat.note("compute", severity, f"nothing can be computed: {why}", "no_child")
        return any(seat.ready for seat in alive(seats))

    # --- computing

    def _load(self, work: Iterable[Work], round_number: int) -> None:
        turns = Turns(self._leader, self._settings, work, self._workers(), round_number)
        turns.run(self._deadline - self._kept())

    def _workers(self) -> List[Seat]:
        return [seat for seat in alive(self._leader.seats) if seat.ready]

    def _note_all(self, check: str, severity: Severity, text: str) -> None:
        for seat in alive(self._leader.seats):
            seat.note(check, severity, text, "budget")

    def _repeat(self, work: Sequence[Work]) -> None:
        """Have all nodes repeat what one node was slow in."""
        from pytest_mlhpc.node.vet.judge import needs_repeat

        keys = set(needs_repeat(self.report(), self._policy, self._settings))
        again = [one for one in work if self._has(one, keys)]
        for seat in self._leader.seats if again else ():
            seat.reused = False
        if again:
            self._load(again, 1)

    def _has(self, work: Work, keys: Set[str]) -> bool:
        return any(
            reading.key in keys
            for seat in self._leader.seats
            for outcome in seat.works.get(work.name, ())
            for reading in outcome.readings
        )

    # --- pairs

    def _exchange(self) -> None:
        """Do all rounds of pairs, and then what the judge wants confirmed."""
        if self._settings.single or len(self._workers()) < 2:
            return
        from pytest_mlhpc.node.vet.pairs import confirm_schedule
        from pytest_mlhpc.node.vet.schedule import pair_schedule

        hosts = [seat.host for seat in self._workers()]
        for number, pairs in enumerate(pair_schedule(hosts, self._settings.level)):
            if not self._round(number, pairs, "rounds"):
                return
        for number, pairs in enumerate(confirm_schedule(self.report(), self._policy)):
            if not self._round(number, pairs, "confirm"):
                return

    def _round(self, number: int, pairs: Sequence[Tuple[str, str]], stage: str) -> bool:
        """Do one round; return whether time is left."""
        a_round = Round(self._leader, self._settings, number, pairs, stage=stage)
        done = a_round.run(self._deadline - self._kept())
        self._pairs.extend(a_round.results)
        return done

    def _end_watches(self) -> None:
        seats = alive(self._leader.seats)
        asked = [(seat, self._leader.ask(seat, "end", END_S)) for seat in seats]

        def done() -> bool:
            return all(number in seat.answers or not seat.there for seat, number in asked)

        ends = min(self._deadline, time.monotonic() + END_S + GRACE_S)
        whole = ends < self._deadline
        self._leader.until(done, ends)
        for seat, number in asked:
            if number not in seat.answers and seat.there and whole:
                self._leader.lose(seat, seat.hung("the end of the watches"))
            elif number not in seat.answers and seat.there:
                text = "the time for vetting was over before all checks had said what they saw under load"
                seat.note("watches", Severity.UNKNOWN, text, "deadline")


def checks_of(outcome: Outcome) -> Set[str]:
    """Return the names of the checks that speak in an outcome."""
    said: List[Union[Finding, Reading, Fact]] = [*outcome.findings, *outcome.readings, *outcome.facts]
    return {one.check for one in said}


def _keyed(pairs: Sequence[PairResult]) -> List[PairResult]:
    """Return the exchanges, those that failed with the key of those that did not: all were asked for the same."""
    keys = {pair.key for pair in pairs if pair.key}
    return [replace(pair, key=min(keys)) if len(keys) == 1 and not pair.key else pair for pair in pairs]
