"""Pods of one allocation: which one an agent is in, how it finds the first pod, and the first pod's hub.

An agent finds the first pod by its address, with proof that it is the right one. The hub is one thread of that pod's agent: what
other pods' agents (``node/agents/hub.py``) are asked by ``node/batch/podrun.py`` to start, and say. It starts nothing itself: on
its own pod ``podrun`` does. What it hears from other pods about a run goes to the ``podrun`` that asked; when that one is gone,
the run is ended everywhere.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, MutableMapping, Optional, Tuple

from pytest_mlhpc.node.agents.hub import FirstNodeNotReached, FirstNodeRefuses, Hub, find_hub, greeting
from pytest_mlhpc.node.agents.wire import Wire, address_of, key_of, listen
from pytest_mlhpc.node.batch.main import BatchSignals
from pytest_mlhpc.node.batch.runs import FOREIGN_VARIABLES
from pytest_mlhpc.node.batch.vetting import all_runs
from pytest_mlhpc.node.cores import on_node
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.processes import say
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan

#: Port of the first pod's hub unless MLHPC_PORT says otherwise; torchrun's own default, which nobody else uses in a pod.
PORT = 29400

#: How long the pods of one allocation may take to find each other, in seconds, unless MLHPC_MEET_S says otherwise: one may
#: wait for its image while others run.
MEET_S = 900.0

#: After how long without a sign of life an agent counts as gone, in seconds, unless MLHPC_SILENCE_S says otherwise: a node
#: that swaps may stand still for half a minute.
SILENCE_S = 60.0

#: The controller's annotation that tells the other pods where the first is.
LEADER = "pytest-mlhpc/leader"

#: Set for an agent on a node of a job: the file with the environment of the batch (``node/batch/job_nodes.py``).
SHARED = "MLHPC_JOB_ENVIRONMENT"

#: Where the pod's manifest mounts its annotations.
INFO = "/mlhpc/info"


class PlaceUnknown(ValueError):  # noqa: N818 - named for what happened
    """The environment lacks what the pod's manifest should have set; the text says what."""


@dataclass(frozen=True)
class PodPlace:
    """One pod of an allocation, or one node of a job: its ``work`` is then on a disk that all nodes share (``shared``).

    ``work`` is a pod's own disk, ``info`` the folder with its annotations.
    """

    pods: int
    rank: int
    name: str
    ip: str
    node: str
    work: Path
    info: Path
    leader: str = ""
    port: int = PORT
    meet_s: float = MEET_S
    silence_s: float = SILENCE_S
    shared: bool = False

    @property
    def label(self) -> str:
        """The pod's name for people."""
        return label(self.name, self.node)


def label(name: str, node: str) -> str:
    """Return pod and node as one word for people, and for comparisons."""
    return f"{name} (node {node})" if node and node != name else name


def place_of(environ: Mapping[str, str], plan: Plan) -> PodPlace:
    """Return what the variables of the pod's manifest say.

    ``MLHPC_WORK`` and ``MLHPC_INFO`` stand for other folders than the plan's directory and ``/mlhpc/info``.

    Raises:
        PlaceUnknown: a number is missing or wrong.
    """
    pods, rank = _number(environ, "MLHPC_PODS", 1), _rank(environ)
    if pods > 1 and rank is None:
        raise PlaceUnknown(
            f"MLHPC_POD_RANK is not set, but there are {pods} pods: they do not know their places"
        )
    rank = rank or 0
    if pods < 1 or rank >= pods:
        raise PlaceUnknown(f"MLHPC_POD_RANK={rank} and MLHPC_PODS={pods} contradict each other")
    name = environ.get("MLHPC_POD_NAME") or os.uname().nodename
    port = _number(environ, "MLHPC_PORT", PORT)
    if port > 65535:
        raise PlaceUnknown(f"MLHPC_PORT={port} is no port")
    return PodPlace(
        pods=pods,
        rank=rank,
        name=name,
        ip=environ.get("MLHPC_POD_IP", ""),
        node=environ.get("MLHPC_NODE_NAME", ""),
        work=Path(environ.get("MLHPC_WORK") or plan.directory),
        info=Path(environ.get("MLHPC_INFO") or INFO),
        leader=environ.get("MLHPC_LEADER", ""),
        port=port,
        meet_s=float(_number(environ, "MLHPC_MEET_S", int(MEET_S))),
        silence_s=float(_number(environ, "MLHPC_SILENCE_S", int(SILENCE_S))),
        shared=SHARED in environ,
    )


def _rank(environ: Mapping[str, str]) -> Optional[int]:
    """Return this pod's place, None if nothing tells it.

    An operator may add its own variable behind ours: then Kubernetes has left our reference to it as it was.
    """
    text = environ.get("MLHPC_POD_RANK", "")
    other = re.fullmatch(r"\$\((\w+)\)", text)
    name = other.group(1) if other else "MLHPC_POD_RANK"
    return _number(environ, name, 0) if environ.get(name) else None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise PlaceUnknown(f"{name}={text!r:.80} is no number")
    return int(text)


#: Variables that are a node's own; all others an agent takes from the batch.
_OF_NODE = frozenset({"HOST", "HOSTNAME", "TMPDIR", "TMP", "PWD"})


def take_environment(environ: MutableMapping[str, str]) -> None:
    """Replace *environ* by that of the batch, if this is the agent of a job's node: whatever starts it there gives it another.

    Raises:
        OSError: the file cannot be read, or is not this user's alone.
        ValueError: it holds no variables.
    """
    if SHARED not in environ:
        return
    found = read_json(read_private(Path(environ[SHARED])))
    if not isinstance(found, dict):
        raise PlaceUnknown(f"{environ[SHARED]} holds no variables")
    own = {name: value for name, value in environ.items() if name in _OF_NODE or name.startswith("MLHPC_")}
    environ.clear()
    environ.update({**{str(name): str(value) for name, value in found.items()}, **own})


def leader_address(place: PodPlace) -> Tuple[str, int]:
    """Return host and port of the first pod's hub.

    Raises:
        ValueError: the controller has not sent them yet, or what it sent is no address.
    """
    text = place.leader or _annotation(place.info / "annotations", LEADER)
    if not text:
        raise ValueError(f"its address is missing (annotation in {place.info}/annotations, or MLHPC_LEADER)")
    host, port = address_of(text)
    return host, port or place.port


def _annotation(path: Path, name: str) -> str:
    """Return one of the annotations in the file of a downward-API volume (``name="value"``, escaped as in Go)."""
    with contextlib.suppress(OSError):
        text = path.read_bytes()[: 1 << 20].decode("utf-8", "replace")
        found = re.search(rf'^{re.escape(name)}="([^"\\]*)"$', text, re.MULTILINE)
        return found.group(1).strip() if found else ""
    return ""


def settle(plan: Plan, place: PodPlace) -> Plan:
    """Return the plan as it is here, with this pod's own folder for its directory."""
    return replace(plan, directory=str(place.work))


def name_user(environ: MutableMapping[str, str]) -> None:
    """Give the user a name where the image knows none for its number: torch and others ask for it."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        environ.setdefault("USER", "mlhpc")
        environ.setdefault("LOGNAME", "mlhpc")


#: Exit codes of an agent that did not find the others (EX_OSERR of sysexits.h, 4.3BSD), and of one that they refuse.
EXIT_NOT_MET, EXIT_REFUSED = 71, 2

#: Time between two checks for the first pod's address, and two attempts to reach it, in seconds.
LOOK_S = 1.0

#: Longest wait for one connection, in seconds.
CONNECT_S = 10.0


class FirstPodNotFound(RuntimeError):  # noqa: N818 - named for what happened
    """The first pod was not found in time, or does not want this one; ``code`` is the agent's exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def meet(plan: Plan, place: PodPlace, signals: BatchSignals) -> Optional[Wire]:
    """Return the proved connection to the first pod's hub; None if a signal said to end.

    Raises:
        FirstPodNotFound: it was not found within ``place.meet_s``, or refused us.
    """

    def pause() -> bool:
        if select.select([signals.wakeup], [], [], LOOK_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(signals.wakeup, 4096)
        return not signals.stop()

    try:
        return find_hub(
            lambda: [leader_address(place)],
            key_of(plan),
            lambda: greeting(place.rank, place.name, node=place.node),
            limit_s=place.meet_s,
            each_s=CONNECT_S,
            pause=pause,
        )
    except FirstNodeRefuses as error:
        raise FirstPodNotFound(f"the first pod refuses it: {error}", EXIT_REFUSED) from error
    except FirstNodeNotReached as error:
        if signals.stop():
            return None
        raise FirstPodNotFound(f"the first pod was not found {error}", EXIT_NOT_MET) from error


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
