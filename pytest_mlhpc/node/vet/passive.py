"""The process that reads its node: runs the checks one after another, and the watches over the time of the load.

It may hang in a driver or die in a vendor's library: ``agent.py`` kills it, and starts another for what is left. Orders
(``node/child_process.py``): ``checks`` (``settings``, ``host``, ``hosts``, ``skip``: names) answers with ``plan`` (names, boot id), then for
each check ``begun`` with its limit in seconds, and ``check`` with its ``outcome``; then begins the watches, and says ``done``.
``sample`` with ``on`` says whether the node is under load; ``end`` answers with the watches' outcomes, and ``done``.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

from pytest_mlhpc.node.child_process import Answers, Orders
from pytest_mlhpc.node.protocol.plan import BUDGET_S, VetSettings
from pytest_mlhpc.node.protocol.schema import from_json, to_json
from pytest_mlhpc.node.vet.check import Check, LoadWatch, origin_of
from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable
from pytest_mlhpc.node.vet.policy import built_in

#: Time between two samples of a watch under load, in seconds (check.py).
SAMPLE_S = 0.5

#: A check that takes longer than so many times its cost, and than so many seconds, has hung.
PATIENCE, LEAST_S = 4.0, 5.0

#: Share of the whole time that checks may cost together; what would go beyond is left out, the dearest first.
SHARE = 0.4

#: How long watches may take to say what they saw, all at once, in seconds.
END_S = 8.0

Providers = Callable[[], Tuple[Sequence[Check], Sequence[LoadWatch]]]


def chosen(every: Sequence[Any], settings: VetSettings) -> Tuple[List[Any], List[Any]]:
    """Return which checks or watches to run, and which are left out only because time is short."""
    fitting = [
        one
        for one in every
        if (one.level == "quick" or settings.level == "deep")
        and (not one.purpose or one.purpose == settings.wanted.purpose)
        and not (settings.no_load and getattr(one, "loads", False))
    ]
    room = SHARE * (settings.budget_s or BUDGET_S[settings.level])
    late = []
    for one in sorted(fitting, key=lambda check: -check.cost_s):
        if sum(check.cost_s for check in fitting if check not in late) <= room:
            break
        late.append(one)
    return [one for one in fitting if one not in late], late


def attempt(one: Union[Check, LoadWatch], act: Callable[[], CheckOutcome]) -> CheckOutcome:
    """Return what a check says; what it cannot tell, and our own defects, are UNKNOWN.

    What a check for a job cannot read is its user's to mend, as all that such a check finds.
    """
    name, origin = one.name, origin_of(one)
    begun = time.monotonic()
    try:
        outcome = act()
        found: Tuple[Finding, ...] = outcome.findings
    except Unreadable as error:
        refused = Finding(name, Severity.UNKNOWN, str(error), rule="unreadable", origin=origin)
        outcome, found = CheckOutcome(), (refused,)
    except Exception as error:  # noqa: BLE001 - a defect in one check must not take the others along
        text = f"the check {name} failed by a defect of its own: {type(error).__name__}: {error}"
        outcome, found = CheckOutcome(), (Finding(name, Severity.UNKNOWN, text[:500], rule="defect"),)
    return CheckOutcome(found, outcome.readings, outcome.facts, round(time.monotonic() - begun, 6))


class Watcher:
    """One watch in a thread of its own, so that one that hangs keeps no other from speaking."""

    def __init__(self, watch: LoadWatch, machine: Machine, context: Context) -> None:
        self.watch, self._machine, self._context = watch, machine, context
        self.outcome: Optional[CheckOutcome] = None
        self.begun, self.ended = threading.Event(), threading.Event()
        self._loaded, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._work, daemon=True, name=watch.name).start()

    def load(self, *, on: bool) -> None:
        """Say whether the node is under load."""
        (self._loaded.set if on else self._loaded.clear)()

    def end(self) -> None:
        """Ask for the outcome; ``ended`` tells when it is there."""
        self._over.set()
        self._loaded.set()

    def _work(self) -> None:
        self.outcome = attempt(self.watch, self._watch)
        self.begun.set()
        self.ended.set()

    def _watch(self) -> CheckOutcome:
        state = self.watch.start(self._machine, self._context)
        self.begun.set()
        while not self._over.is_set():
            self._loaded.wait()
            if not self._over.wait(SAMPLE_S):
                state = self.watch.sample(self._machine, state)
        return self.watch.end(self._machine, self._context, state)


class Passive:
    """Carries out orders, line by line."""

    def __init__(self, answers: Answers, machine: Machine, providers: Providers) -> None:
        self._answers, self._machine, self._providers = answers, machine, providers
        self._watchers: List[Watcher] = []

    def do(self, number: int, what: str, args: Mapping[str, Any]) -> None:
        """Obey one command."""
        if what == "checks":
            self._checks(number, args)
        elif what == "sample":
            for watcher in self._watchers:
                watcher.load(on=bool(args.get("on")))
        elif what == "end":
            self._end(number)

    def _checks(self, number: int, args: Mapping[str, Any]) -> None:
        settings = from_json(VetSettings, args["settings"])
        context = Context(
            policy=built_in().changed(settings.bounds),
            wanted=settings.wanted,
            host=str(args.get("host", "")),
            hosts=tuple(args.get("hosts", ())),
            python=settings.python or sys.executable,
        )
        checks, watches = self._providers()
        run, late = chosen([*checks, *watches], settings)
        skip = set(args.get("skip", ()))
        self._answers.send(
            {"id": number, "plan": [one.name for one in run], "boot_id": _boot_id(self._machine)}
        )
        for one in late:
            text = f"left out: it may take {one.cost_s:g} s, more than the time for vetting leaves"
            self._tell(
                number, one.name, CheckOutcome((Finding(one.name, Severity.INFO, text, rule="budget"),))
            )
        for check in [one for one in run if one in checks and one.name not in skip]:
            limit_s = max(LEAST_S, PATIENCE * check.cost_s)
            self._answers.send({"id": number, "begun": check.name, "limit_s": limit_s})
            examine = functools.partial(check.examine, self._machine, context)
            self._tell(number, check.name, attempt(check, examine))
        for watch in [one for one in run if one in watches and one.name not in skip]:
            limit_s = max(LEAST_S, PATIENCE * watch.cost_s)
            self._answers.send({"id": number, "begun": watch.name, "limit_s": limit_s + 1.0})
            watcher = Watcher(watch, self._machine, context)
            watcher.begun.wait(limit_s)
            self._watchers.append(watcher)
        self._answers.send({"id": number, "done": True})

    def _end(self, number: int) -> None:
        for watcher in self._watchers:
            watcher.end()
        deadline = time.monotonic() + END_S
        for watcher in self._watchers:
            name = watcher.watch.name
            watcher.ended.wait(max(0.0, deadline - time.monotonic()))
            text = f"the check {name} hung while the node was under load"
            hung = CheckOutcome((Finding(name, Severity.CRITICAL, text, rule="hung"),))
            self._tell(number, name, watcher.outcome or hung)
        self._answers.send({"id": number, "done": True})

    def _tell(self, number: int, name: str, outcome: CheckOutcome) -> None:
        self._answers.send({"id": number, "check": name, "outcome": to_json(outcome)})


def _boot_id(machine: Machine) -> str:
    try:
        return machine.boot_id()
    except (Unreadable, OSError):
        return ""


def main(providers: Optional[Providers] = None, machine: Optional[Machine] = None) -> None:
    """Obey until standard input ends; *providers* and *machine* are for tests."""
    from pytest_mlhpc.node.vet.checks import all_checks

    answers = Answers(int(sys.argv[sys.argv.index("--answers") + 1]))
    orders = Orders()
    passive = Passive(answers, machine or Machine(), providers or all_checks)
    while True:
        order = orders.next()
        passive.do(int(order.id), order.do, order.args)


if __name__ == "__main__":
    main()
