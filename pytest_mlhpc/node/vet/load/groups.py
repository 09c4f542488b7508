"""An exchange by a communication library: each device of one node sums with its like on the other.

A sum over two ranks sends every byte to the other once and receives as many, so size / time is what one direction carries (the
bus bandwidth of nccl-tests for two ranks). All devices are busy at once, and with them all network ports. Gloo has one rank
a node. The library may hang: its calls are made by other threads, and the partner's end is seen by the control link.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.vet.load.devices import Device, LoadNode
from pytest_mlhpc.node.vet.load.link import Deadline, Link, dead, hung
from pytest_mlhpc.node.vet.load.protocol import Failed

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
                    self._look()
                except Failed:
                    self._abandon()
                    raise
        if problems:
            self._control.check()
            raise self._named(problems[0])

    def _look(self) -> None:
        self._control.check()
        if not self._deadline.left:
            raise hung(self._control.partner, self._deadline, "did not exchange")

    def _named(self, error: BaseException) -> BaseException:
        """Return what a library's error means: their words for a partner that has gone, and for one that does not answer."""
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
    options = kind._Options()  # noqa: SLF001 - since torch 1.0 the only way to say which interface
    address = _plain(str(control.socket.getsockname()[0]))  # by which the partner reaches us
    options._devices = [kind.create_device(hostname=address)]  # noqa: SLF001 - as above
    options._timeout = dt.timedelta(seconds=max(1.0, deadline.left))  # noqa: SLF001 - as above
    options._threads = 2  # noqa: SLF001 - as above
    return lambda store, rank: kind(store, rank, 2, options)


def _plain(address: str) -> str:
    """Return an IPv4 address that a socket of both kinds shows as one of IPv6 in its own spelling."""
    return address.removeprefix(_PREFIX)
