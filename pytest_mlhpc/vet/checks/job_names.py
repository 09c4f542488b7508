"""PAYLOAD. Names of a job: the rendezvous and this node's own, as this node resolves them."""

from __future__ import annotations

from pytest_mlhpc.vet.check import Context
from pytest_mlhpc.vet.finding import Outcome
from pytest_mlhpc.vet.job_findings import judged, outcome
from pytest_mlhpc.vet.job_rendezvous import addresses, is_loopback
from pytest_mlhpc.vet.machine import Machine


class Names:
    """Whether ranks will find each other by name."""

    name = "job_names"
    level = "quick"
    cost_s = 0.5
    reads = ("MASTER_ADDR", "getent ahosts", "GLOO_SOCKET_IFNAME")
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Resolve the rendezvous (MASTER_ADDR, else the first node), and this node."""
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


CHECKS = (Names(),)
