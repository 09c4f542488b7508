"""Names of a job: the rendezvous and this node's own, as this node resolves and reaches them."""

from __future__ import annotations

import ipaddress
import re
from typing import Tuple

from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding
from pytest_mlhpc.node.vet.machine import Context, Machine, Unreadable, is_number, judged, outcome

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


#: Where ranks meet unless MASTER_PORT says otherwise. Source: torchrun, --master-port.
PORT = 29500

#: How long an address may take to answer, in seconds, and how many of a name's are tried.
ANSWER_S, MOST = 0.8, 2


class Names:
    """Whether ranks will find each other by name."""

    name = "job_names"
    level = "quick"
    cost_s = 1.5
    reads = ("MASTER_ADDR", "MASTER_PORT", "getent ahosts", "a TCP connection", "GLOO_SOCKET_IFNAME")
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Resolve and reach the rendezvous (MASTER_ADDR, else the first node), and resolve this node."""
        master = (
            machine.environ.get("MASTER_ADDR") or (context.hosts[0] if context.hosts else "") or context.host
        )
        several = len(context.hosts) > 1
        found = addresses(machine, master)
        said = judged(
            self.name,
            context.policy,
            "job.name_unresolved",
            int(not found),
            f"the rendezvous {master!r} is not known here: torch would wait until its time limit; use an address, "
            "or a name that every node knows",
        )
        said += judged(
            self.name,
            context.policy,
            "job.name_loopback",
            int(several and is_loopback(found) and master != context.host),
            f"the rendezvous {master!r} means each node itself ({', '.join(found[:2])}): MASTER_ADDR has to be the first node",
        )
        said += _reached(self.name, machine, context, master, found)
        own = addresses(machine, context.host) if several and context.host else ()
        said += judged(
            self.name,
            context.policy,
            "job.own_name_loopback",
            int(is_loopback(own) and not machine.environ.get("GLOO_SOCKET_IFNAME")),
            f"{context.host} is {', '.join(own[:2])} to itself, so that gloo would listen where no other node comes: "
            "set GLOO_SOCKET_IFNAME",
        )
        return outcome(self.name, said, f"{master} is {', '.join(found[:2])}")


def _reached(
    check: str, machine: Machine, context: Context, master: str, found: Tuple[str, ...]
) -> Tuple[Finding, ...]:
    """Return what is wrong with connections to the rendezvous: no address answers, or its port is taken already."""
    port = machine.environ.get("MASTER_PORT", "")
    number = int(port) if is_number(port) and 0 < int(port) < 65536 else PORT
    answers = [_answer(machine, address, number) for address in found[:MOST]]
    troubles = [why for _, why in answers if why]
    listens = any(there for there, _ in answers)
    silent = bool(troubles) and len(troubles) == len(found[:MOST])
    return (
        *judged(
            check,
            context.policy,
            "job.rendezvous",
            int(silent),
            f"the rendezvous {master} port {number} cannot be reached from this node ({'; '.join(troubles)}): "
            "a firewall, or the address of another network",
        ),
        *judged(
            check,
            context.policy,
            "job.port_taken",
            int(listens),
            f"somebody listens on port {number} of the rendezvous {master} already, so that the job could not: "
            "choose another MASTER_PORT, or end what an earlier job left",
        ),
    )


def _answer(machine: Machine, address: str, port: int) -> Tuple[bool, str]:
    """Return whether somebody listens there, and why nobody answers."""
    try:
        return machine.connect(address, port, ANSWER_S), ""
    except Unreadable as error:
        return False, str(error)


CHECKS = (Names(),)
