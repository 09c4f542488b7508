"""PAYLOAD. How the agent of another pod finds the first: by its address, and by proof that it is the right one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from typing import Optional

from pytest_mlhpc.node.agents.wire import PROOF_S, Wire, greet, key_of
from pytest_mlhpc.node.batch.main import Signals
from pytest_mlhpc.node.batch.pod_place import Place, PlaceUnknown, leader_address
from pytest_mlhpc.node.protocol.channel import keep_alive, running_payload
from pytest_mlhpc.node.protocol.plan import Plan

#: Exit code of an agent that did not find the others: EX_OSERR of sysexits.h (4.3BSD).
EXIT_NOT_MET = 71

#: Time between two looks for the first pod's address, and two attempts to reach it, in seconds.
LOOK_S = 1.0

#: Longest wait for one connection, in seconds.
CONNECT_S = 10.0


class NotMet(RuntimeError):  # noqa: N818 - what happened, in the words of the flow
    """The first pod was not found in time, or does not want this one; ``code`` is the agent's exit code."""

    def __init__(self, text: str, code: int = EXIT_NOT_MET) -> None:
        super().__init__(text)
        self.code = code


def meet(plan: Plan, place: Place, signals: Signals) -> Optional[Wire]:
    """Return the proved connection to the first pod's hub; None if a signal said to end.

    Raises:
        NotMet: it was not found within ``place.meet_s``, or refused us.
    """
    deadline = time.monotonic() + place.meet_s
    trouble = ""
    while not signals.stop():
        host = ""
        try:
            host, port = leader_address(place)
            if host:
                return _prove(_connect(host, port), plan, place)
            trouble = f"nobody has told its address (annotation in {place.info}/annotations, or MLHPC_LEADER)"
        except (PlaceUnknown, OSError) as error:
            trouble = f"{host or 'address'}: {getattr(error, 'strerror', None) or error}"
        if time.monotonic() >= deadline:
            raise NotMet(f"the first pod was not found within {place.meet_s:g} s: {trouble}")
        _await(signals, LOOK_S)
    return None


def _await(signals: Signals, seconds: float) -> None:
    if select.select([signals.wakeup], [], [], seconds)[0]:
        with contextlib.suppress(BlockingIOError):
            os.read(signals.wakeup, 4096)


def _connect(host: str, port: int) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), CONNECT_S)
    except UnicodeError as error:  # a host name that is none
        raise OSError(str(error)) from error
    keep_alive(connection)
    return connection


def _prove(connection: socket.socket, plan: Plan, place: Place) -> Wire:
    """Show who we are and be shown who answers.

    Raises:
        OSError: it went away, or is not the first pod of this allocation; another attempt may do.
    """
    wire = Wire(connection)
    hello = {"rank": place.rank, "name": place.name, "node": place.node, "payload": running_payload()}
    greet(wire, key_of(plan), lambda: json.dumps(hello), PROOF_S)
    return wire
