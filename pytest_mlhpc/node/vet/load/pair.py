"""A paired exchange between two nodes: both send to each other at the same time, by TCP or by a communication library.

Arguments: ``address`` and ``port`` of the first; ``first`` says which of both this is; ``bytes`` that each sends; ``rounds`` at least to
measure; ``timeout_s`` for all of it. Optional: ``secret``, a text that only both know; ``backend`` auto, socket, gloo or nccl.
The outcome's one reading is bytes / seconds of all rounds but the first, which warms up (:func:`devices.median_rate`), in B/s: what one
direction carries while both are busy. It is the same on both sides, as the slower side's clock counts.

Errors have a ``why``: *dead* (the partner's process has ended), *hung* (nothing comes), *absent* (it never came), *slow*, *name*,
*port*, *network*, *garbage*, *secret*. None waits longer than ``timeout_s``.

A sum over two ranks sends every byte to the other once and receives as many, so size / time is what one direction carries (the
bus bandwidth of nccl-tests for two ranks). All devices are busy at once, and with them all network ports. Gloo has one rank
a node. The library may hang: its calls are made by other threads, and the control link notices the partner's end.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.load import devices
from pytest_mlhpc.node.vet.load.arguments import ArgumentError, Arguments, Begun, Failed
from pytest_mlhpc.node.vet.load.collectives import gloo_options
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode
from pytest_mlhpc.node.vet.load.link import (
    STREAMS,
    Deadline,
    Door,
    Link,
    Sockets,
    call,
    close_all,
    dead,
    hung,
)

BACKENDS = ("auto", "socket", "gloo", "nccl")

#: Rounds go on for so many seconds, so that a short one is measured often, but there are at most so many.
LEAST_S, MOST_ROUNDS = 0.3, 500

#: Share of the whole time after which no further round begins: both sides need to say what they have.
LATEST = 0.8


class ByteExchange(Protocol):
    """How bytes get across. ``size`` is what each side sends in one exchange."""

    @property
    def size(self) -> int:
        """Return it in bytes."""
        ...

    def exchange(self) -> float:
        """Exchange once and return the seconds."""
        ...


def run(node: LoadNode, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Meet the partner, agree on a way, and measure."""
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
        way: ByteExchange
        if name == "socket":
            way = Sockets(streams, size, deadline, control.partner)
        else:
            way = Groups(name, node, size, deadline, control, first=first)
        seconds = measure(control, way, rounds, deadline, first=first)
    value = devices.median_rate(float(way.size), seconds)
    key = f"pair/{name}/{size >> 10}KiB"
    exam.reading("pair_bandwidth", key, node.models[0], value, round=arguments.round)


def agree(mine: Dict[str, Any], other: Dict[str, Any]) -> str:
    """Return by what both can exchange; the first decides.

    Raises:
        Failed: they received different orders.
    """
    for name in ("size", "backend"):
        if mine[name] != other.get(name):
            raise Failed(
                "garbage",
                f"both sides got different settings: {name} {mine[name]} and {other.get(name)!r:.40}",
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


def measure(control: Link, way: ByteExchange, rounds: int, deadline: Deadline, *, first: bool) -> List[float]:
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


#: How often the partner is looked for while the library works, in seconds.
LOOK_S = 0.05

#: NCCL's own limit, never reached: at its limit torch would end the whole process.
NEVER_S = 86400.0

#: An IPv4 address within IPv6 (RFC 4291, 2.5.5.2).
_PREFIX = "::ffff:"


class Groups:
    """One group of two ranks for each pair of devices.

    Raises:
        Failed: this torch has no such library, or the two do not find each other.
    """

    def __init__(
        self, name: str, node: LoadNode, size: int, deadline: Deadline, control: Link, *, first: bool
    ) -> None:
        self._deadline, self._control = deadline, control
        self._devices: List[Optional[Device]] = list(node.devices) if name == "nccl" else [None]
        each = max(1, size // 4 // max(1, len(self._devices)))
        self.size = each * 4 * len(self._devices)
        make = _maker(name, control, deadline)
        store = self._store(first=first)
        prefixed: Any = getattr(dist, "PrefixStore")  # noqa: B009 - torch exports it without saying so
        self._members: List[Callable[[], None]] = []
        self._groups: List[Any] = []

        def join() -> None:
            for number, device in enumerate(self._devices):
                if device is not None:
                    device.use()
                group = make(prefixed(f"vet{number}", store), 0 if first else 1)
                self._groups.append(group)
                self._members.append(_member(group, device, each))

        self._watched([join])

    def exchange(self) -> float:
        """Sum once over all pairs of devices; return the seconds that it took here.

        Raises:
            Failed: dead or hung.
        """
        began = time.perf_counter()
        self._watched(self._members)
        return time.perf_counter() - began

    def _store(self, *, first: bool) -> Any:
        """Return where ranks find each other: the first node's store, at a port that it tells by the control link."""
        timeout = dt.timedelta(seconds=max(1.0, self._deadline.left))
        store: Any = getattr(dist, "TCPStore")  # noqa: B009 - torch exports it without saying so
        try:
            if first:
                made = store("127.0.0.1", 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
                self._control.send({"store": int(made.port)})
                return made
            port = self._control.receive().get("store")
            if not isinstance(port, int) or not 0 < port < 65536:
                raise Failed("garbage", f"{self._control.partner} named {port!r:.40} as its store's port")
            address = str(self._control.socket.getpeername()[0])
            return store(_plain(address), port, 2, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise Failed("network", f"the two nodes cannot meet at a store: {error}") from error

    def _watched(self, works: List[Callable[[], None]]) -> None:
        """Do *works* in threads; give up on them when the partner has gone or time is over."""
        problems: List[BaseException] = []
        threads = [threading.Thread(target=_guarded, args=(work, problems), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(min(LOOK_S, max(0.001, self._deadline.left)))
                try:
                    self._poll()
                except Failed:
                    self._abandon()
                    raise
        if problems:
            self._control.check()
            raise self._named(problems[0])

    def _poll(self) -> None:
        self._control.check()
        if not self._deadline.left:
            raise hung(self._control.partner, self._deadline, "did not exchange")

    def _named(self, error: BaseException) -> BaseException:
        """Return what a library's error means: their message for a partner that has gone, and for one that does not answer."""
        text = str(error).lower()
        if "closed by peer" in text or "reset by peer" in text or "remote process exited" in text:
            return dead(self._control.partner)
        if "timed out" in text or "timeout" in text:
            return hung(self._control.partner, self._deadline, "did not exchange")
        return error

    def _abandon(self) -> None:
        """Abort the groups, in a thread that keeps them: where nothing can be aborted, it is that thread that hangs."""
        threading.Thread(target=_abort, args=(list(self._groups),), daemon=True).start()


def _guarded(work: Callable[[], None], problems: List[BaseException]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for this one
        problems.append(error)


def _abort(groups: List[Any]) -> None:
    """Abort groups by what this release of torch has for it (1.13 has nothing)."""
    for group in groups:
        names = [name for name in ("abort", "_abort", "_shutdown") if hasattr(group, name)]
        with contextlib.suppress(RuntimeError):
            for name in names[:1]:
                getattr(group, name)()


def _member(group: Any, device: Optional[Device], elements: int) -> Callable[[], None]:
    """Return what takes part in one sum."""
    data: Tensor = torch.zeros(elements, device="cpu" if device is None else device.torch)

    def take_part() -> None:
        if device is not None:
            device.use()
        group.allreduce([data]).wait()
        if device is not None:
            device.module.synchronize(device.ordinal)

    return take_part


def _maker(name: str, control: Link, deadline: Deadline) -> Callable[[Any, int], Any]:
    """Return what makes a group of a store and a rank."""
    kind: Any = getattr(dist, {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}[name], None)
    if kind is None:
        raise Failed("not_supported", f"torch {torch.__version__} is built without {name}")
    if name == "nccl":
        return lambda store, rank: kind(store, rank, 2, dt.timedelta(seconds=NEVER_S))
    address = _plain(str(control.socket.getsockname()[0]))  # by which the partner reaches us
    options = gloo_options(kind, address, max(1.0, deadline.left), threads=2)
    return lambda store, rank: kind(store, rank, 2, options)


def _plain(address: str) -> str:
    """Return an IPv4 address that a socket of both kinds shows as one of IPv6 in its own spelling."""
    return address.removeprefix(_PREFIX)
