"""The first pod's hub: what other pods' agents (``node/agents/hub.py``) are asked by ``node/batch/podrun.py`` to start, and say.

One thread of the first pod's agent. It starts nothing itself: on its own pod ``podrun`` does. What it hears from other pods
about a run goes to the ``podrun`` that asked; when that one is gone, the run is ended everywhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.hub import Hub
from pytest_mlhpc.node.agents.wire import Wire, key_of, listen
from pytest_mlhpc.node.batch.pod_place import PodPlace, label
from pytest_mlhpc.node.batch.runs import FOREIGN_VARIABLES
from pytest_mlhpc.node.batch.vetting import all_runs
from pytest_mlhpc.node.cores import on_node
from pytest_mlhpc.node.processes import say
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan

#: From how many bytes on, waiting for ``podrun`` to take them, agents are not listened to, and theirs for their programs.
FULL = 4 * 1024 * 1024

#: How long agents are given to hear that all is over, in seconds.
FAREWELL_S = 5.0


class PodHub:
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
        self._place, self._base = place, own_variables(environ)
        self._plans = all_runs(plan)
        self._lock = threading.Condition()
        self._labels: Dict[int, str] = {0: place.label}
        self._nodes: Dict[int, str] = {}  #: of those that nobody has asked to leave
        self._lost: Dict[int, str] = {}
        self._client: Optional[Wire] = None
        self._over: Optional[int] = None
        self._runs: Dict[str, Tuple[int, ...]] = {}  #: runs under way -> their other pods
        tcp = listen([place.port])
        self.port: int = tcp.getsockname()[1]
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._unix.bind(self.path)
            self._unix.listen(16)
            self._unix.setblocking(False)
        except OSError:
            tcp.close()
            self._unix.close()
            raise
        self._wake, self._waker = os.pipe()
        self._hub = Hub(self, key_of(plan), place.pods, tcp, place.silence_s)
        self._hub.watch(self._unix.fileno(), self._accept_client)
        self._hub.watch(self._wake, self._woken)
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
    def lost_pods(self) -> Dict[int, str]:
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
            self._unix.close()
            for fd in (self._wake, self._waker):
                os.close(fd)

    def _woken(self) -> None:
        os.read(self._wake, 1)

    def _work(self) -> None:
        try:
            while self._over is None:
                self._hub.turn(1.0)
                self._hub.paused = self._client is not None and self._client.waiting > FULL
                if self._client is not None and self._client.ended:
                    self._client_lost()
        finally:
            client, self._client = self._client, None
            if client is not None:
                self._hub.forget(client)
            self._hub.close({"kind": "over", "exit": 70 if self._over is None else self._over}, FAREWELL_S)

    # --- what the hub asks and says

    def name_of(self, rank: int) -> str:
        """Return pod and node of a rank."""
        return f"pod {rank} ({self._labels.get(rank, '')})"

    def admit(self, rank: int, name: str, hello: Mapping[str, Any], _wire: Wire, /) -> str:
        """Take in a pod's agent; return why not, or nothing."""
        node, refusal = str(hello["node"])[:256], self._hub.other_version(hello)
        if refusal:
            say(f"the agent of {name} is refused: {refusal}")
            return f"protocol_mismatch: {refusal}"
        with self._lock:
            self._lost.pop(rank, None)
            self._labels[rank], self._nodes[rank] = label(name, node), node
            self._lock.notify_all()
        return ""

    def receive(self, rank: int, message: Mapping[str, Any]) -> None:
        """Pass on what an agent says to the ``podrun`` that has asked for it."""
        if message["kind"] == "done":
            run_id = str(message.get("run"))
            self._runs[run_id] = tuple(other for other in self._runs.get(run_id, ()) if other != rank)
        self._tell({**message, "pod": rank})

    def lost(self, rank: int, why: str, left: bool, /) -> None:
        """Note that an agent is gone, and end the run that it had a part in."""
        if left:
            self._nodes[rank] = ""  # whoever ended its pod, the node has done nothing
        with self._lock:
            self._lost[rank] = why
            self._lock.notify_all()
        say(f"the agent of {self._labels[rank]} is gone: {why}")
        if any(rank in pods for pods in self._runs.values()):
            self._tell_lost(rank, why)

    def _tell_lost(self, rank: int, why: str) -> None:
        """Say that a pod is gone, and by which node's fault, if by one's."""
        self._tell({"kind": "lost", "pod": rank, "text": why, "node": self._nodes.get(rank, "")})

    # --- podrun

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._client is not None:
            self._client.send(message)
            self._hub.listen_to(self._client)

    def _accept_client(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self._unix.accept()
            if self._client is not None:  # one run after the other: the former one has been killed
                self._client_lost()
            wire = self._client = Wire(accepted)
            wire.trusted = True
            self._hub.watch(accepted.fileno(), lambda: self._asked(wire))

    def _asked(self, wire: Wire) -> None:
        wire.flush()
        for message in wire.read():
            if message["kind"] == "run":
                self._run(message)
            elif message["kind"] == "kill":
                self._kill(str(message["run"]))
        self._hub.listen_to(wire)

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
        gone = [rank for rank in others if rank not in self._hub.peers]
        for rank in gone:
            self._tell_lost(rank, self._lost.get(rank, "it has never come"))
        if gone:
            return
        self._runs = {run_id: tuple(others)}
        start = {name: message[name] for name in ("run", "pods", "per_pod", "ranks", "argv")}
        for rank in others:
            self._hub.send(rank, {"kind": "start", **start, "env": env, "planned": planned})

    def _kill(self, run_id: str) -> None:
        for rank in self._runs.get(run_id, ()):
            self._hub.send(rank, {"kind": "kill", "run": run_id})

    def _client_lost(self) -> None:
        if self._client is not None:
            self._hub.forget(self._client)
            self._client = None
        for run_id in list(self._runs):
            self._kill(run_id)
        self._runs = {}


def own_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables of a pod's agent that may reach a run's processes: nothing that tells them a place."""
    return {name: value for name, value in environ.items() if name not in FOREIGN_VARIABLES}


def planned_variables(run: RunPlan) -> Dict[str, str]:
    """Return the variables that each agent finds in its own plan: keys and secrets among them go over no network."""
    return {**on_node(run).variables, "MLHPC_SECRET": run.secret}
