"""PAYLOAD. Whether the rendezvous can be found and reached from here: names by getent(1), which can be killed, then TCP.

The engine calls :func:`judge_reach` on every node once the leader listens; the check ``job_names`` asks for names alone.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Tuple

from pytest_mlhpc.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.vet.machine import Machine, Unreadable

#: How long a resolver may take, in seconds: resolv.conf(5) waits 5 s for its first server, so that one is missing by then.
RESOLVE_S = 2.0

#: RFC 1123, 2.1, and underscores, which pods have.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?\Z")


def addresses(machine: Machine, name: str) -> Tuple[str, ...]:
    """Return the addresses that *name* has on this node; none if it is not known here.

    Raises:
        Unreadable: nobody can be asked.
    """
    if _is_address(name):
        return (name,)
    if not _NAME.match(name):
        return ()
    done = machine.command(("getent", "ahosts", name), RESOLVE_S)
    if done.code not in {0, 2}:  # getent(1): 2, the name is not known
        words = (done.errors or done.output).strip()[-200:]
        raise Unreadable(f"getent ahosts {name} failed: {words or done.code}")
    found = (line.split()[0] for line in done.output.splitlines() if line.strip())
    return tuple(dict.fromkeys(found))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(found: Tuple[str, ...]) -> bool:
    """Return whether all of these addresses mean the node itself."""
    return bool(found) and all(_loopback(address) for address in found)


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def reach(address: str, port: int, timeout_s: float) -> str:
    """Return why a TCP connection to *address* and *port* cannot be made, or nothing.

    A refusal counts as an answer: the node is there, and nobody listens yet.
    """
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return ""
    except ConnectionRefusedError:
        return ""
    except socket.timeout:  # not TimeoutError before Python 3.10
        return f"no answer within {timeout_s:g} s: a firewall, or the wrong network"
    except OSError as error:
        return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


def judge_reach(machine: Machine, name: str, port: int, timeout_s: float) -> Finding:
    """Return what this node says of a rendezvous that some process should be listening on, by name and port.

    The finding's check is ``job_rendezvous``; its rule ``rendezvous``. At most ``timeout_s`` for each of two addresses.
    """
    check = "job_rendezvous"
    try:
        found = addresses(machine, name)
    except Unreadable as error:
        return Finding(check, Severity.UNKNOWN, str(error), rule="rendezvous", origin=Origin.USER)
    if not found:
        text = (
            f"the rendezvous name {name!r} is not known on this node: use an address, or the node's full name"
        )
        return Finding(check, Severity.CRITICAL, text, rule="rendezvous", origin=Origin.USER)
    troubles = [f"{address}: {why}" for address in found[:2] for why in [reach(address, port, timeout_s)]]
    if all(trouble.partition(": ")[2] for trouble in troubles):
        text = f"the rendezvous {name} port {port} cannot be reached from this node ({'; '.join(troubles)})"
        return Finding(check, Severity.CRITICAL, text, rule="rendezvous", origin=Origin.USER)
    return Finding(
        check, Severity.PASS, f"the rendezvous {name} answers", rule="rendezvous", origin=Origin.USER
    )
