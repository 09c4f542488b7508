"""A paired exchange between two nodes: both send to each other at the same time.

Arguments: ``address`` and ``port`` of the first; ``first`` says which of both this is; ``bytes`` that each sends; ``rounds`` at least to
measure; ``timeout_s`` for all of it. Optional: ``secret``, a text that only both know; ``backend`` auto, socket, gloo or nccl.
The outcome's one reading is bytes / seconds of all rounds but the first, which warms up (:func:`told.median_rate`), in B/s: what one
direction carries while both are busy. It is the same on both sides, as the slower side's clock counts.

Errors have a ``why``: *dead* (the partner's process has ended), *hung* (nothing comes), *absent* (it never came), *slow*, *name*,
*port*, *network*, *garbage*, *secret*. None waits longer than ``timeout_s``.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Iterator, List, Protocol, Tuple

from pytest_mlhpc.node.vet.finding import CheckOutcome, Reading
from pytest_mlhpc.node.vet.load import devices
from pytest_mlhpc.node.vet.load.devices import LoadNode
from pytest_mlhpc.node.vet.load.link import STREAMS, Deadline, Door, Link, Sockets, call, close_all
from pytest_mlhpc.node.vet.load.protocol import ArgumentError, Arguments, Begun, Failed

BACKENDS = ("auto", "socket", "gloo", "nccl")

#: Rounds go on for so many seconds, so that a short one is measured often, but there are at most so many.
LEAST_S, MOST_ROUNDS = 0.3, 500

#: Share of the whole time after which no further round begins: both sides need to say what they have.
LATEST = 0.8


class Way(Protocol):
    """How bytes get across. ``size`` is what each side sends in one exchange."""

    @property
    def size(self) -> int:
        """Return it in bytes."""
        ...

    def exchange(self) -> float:
        """Exchange once and return the seconds."""
        ...


def run(node: LoadNode, arguments: Arguments, begun: Begun) -> CheckOutcome:
    """Meet the partner, agree on a way, and measure."""
    began = time.monotonic()
    deadline = Deadline(arguments.number("timeout_s", None, 0.1, 3600.0))
    size = arguments.whole("bytes", None, 1, 1 << 32)
    rounds = arguments.whole("rounds", 3, 1, MOST_ROUNDS)
    backend = arguments.text("backend", "auto")
    if backend not in BACKENDS:
        raise ArgumentError(f"backend is {backend!r}, not one of {', '.join(BACKENDS)}")
    first = arguments.flag("first")
    place = (arguments.text("address", "" if first else None), arguments.whole("port", None, 1, 65535))
    begun(f"pair with {'the partner' if first else place[0]}")
    me = {
        "torch": node.torch,
        "kind": node.kind,
        "devices": len(node.devices),
        "size": size,
        "backend": backend,
    }
    with contextlib.ExitStack() as stack:
        meet = _as_first if first else _as_second
        control, name, streams = stack.enter_context(
            meet(place, arguments.text("secret", "").encode(), me, deadline)
        )
        way: Way
        if name == "socket":
            way = Sockets(streams, size, deadline, control.partner)
        else:
            from pytest_mlhpc.node.vet.load.groups import Groups

            way = Groups(name, node, size, deadline, control, first=first)
        seconds = measure(control, way, rounds, deadline, first=first)
    value = devices.median_rate(float(way.size), seconds)
    key = f"pair/{name}/{size >> 10}KiB"
    reading = Reading("pair", "pair_bandwidth", key, node.models[0], value, "B/s", round=arguments.round)
    return CheckOutcome((), (reading,), seconds=time.monotonic() - began)


def agree(mine: Dict[str, Any], other: Dict[str, Any]) -> str:
    """Return by what both can exchange; the first decides.

    Raises:
        Failed: they were told different things.
    """
    for name in ("size", "backend"):
        if mine[name] != other.get(name):
            raise Failed(
                "garbage",
                f"both sides were told different things: {name} {mine[name]} and {other.get(name)!r:.40}",
            )
    alike = all(mine[name] == other.get(name) for name in ("torch", "kind", "devices"))
    if mine["backend"] in ("gloo", "nccl") and not alike:  # releases of gloo do not understand each other
        raise Failed("garbage", f"{mine['backend']} needs the same torch and devices on both nodes")
    if mine["backend"] != "auto":
        return str(mine["backend"])
    return "nccl" if alike and mine["kind"] in ("cuda", "rocm") else "socket"


Met = Tuple[Link, str, List[Link]]


@contextlib.contextmanager
def _as_first(place: Tuple[str, int], key: bytes, me: Dict[str, Any], deadline: Deadline) -> Iterator[Met]:
    """Wait for the partner, and tell it the way."""
    door, links = Door(place[1]), []
    partner = "the partner"
    try:
        control, hello = door.accept(key, deadline, partner)
        links.append(control)
        name = agree(me, hello)
        control.send({"way": name})
        streams: List[Link] = []
        while name == "socket" and len(streams) < STREAMS:
            link, _ = door.accept(key, deadline, partner)
            links.append(link)
            streams.append(link)
            link.send({"ok": True})
        door.close()
        yield control, name, streams
    finally:
        door.close()
        close_all(links)


@contextlib.contextmanager
def _as_second(place: Tuple[str, int], key: bytes, me: Dict[str, Any], deadline: Deadline) -> Iterator[Met]:
    """Go to the partner, and hear the way."""
    links: List[Link] = []
    try:
        control = call(*place, key, me, deadline)
        links.append(control)
        name = str(control.receive().get("way"))
        streams: List[Link] = []
        while name == "socket" and len(streams) < STREAMS:
            link = call(*place, key, {}, deadline)
            links.append(link)
            streams.append(link)
            link.receive()
        yield control, name, streams
    finally:
        close_all(links)


def measure(control: Link, way: Way, rounds: int, deadline: Deadline, *, first: bool) -> List[float]:
    """Return the seconds of each round, of the slower side. The first says before each whether there is another one.

    Raises:
        Failed: as :mod:`link`; there is not even one round.
    """
    found: List[float] = []
    began = time.monotonic()
    warm = True
    while True:
        if first:
            going = _another(found, rounds, time.monotonic() - began, deadline)
            control.send({"go": going})
        going = bool(control.receive().get("go"))
        if not first:
            control.send({"go": going})
        if not going:
            return found
        mine = way.exchange()
        control.send({"seconds": mine})
        other = control.receive().get("seconds")
        if isinstance(other, bool) or not isinstance(other, (int, float)) or not 0 <= other < 1e6:
            raise Failed("garbage", f"{control.partner} took {other!r:.40} seconds")
        if not warm:
            found.append(max(mine, float(other)))
        warm = False


def _another(found: List[float], rounds: int, spent: float, deadline: Deadline) -> bool:
    """Return whether to do another round: a slow partner gets as many as fit."""
    if not found:
        return True
    if deadline.left - max(found) < (1.0 - LATEST) * deadline.seconds:
        return False
    return len(found) < MOST_ROUNDS and (len(found) < rounds or spent < LEAST_S)
