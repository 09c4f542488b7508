"""Which pod of how many an agent is in, and how it finds the first pod: by its address, with proof that it is the right one."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import select
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Mapping, MutableMapping, Optional, Tuple

from pytest_mlhpc.node.agents.hub import FirstNodeNotReached, FirstNodeRefuses, find_hub, greeting
from pytest_mlhpc.node.agents.wire import Wire, address_of, key_of
from pytest_mlhpc.node.batch.main import BatchSignals
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.protocol.plan import Plan

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
