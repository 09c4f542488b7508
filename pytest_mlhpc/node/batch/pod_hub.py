"""The first pod's hub: other pods' agents connect to it, and ``node/batch/podrun.py`` asks it to start programs there.

One thread of the first pod's agent. It starts nothing itself: on its own pod ``podrun`` does. What it hears from other pods
about a run goes to the ``podrun`` that asked; when that one is gone, the run is ended everywhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.wire import BEAT_S, PROOF_S, Handshake, Wire, key_of
from pytest_mlhpc.node.batch.pod_place import PodPlace, label
from pytest_mlhpc.node.batch.runs import FOREIGN_VARIABLES
from pytest_mlhpc.node.batch.vetting import all_runs
from pytest_mlhpc.node.cores import on_node
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import say
from pytest_mlhpc.node.protocol.channel import keep_alive, running_payload
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan

#: Most connections that have not proved who they are; the oldest goes first.
MOST_STRANGERS = 64

#: From how many bytes on, waiting for ``podrun`` to take them, agents are not listened to, and theirs for their programs.
FULL = 4 * 1024 * 1024

#: How long agents are given to hear that all is over, in seconds.
FAREWELL_S = 5.0


class Hub:
    """Listens from its construction on; ``close`` tells all agents to end with the given code.

    Args:
        plan: whose agents may come.
        place: the first pod.
        folder: private; gets the socket for ``podrun``.
        environ: variables of the first pod's agent: what a run's environment has beyond these goes to other pods.

    Raises:
        OSError: the port is taken, or no socket can be made.
    """

    def __init__(self, plan: Plan, place: PodPlace, folder: str, environ: Mapping[str, str]) -> None:
        self.path = os.path.join(folder, "hub")  # noqa: PTH118 - a string is what sockets take
        self._key, self._place, self._base = key_of(plan), place, own_variables(environ)
        self._plans = all_runs(plan)
        self._payload = running_payload()
        self._lock = threading.Condition()
        self._agents: Dict[int, Wire] = {}
        self._labels: Dict[int, str] = {0: place.label}
        self._nodes: Dict[int, str] = {}  #: of those that nobody has told to leave
        self._lost: Dict[int, str] = {}
        self._strangers: List[Wire] = []  #: they may become agents, or are shown out
        self._client: Optional[Wire] = None
        self._over: Optional[int] = None
        self._runs: Dict[str, Tuple[int, ...]] = {}  #: runs under way -> their other pods
        self._next_beat = 0.0
        self._registered: Dict[int, Tuple[int, Callable[[], None]]] = {}
        self._selector = selectors.DefaultSelector()
        self._tcp = _listen(place.port)
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake, self._waker = os.pipe()
        try:
            self._unix.bind(self.path)
            self._unix.listen(16)
            self._unix.setblocking(False)
        except OSError:
            self._release()
            raise
        for listening, act in ((self._tcp, self._accept_stranger), (self._unix, self._ask)):
            self._selector.register(listening, selectors.EVENT_READ, act)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._work, name="mlhpc-hub", daemon=True)
        self._thread.start()

    @property
    def labels(self) -> Tuple[str, ...]:
        """The pods in order; one that was never heard of by its number."""
        with self._lock:
            return tuple(self._labels.get(rank, f"pod {rank}") for rank in range(self._place.pods))

    @property
    def missing(self) -> List[int]:
        """Ranks of the pods that have never come."""
        with self._lock:
            return [rank for rank in range(1, self._place.pods) if rank not in self._labels]

    @property
    def lost(self) -> Dict[int, str]:
        """Why pods that had come are gone, by their rank."""
        with self._lock:
            return dict(self._lost)

    def wait(self, limit_s: float, stop: Callable[[], bool]) -> None:
        """Wait until all pods have come, one of them is lost again, *stop* says so, or the time is over."""
        deadline = time.monotonic() + limit_s
        with self._lock:
            while not stop() and not self._lost and len(self._labels) < self._place.pods:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._lock.wait(min(left, 0.5))  # a signal does not wake a condition

    def close(self, code: int) -> None:
        """Tell all agents to end with *code*, and stop."""
        with self._lock:
            self._over = code
        os.write(self._waker, b".")
        self._thread.join(FAREWELL_S + 1.0)
        if not self._thread.is_alive():
            self._release()

    def _release(self) -> None:
        for closing in (self._tcp, self._unix, self._selector):
            closing.close()
        for fd in (self._wake, self._waker):
            os.close(fd)

    def _work(self) -> None:
        try:
            while self._over is None:
                for key, _ in self._selector.select(1.0):
                    key.data()
                self._tend()
        finally:
            self._farewell()

    def _tend(self) -> None:
        now = time.monotonic()
        self._beat(now)
        full = self._client is not None and self._client.waiting > FULL
        for rank, wire in list(self._agents.items()):
            if full:
                wire.heard = now
            elif now - wire.heard > self._place.silence_s:
                wire.end(f"no sign of life for {self._place.silence_s:g} s")
            if wire.ended:
                self._lose(rank, wire.ended)
        self._drop_strangers(now)
        for wire in list(self._agents.values()):
            self._listen_to(wire, reading=not full)
        if self._client is not None and self._client.ended:
            self._client_lost()
        elif self._client is not None:
            self._listen_to(self._client)

    def _beat(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + min(BEAT_S, self._place.silence_s / 3)
            for wire in self._agents.values():
                wire.send({"kind": "beat"})

    def _drop_strangers(self, now: float) -> None:
        late = [wire for wire in self._strangers if wire.ended or now - wire.since > PROOF_S]
        too_many = max(0, len(self._strangers) - MOST_STRANGERS)
        late += [wire for wire in self._strangers[:too_many] if wire not in late]
        for wire in late:
            self._strangers.remove(wire)
            self._forget(wire)

    def _listen_to(self, wire: Wire, *, reading: bool = True) -> None:
        """Let the selector look for what matters now."""
        fd = wire.socket.fileno()
        act = self._registered[fd][1]
        events = (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if wire.waiting else 0)
        before = self._registered[fd][0]
        if events == before:
            return
        self._registered[fd] = (events, act)
        if not before:
            self._selector.register(fd, events, act)
        elif not events:
            self._selector.unregister(fd)
        else:
            self._selector.modify(fd, events, act)

    def _add(self, wire: Wire, act: Callable[[], None]) -> None:
        fd = wire.socket.fileno()
        if self._registered.get(fd, (0, act))[0]:
            self._selector.unregister(fd)
        self._registered[fd] = (selectors.EVENT_READ, act)
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _forget(self, wire: Wire) -> None:
        fd = wire.socket.fileno()
        if self._registered.pop(fd, (0, None))[0]:
            self._selector.unregister(fd)
        wire.close()

    def _accept_stranger(self) -> None:
        with contextlib.suppress(OSError):  # who connected has gone, or no descriptor is free
            accepted, _ = self._tcp.accept()
            keep_alive(accepted)
            handshake = Handshake(accepted, self._key)
            self._strangers.append(handshake.wire)
            self._add(handshake.wire, lambda: self._prove(handshake))

    def _prove(self, handshake: Handshake) -> None:
        hello = handshake.greeting()
        if hello is not None:
            self._strangers.remove(handshake.wire)
            handshake.welcome()
            self._welcome(handshake.wire, hello)

    def _welcome(self, wire: Wire, text: str) -> None:
        try:
            hello = read_json(text)
            rank, name, node = int(hello["rank"]), str(hello["name"]), str(hello["node"])
            payload = str(hello["payload"])
        except (ValueError, TypeError, KeyError):
            self._forget(wire)
            return
        refusal = ""
        if not 0 < rank < self._place.pods:
            refusal = f"its rank is {rank}, but there are {self._place.pods} pods"
        elif rank in self._labels:
            refusal = f"pod {rank} ({self._labels[rank]}) has come before"
        elif payload != self._payload:
            refusal = f"protocol_mismatch: its payload is {payload}, that of the first pod {self._payload}"
        if refusal:
            say(f"the agent of {name} is refused: {refusal}")
            wire.send({"kind": "refused", "text": refusal})
            self._part_from(wire)
            return
        wire.trusted = True
        self._add(wire, lambda: self._handle(rank, wire))
        with self._lock:
            self._agents[rank] = wire
            self._labels[rank], self._nodes[rank] = label(name, node), node
            self._lock.notify_all()

    def _part_from(self, wire: Wire) -> None:
        """Close a connection once the other side has, or its time is over: closed with bytes unread, words would be lost."""
        self._strangers.append(wire)

        def discard() -> None:
            wire.flush()
            wire.read()

        self._add(wire, discard)

    def _handle(self, rank: int, wire: Wire) -> None:
        wire.flush()
        for message in wire.read():
            kind = message["kind"]
            if kind == "leaving":
                wire.ended = str(message.get("text"))  # that it closes the connection then is no news
                self._nodes[rank] = ""  # whoever ended its pod, the node has done nothing
            elif kind == "done":
                others = self._runs.get(str(message.get("run")), ())
                self._runs[str(message.get("run"))] = tuple(other for other in others if other != rank)
            if kind not in ("beat", "leaving"):
                self._tell({**message, "pod": rank})

    def _lose(self, rank: int, why: str) -> None:
        wire = self._agents.pop(rank)
        self._forget(wire)
        with self._lock:
            self._lost[rank] = why
            self._lock.notify_all()
        say(f"the agent of {self._labels[rank]} is gone: {why}")
        if self._client is not None and any(rank in pods for pods in self._runs.values()):
            self._tell_lost(rank, why)

    def _tell_lost(self, rank: int, why: str) -> None:
        """Say that a pod is gone, and by which node's fault, if by one's."""
        self._tell({"kind": "lost", "pod": rank, "text": why, "node": self._nodes.get(rank, "")})

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._client is not None:
            self._client.send(message)

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._unix.accept()
            if self._client is not None:  # one run after the other: the former one has been killed
                self._client_lost()
            wire = self._client = Wire(accepted)
            wire.trusted = True
            self._add(wire, lambda: self._asked(wire))

    def _asked(self, wire: Wire) -> None:
        wire.flush()
        for message in wire.read():
            if message["kind"] == "run":
                self._run(message)
            elif message["kind"] == "kill":
                self._kill(str(message["run"]))

    def _run(self, message: Mapping[str, Any]) -> None:
        run_id, others = str(message["run"]), range(1, int(message["pods"]))
        wanted: Mapping[str, str] = message["env"]
        planned = [
            name
            for name, value in planned_variables(self._plans[run_id]).items()
            if wanted.get(name) == value
        ]
        env = {
            name: value
            for name, value in wanted.items()
            if self._base.get(name) != value and name not in planned
        }
        self._tell({"kind": "pods", "labels": list(self.labels)})
        gone = [rank for rank in others if rank not in self._agents]
        for rank in gone:
            self._tell_lost(rank, self._lost.get(rank, "it has never come"))
        if gone:
            return
        self._runs = {run_id: tuple(others)}
        start = {name: message[name] for name in ("run", "pods", "per_pod", "ranks", "argv")}
        for rank in others:
            self._agents[rank].send({"kind": "start", **start, "env": env, "planned": planned})

    def _kill(self, run_id: str) -> None:
        for rank in self._runs.get(run_id, ()):
            if rank in self._agents:
                self._agents[rank].send({"kind": "kill", "run": run_id})

    def _client_lost(self) -> None:
        if self._client is not None:
            self._forget(self._client)
            self._client = None
        for run_id in list(self._runs):
            self._kill(run_id)
        self._runs = {}

    def _farewell(self) -> None:
        deadline = time.monotonic() + FAREWELL_S
        wires = [wire for wire in self._agents.values() if not wire.ended]
        for wire in wires:
            wire.send({"kind": "over", "exit": self._over if self._over is not None else 70})
        while wires and time.monotonic() < deadline:
            for wire in wires:
                wire.flush()
                wire.read()
            wires = [wire for wire in wires if not wire.ended]
            if wires:
                select.select([wire.socket for wire in wires], [], [], 0.2)
        for wire in [*self._agents.values(), *self._strangers]:
            wire.close()
        if self._client is not None:
            self._client.close()


def own_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of a pod's agent that may reach a run's processes: nothing that tells them a place."""
    return {name: value for name, value in environ.items() if name not in FOREIGN_VARIABLES}


def planned_variables(run: RunPlan) -> Dict[str, str]:
    """Return the variables that each agent finds in its own plan: keys and secrets among them go over no network."""
    return {**on_node(run).variables, "MLHPC_SECRET": run.secret}


def _listen(port: int) -> socket.socket:
    """Return a socket that listens at *port* on all addresses.

    Raises:
        OSError: somebody else does.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel may know IPv6 and have it switched off
            made = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
            made.setblocking(False)
            return made
    made = socket.create_server(("", port), backlog=1024)
    made.setblocking(False)
    return made
