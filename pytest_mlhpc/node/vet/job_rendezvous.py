"""PAYLOAD. Addresses of names, as this node resolves them: by getent(1), which can be killed."""

from __future__ import annotations

import ipaddress
import re
from typing import Tuple

from pytest_mlhpc.node.vet.machine import Machine, Unreadable

#: How long a resolver may take, in seconds: resolv.conf(5) waits 5 s for its first server, so that one is missing by then.
RESOLVE_S = 1.8

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
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified  # 0.0.0.0 as a destination is this node (Linux, ip(7))
