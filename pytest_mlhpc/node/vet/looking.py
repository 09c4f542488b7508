"""PAYLOAD. The owner of the process with the checks: what hangs or dies in it is named, and the rest is done by another one."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Set

from pytest_mlhpc.node.leash import Leash
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.held import Held, Say, checked
from pytest_mlhpc.node.vet.place import Place

#: How long the process may take to begin, in seconds: Python and some modules from a slow file system.
START_S = 30.0

#: How long the watches' end may take, in seconds: longer than they wait for each other (passive.END_S).
END_S = 12.0

#: How often it is started again after it hung or died: each time without what did it.
RESTARTS = 8


class Looking:
    """Has all checks done, and watches ended when asked. ``held`` is the process, None where there is none."""

    def __init__(
        self, settings: Settings, place: Place, module: str, *, environ: Mapping[str, str], say: Say
    ) -> None:
        self._settings, self._place, self._module = settings, place, module
        self._environ, self._say = environ, say
        self._plan: List[str] = []
        self._told: Set[str] = set()
        self._starts = 0
        self.held: Optional[Held] = None

    def start(self) -> None:
        """Begin with the checks that have not spoken."""
        self._starts += 1
        try:
            held = self.held = Held(Leash(self._module, environ=self._environ))
        except OSError as error:
            self._give_up(f"the process for checks cannot be started: {error.strerror}", Severity.UNKNOWN)
            return
        held.expect(0, "", START_S)
        args = {
            "settings": to_json(self._settings),
            "host": self._place.host,
            "hosts": list(self._place.hosts),
            "skip": sorted(self._told),
        }
        held.leash.send({"id": 0, "do": "checks", "args": args})

    def sample(self, *, on: bool) -> None:
        """Say whether the node is under load."""
        if self.held is not None:
            self.held.leash.send({"id": -1, "do": "sample", "args": {"on": on}})

    def end(self, number: int) -> None:
        """Have the watches say what they saw; the answer to *number* follows."""
        if self.held is None:
            self._say({"kind": "answer", "id": number, "done": True})
            return
        self.held.expect(number, "end", END_S)
        self.held.leash.send({"id": number, "do": "end"})

    def tend(self) -> None:
        """Hear what it says, and end it when it fails."""
        held = self.held
        if held is None:
            return
        try:
            for message in held.heard():
                self._heard(held, message)
        except (TypeError, ValueError, KeyError) as error:
            held.leash.trouble = f"it answered something that is no answer: {error}"[:300]
        how, hung = held.failed()
        if how:
            self._failed(held, how, hung=hung)

    def _heard(self, held: Held, message: Mapping[str, Any]) -> None:
        if "plan" in message:
            self._plan = [str(name) for name in message["plan"]]
            self._say({"kind": "plan", "boot_id": str(message.get("boot_id", ""))})
        if "begun" in message:
            held.expect(held.number, str(message["begun"]), float(message["limit_s"]))
            self._say({"kind": "begun", "what": held.what})
        if "check" in message:
            self._told.add(str(message["check"]))
            self._say({"kind": "checked", "check": str(message["check"]), "outcome": message["outcome"]})
        if message.get("done"):
            number = held.number
            held.idle()
            first = {"kind": "checks_done"}
            self._say(first if number == 0 else {"kind": "answer", "id": number, "done": True})

    def _failed(self, held: Held, how: str, *, hung: bool) -> None:
        """Name what the process was at, end it, and start another for the rest."""
        number, what = held.number, held.what
        severity = Severity.CRITICAL if hung else Severity.UNKNOWN
        left = held.let_go()
        self.held = None
        if number == 0 and what:
            self._told.add(what)
            text = f"the check {what} {how}{left}" if hung else f"in the check {what} {how}{left}"
            self._say(checked(what, severity, text, "hung" if hung else "died"))
            if self._starts <= RESTARTS:
                self.start()
                return
        self._give_up(f"the process for checks: {how}{left}", severity)
        if number > 0:
            self._say({"kind": "answer", "id": number, "done": True})

    def _give_up(self, text: str, severity: Severity) -> None:
        """Say that what has not been told will never be."""
        rest = [name for name in self._plan if name not in self._told] or ["checks"]
        for name in rest:
            self._say(checked(name, severity, text, "lost"))
        self._told.update(rest)
        self._say({"kind": "checks_done"})
