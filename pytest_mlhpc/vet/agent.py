"""PAYLOAD. One node's part: keeps its two processes on their leashes, and tells the leader what they say.

It looks at no hardware itself, so it cannot hang in a driver: what hangs is killed after its limit and named, and what not even
SIGKILL ends is left behind and named. Checks begin at once; the leader is looked for meanwhile, and gets all that was said.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Set

from pytest_mlhpc.batch.pod_wire import Wire
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.vet.finding import Finding, Outcome, Severity
from pytest_mlhpc.vet.leash import Leash
from pytest_mlhpc.vet.load import READY_SHARE, budget_of
from pytest_mlhpc.vet.place import Place
from pytest_mlhpc.vet.programs import Programs, Signals
from pytest_mlhpc.vet.rendezvous import NotMet, Search, key_of
from pytest_mlhpc.vet.settings import Settings

#: Time between two signs of life, and how long the leader may be silent, in seconds.
BEAT_S, SILENCE_S = 2.0, 30.0

#: How long the process with the checks may take to begin, in seconds: Python and some modules from a slow file system.
START_S = 30.0

#: How long the watches' end may take, in seconds: longer than they wait for each other (passive.END_S).
END_S = 12.0

#: How often the process with the checks is started again after it hung or died: each time without what did it.
RESTARTS = 8

#: How long what was killed may take to vanish before it is left behind, in seconds.
VANISH_S = 2.0

#: What the child takes as ``--accelerator`` (child/main.py).
CHILD_KINDS = ("cpu", "cuda", "rocm", "xpu")

#: Much of what the child is told, beside what the leader says, only its own settings say.
OWN_ARGS = {"checkpoint": "checkpoint", "data": "data"}


class Held:
    """A process on its leash with the one command that it is at."""

    def __init__(self, leash: Leash) -> None:
        self.leash = leash
        self.number = -1
        self.what = self.doing = ""
        self.limit = float("inf")
        self.limit_s = 0.0

    def expect(self, number: int, what: str, limit_s: float) -> None:
        """Note what it is at, and until when it may be."""
        self.number, self.what, self.doing, self.limit_s = number, what, "", limit_s
        self.limit = time.monotonic() + limit_s

    def idle(self) -> None:
        """Note that it has nothing to do."""
        self.number, self.what, self.doing, self.limit = -1, "", "", float("inf")


class Agent:
    """Serves one node until the leader says that all is over.

    *wire* is the connection to a leader in the same process; without one it is looked for.
    """

    def __init__(
        self,
        settings: Settings,
        place: Place,
        programs: Programs,
        signals: Signals,
        *,
        environ: Mapping[str, str],
        wire: Optional[Wire] = None,
    ) -> None:
        self._settings, self._place, self._programs = settings, place, programs
        self._signals, self._environ = signals, environ
        self._wire = wire
        self._unsent: List[Dict[str, Any]] = []
        self._over = False
        self._trouble = ""
        self._passive: Optional[Held] = None
        self._child: Optional[Held] = None
        self._child_gone = self._child_refused = ""
        self._plan: List[str] = []
        self._told: Set[str] = set()
        self._starts = 0
        self._dying: List[Leash] = []
        self._next_beat = 0.0
        self._ends_at = time.monotonic() + 2.0 * budget_of(settings) + SILENCE_S

    def work(self) -> str:
        """Stay until all is over; return why it ended otherwise, or nothing. A signal ends it, too."""
        try:
            self._start_passive()
            self._start_child()
            if self._wire is None:
                self._look_for_leader()
            while not self._over and not self._trouble and not self._signals.told:
                self._wait()
                self._turn()
        finally:
            self._end()
        return self._trouble

    # --- the leader

    def _look_for_leader(self) -> None:
        search = Search(self._place, key_of(self._environ), self._settings.out)

        def look() -> None:
            try:
                wire = search.meet(budget_of(self._settings), lambda: self._over or bool(self._signals.told))
            except NotMet as error:
                self._trouble = str(error)
            except Exception as error:  # noqa: BLE001 - a thread has nobody else who would hear of it
                self._trouble = f"the leader cannot be looked for: {type(error).__name__}: {error}"
            else:
                for name in search.lost_names:
                    text = (
                        f"the name {name} of the first node does not resolve here: no job could start on it"
                    )
                    finding = Finding("rendezvous", Severity.CRITICAL, text, rule="resolves")
                    self._unsent.append(_checked("rendezvous", Outcome((finding,))))
                self._wire = wire
            self._signals.wake()

        threading.Thread(target=look, daemon=True, name="rendezvous").start()

    def _say(self, message: Dict[str, Any]) -> None:
        self._unsent.append(message)

    def _hear(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "over":
            self._over = True
        elif kind == "do":
            number, what = int(message["id"]), str(message["do"])
            limit_s = float(message.get("limit_s", 0.0))
            args = message.get("args")
            self._do(number, what, dict(args) if isinstance(args, dict) else {}, limit_s)

    def _do(self, number: int, what: str, args: Dict[str, Any], limit_s: float) -> None:
        if what == "port":
            self._say({"kind": "answer", "id": number, "port": _free_port()})
        elif what == "end":
            if self._passive is None:
                self._say({"kind": "answer", "id": number, "done": True})
            else:
                self._passive.expect(number, "end", END_S)
                self._passive.leash.send({"id": number, "do": "end"})
        elif self._child is None:
            self._say({"kind": "answer", "id": number, "error": self._child_gone or "nothing computes here"})
        else:
            self._child.expect(number, what, limit_s)
            self._child.leash.send({"id": number, "do": what, "args": {**args, **self._own_args(what)}})
            self._sample(on=True)

    def _own_args(self, what: str) -> Dict[str, Any]:
        wanted = self._settings.wanted
        path = wanted.paths.get(OWN_ARGS.get(what, ""), "")
        sizes = {"size": wanted.checkpoint_bytes} if what == "checkpoint" and wanted.checkpoint_bytes else {}
        return {"level": self._settings.level, **({"path": path} if path else {}), **sizes}

    # --- what goes on

    def _wait(self) -> None:
        now = time.monotonic()
        limits = [held.limit for held in (self._passive, self._child) if held is not None]
        until = min([now + 1.0, self._next_beat if self._wire is not None else now + 1.0, *limits])
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wakeup, selectors.EVENT_READ)
            if self._wire is not None and not self._wire.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.waiting else 0)
                selector.register(self._wire.socket, events)
            for held in (self._passive, self._child):
                if held is not None:
                    for fd in (held.leash.answers, held.leash.words):
                        selector.register(fd, selectors.EVENT_READ)
                    if held.leash.waiting >= 0:
                        selector.register(held.leash.waiting, selectors.EVENT_WRITE)
            ready = self._unsent or (self._wire is not None and self._wire.arrived)
            selector.select(0 if ready and self._wire is not None else max(0.0, until - now))

    def _turn(self) -> None:
        self._signals.drain()
        if self._passive is not None:
            self._tend_passive(self._passive)
        if self._child is not None:
            self._tend_child(self._child)
        self._tend_wire()
        if time.monotonic() > self._ends_at:
            self._trouble = self._trouble or "nobody has said that vetting is over, and its time is long over"

    def _tend_wire(self) -> None:
        wire, now = self._wire, time.monotonic()
        if wire is None:
            return
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._say({"kind": "beat"})
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            wire.send(message)
        wire.flush()
        for message in wire.read():
            self._hear(message)
        if now - wire.heard > SILENCE_S:
            wire.end(f"no sign of life for {SILENCE_S:g} s")
        if wire.ended and not self._over:
            self._trouble = f"the leader on {self._place.name_of(0)} is gone: {wire.ended}"

    # --- checks

    def _start_passive(self) -> None:
        self._starts += 1
        try:
            leash = Leash(self._programs.passive, environ=self._environ)
        except OSError as error:
            self._passive_over(
                f"the process for checks cannot be started: {error.strerror}", Severity.UNKNOWN
            )
            return
        self._passive = Held(leash)
        self._passive.expect(0, "", START_S)
        args = {
            "settings": to_json(self._settings),
            "host": self._place.host,
            "hosts": list(self._place.hosts),
            "skip": sorted(self._told),
        }
        leash.send({"id": 0, "do": "checks", "args": args})

    def _tend_passive(self, held: Held) -> None:
        held.leash.flush()
        held.leash.listen()
        for message in held.leash.read():
            self._passive_said(held, message)
        if self._passive is not held:
            return
        if held.leash.ended is not None or held.leash.trouble:
            how = held.leash.trouble or f"its process {held.leash.how()}"
            self._passive_failed(held, how, Severity.UNKNOWN, "died")
        elif time.monotonic() > held.limit:
            how = f"did not end within {held.limit_s:g} s"
            self._passive_failed(held, how, Severity.CRITICAL, "hung")

    def _passive_said(self, held: Held, message: Mapping[str, Any]) -> None:
        if "plan" in message:
            self._plan = [str(name) for name in message["plan"]]
            self._say({"kind": "plan", "boot_id": str(message.get("boot_id", ""))})
        if "begun" in message:
            held.expect(held.number, str(message["begun"]), float(message.get("limit_s", START_S)))
            self._say({"kind": "begun", "what": held.what})
        if "check" in message:
            self._told.add(str(message["check"]))
            self._say({"kind": "checked", "check": str(message["check"]), "outcome": message.get("outcome")})
        if message.get("done"):
            number = held.number
            held.idle()
            self._say(
                {"kind": "checks_done"} if number == 0 else {"kind": "answer", "id": number, "done": True}
            )

    def _passive_failed(self, held: Held, how: str, severity: Severity, rule: str) -> None:
        """Name what the process was at, end it, and start another for the rest."""
        number, what = held.number, held.what
        left = self._let_go(held.leash)
        self._passive = None
        if number == 0 and what and what != "end":
            self._told.add(what)
            text = f"the check {what} {how}{left}"
            self._say(_checked(what, Outcome((Finding(what, severity, text, rule=rule),))))
            if self._starts <= RESTARTS:
                self._start_passive()
                return
        self._passive_over(f"the process for checks: {how}{left}", severity)
        if number > 0:
            self._say({"kind": "answer", "id": number, "done": True})

    def _passive_over(self, text: str, severity: Severity) -> None:
        """Say that what has not been told will never be."""
        rest = [name for name in self._plan if name not in self._told] or ["checks"]
        for name in rest:
            self._say(_checked(name, Outcome((Finding(name, severity, text, rule="lost"),))))
        self._told.update(rest)
        self._say({"kind": "checks_done"})

    def _sample(self, *, on: bool) -> None:
        if self._passive is not None:
            self._passive.leash.send({"id": -1, "do": "sample", "args": {"on": on}})

    # --- the child

    def _start_child(self) -> None:
        if self._settings.no_load:
            self._child_gone = "it was asked not to compute"
            return
        try:
            kind = self._settings.wanted.accelerator
            arguments = ("--accelerator", kind) if kind in CHILD_KINDS else ()
            python = self._settings.python
            leash = Leash(self._programs.child, python=python, arguments=arguments, environ=self._environ)
        except OSError as error:
            self._child_lost(
                f"{self._settings.python or sys.executable} cannot be started: {error.strerror}", hung=False
            )
            return
        self._child = Held(leash)
        self._child.expect(0, "starting", READY_SHARE * budget_of(self._settings))

    def _tend_child(self, held: Held) -> None:
        held.leash.flush()
        held.leash.listen()
        for message in held.leash.read():
            self._child_said(held, message)
        if held.leash.ended is not None or held.leash.trouble:
            self._child_failed(held, held.leash.trouble or f"its process {held.leash.how()}", hung=False)
        elif time.monotonic() > held.limit:
            self._child_failed(held, f"did not end within {held.limit_s:g} s", hung=True)

    def _child_said(self, held: Held, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            held.idle()
            self._say({"kind": "ready", "ready": message["ready"]})
            return
        if message.get("id") != held.number:
            return  # of a command that nobody waits for any more
        if "begun" in message:
            held.doing = str(message["begun"])[:200]
            self._say({"kind": "begun", "what": held.doing})
        elif held.number == 0:
            self._child_refused = str(message.get("error"))[:1000]
        elif "outcome" in message or "error" in message:
            answer = {name: message[name] for name in ("outcome", "error") if name in message}
            self._say({"kind": "answer", "id": held.number, **answer})
            held.idle()
            self._sample(on=False)

    def _child_failed(self, held: Held, how: str, *, hung: bool) -> None:
        number, what = held.number, held.doing or held.what
        left = self._let_go(held.leash)
        self._child = None
        self._sample(on=False)
        if number <= 0:
            self._child_lost(
                self._child_refused or (f"{what}: {how}{left}" if what else f"{how}{left}"), hung=hung
            )
            return
        self._child_gone = f"its process was lost before, in {what}: {how}"
        self._say(
            {"kind": "answer", "id": number, "error": f"{what} {how}{left}", "hung": hung, "died": not hung}
        )

    def _child_lost(self, text: str, *, hung: bool) -> None:
        self._child_gone = text
        self._say({"kind": "no_child", "text": text, "hung": hung})

    # --- the end

    def _let_go(self, leash: Leash) -> str:
        """Kill a process; return what there is to say if it does not go."""
        gone = leash.ended is not None
        leash.close()
        if gone or leash.wait(VANISH_S):
            return ""
        self._dying.append(leash)
        return f"; not even SIGKILL ends it: process {leash.pid} is left behind"

    def _end(self) -> None:
        leashes = [held.leash for held in (self._passive, self._child) if held is not None]
        for leash in leashes:
            leash.close()
        deadline = time.monotonic() + VANISH_S
        for leash in leashes:
            leash.wait(max(0.0, deadline - time.monotonic()))
        if self._wire is not None:
            if self._signals.told:
                self._wire.send({"kind": "leaving", "text": "it was told to end by a signal"})
            self._wire.close()


def _checked(check: str, outcome: Outcome) -> Dict[str, Any]:
    return {"kind": "checked", "check": check, "outcome": to_json(outcome)}


def _free_port() -> int:
    """Return a port that was free a moment ago; 0 if there is none."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
    return 0


def farewell(place: Place, text: str) -> None:
    """Tell the user why this node's part ended early."""
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"mlhpc vet: {place.host} (node {place.rank} of {place.nodes}): {text}\n".encode(
                "utf-8", "replace"
            ),
        )
