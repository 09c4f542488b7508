"""One node's part: owns its two processes, and tells the leader what they say.

It reads no hardware itself, so it cannot hang in a driver: what hangs is killed after its limit and named, and what not even
SIGKILL ends is left behind and named. Checks begin at once; the leader is looked for meanwhile, and gets all that was said.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from typing import Any, List, Mapping, Optional

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.agents.hub import FirstNodeNotReached
from pytest_mlhpc.node.agents.wire import Wire, proof
from pytest_mlhpc.node.child_process import VANISH_S, ChildProcess
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.place import Search, VetPlace, key_of
from pytest_mlhpc.node.vet.workers import (
    CheckRunner,
    LoadRunner,
    WorkerModules,
    WorkerSignals,
    budget_of,
    checked,
)

#: How long the leader may be silent, in seconds.
SILENCE_S = 30.0


class Agent:
    """Serves one node until the leader says that all is over.

    *wire* is the connection to a leader in the same process; without one it is looked for.
    """

    def __init__(
        self,
        settings: VetSettings,
        place: VetPlace,
        programs: WorkerModules,
        signals: WorkerSignals,
        *,
        environ: Mapping[str, str],
        wire: Optional[Wire] = None,
    ) -> None:
        self._settings, self._place = settings, place
        self._signals, self._environ = signals, environ
        self._wire = wire
        self._unsent: List[Mapping[str, Any]] = []
        self._over = False
        self._trouble = ""
        self._looking = CheckRunner(settings, place, programs.passive, environ=environ, say=self._say)
        self._load = LoadRunner(
            settings,
            programs.child,
            environ=environ,
            say=self._say,
            loaded=lambda on: self._looking.sample(on=on),
        )
        self._ends_at = time.monotonic() + 2.0 * budget_of(settings) + SILENCE_S

    def work(self) -> str:
        """Stay until all is over; return why it ended otherwise, or nothing. A signal ends it, too."""
        try:
            self._looking.start()
            self._load.start()
            if self._wire is None:
                self._find_leader()
            while not self._over and not self._trouble and not self._signals.received:
                self._wait()
                self._turn()
        finally:
            self._end()
        return self._trouble

    # --- the leader

    def _find_leader(self) -> None:
        search = Search(self._place, key_of(self._environ), self._settings.out)

        def search_leader() -> None:
            try:
                wire = search.meet(
                    budget_of(self._settings), lambda: self._over or bool(self._signals.received)
                )
            except FirstNodeNotReached as error:
                self._trouble = str(error)
            except Exception as error:  # noqa: BLE001 - a thread has nobody else who would hear of it
                self._trouble = f"the leader cannot be looked for: {type(error).__name__}: {error}"
            else:
                for name in search.lost_names:
                    text = (
                        f"the name {name} of the first node does not resolve here: no job could start on it"
                    )
                    self._say(checked("rendezvous", Severity.CRITICAL, text, "resolves"))
                self._wire = wire
            self._signals.wake()

        threading.Thread(target=search_leader, daemon=True, name="rendezvous").start()

    def _say(self, message: Mapping[str, Any]) -> None:
        self._unsent.append(message)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "over":
            self._over = True
        elif kind == "do":
            number, what = int(message["id"]), str(message["do"])
            limit_s = float(message.get("limit_s", 0.0))
            args = message.get("args")
            self._do(number, what, dict(args) if isinstance(args, dict) else {}, limit_s)

    def _do(self, number: int, what: str, args: Mapping[str, Any], limit_s: float) -> None:
        if what == "port":
            self._say({"kind": "answer", "id": number, "port": nodes.free_port()})
        elif what == "end":
            self._looking.end(number)
        elif what == "pair":
            self._load.do(number, what, self._with_secret(args), limit_s)
        else:
            self._load.do(number, what, args, limit_s)

    def _with_secret(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add what both nodes of this exchange know and was never sent: a proof of its name by the key of all nodes."""
        others = {name: value for name, value in args.items() if name != "exchange"}
        return {**others, "secret": proof(key_of(self._environ), "pair", str(args.get("exchange")))}

    # --- what goes on

    def _children(self) -> List[ChildProcess]:
        return [child for child in (self._looking.child, self._load.child) if child is not None]

    def _wait(self) -> None:
        now = time.monotonic()
        until = min([now + 1.0, *(child.limit for child in self._children())])
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wakeup, selectors.EVENT_READ)
            if self._wire is not None and not self._wire.ended:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wire.waiting else 0)
                selector.register(self._wire.socket, events)
            for child in self._children():
                child.watch(selector)
            ready = self._unsent or (self._wire is not None and self._wire.arrived)
            selector.select(0 if ready and self._wire is not None else max(0.0, until - now))

    def _turn(self) -> None:
        self._signals.drain()
        self._looking.tend()
        self._load.tend()
        self._tend_wire()
        if time.monotonic() > self._ends_at:
            self._trouble = (
                self._trouble or "the leader did not say that vetting ended, and its time is long over"
            )

    def _tend_wire(self) -> None:
        wire = self._wire
        if wire is None:
            return
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            wire.send(message)
        wire.flush()
        for message in wire.read():
            self._handle(message)
        wire.tend(SILENCE_S)
        if wire.ended and not self._over:
            self._trouble = f"the leader on {self._place.name_of(0)} is gone: {wire.ended}"

    # --- the end

    def _end(self) -> None:
        children = self._children()
        for child in children:
            child.close()
        deadline = time.monotonic() + VANISH_S
        for child in children:
            child.wait(max(0.0, deadline - time.monotonic()))
        if self._wire is not None:
            if self._signals.received:
                self._wire.send({"kind": "leaving", "text": "a signal ended it"})
            self._wire.close()


def farewell(place: VetPlace, text: str) -> None:
    """Tell the user why this node's part ended early."""
    line = f"mlhpc vet: {place.host} (node {place.rank} of {place.nodes}): {text}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode("utf-8", "replace"))
