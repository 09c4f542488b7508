"""Many agents at once: forked processes that say what a node's agent says, and nothing else; one real leader hears them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time

from pytest_mlhpc.node.agents.hub import FirstNodeNotReached
from pytest_mlhpc.node.agents.wire import Wire, listen
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet.agent import SILENCE_S
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.place import Search, VetPlace, key_of, ports_of
from pytest_mlhpc.node.vet.policy import built_in
from pytest_mlhpc.node.vet.vetting_run import VettingRun

#: Checks of one node, and findings and facts of each: a node with eight devices says about so much.
CHECKS, EACH = 25, 8

#: A guard against hangs, in seconds.
HANG_S = 300.0


def outcome(check: str) -> dict:
    """Return what a check of eight devices says."""
    findings = [Finding(check, Severity.PASS, f"all is well with device {n}", f"gpu{n}") for n in range(EACH)]
    facts = [Fact(check, f"version of {n}", "550.54.15", device=f"gpu{n}") for n in range(EACH)]
    return to_json(CheckOutcome(tuple(findings), facts=tuple(facts), seconds=0.01))


def converse(wire: Wire, rank: int) -> None:
    """Say what an agent says, and obey until all is over."""
    wire.send({"kind": "plan", "boot_id": f"boot-{rank}"})
    for number in range(CHECKS):
        wire.send({"kind": "begun", "what": f"check{number}"})
        wire.send({"kind": "checked", "check": f"check{number}", "outcome": outcome(f"check{number}")})
    wire.send({"kind": "checks_done"})
    while not wire.ended:
        wire.tend(SILENCE_S)
        wire.flush()
        for message in wire.read():
            if message["kind"] == "do":
                wire.send({"kind": "answer", "id": message["id"], "done": True})
            elif message["kind"] == "over":
                return
        time.sleep(0.05)  # the real one waits in a selector; here 256 share two cores


def agent(place: VetPlace, environ: dict[str, str], go: object) -> None:
    """Be one node's agent, once *go* is set."""
    go.wait()
    with contextlib.suppress(FirstNodeNotReached):
        converse(Search(place, key_of(environ), "").meet(HANG_S, lambda: False), place.rank)
    os._exit(0)


def report_to_leader(nodes: int) -> dict[str, object]:
    """Have *nodes* agents report to a leader in this process.

    Return how many of them said all, in which time from the first connection on, with how much computing of the leader; and
    what was wrong.
    """
    environ = {"MLHPC_VET_KEY": secrets.token_hex(8)}
    hosts = tuple(f"n{rank}" for rank in range(nodes))
    context = multiprocessing.get_context("fork")
    go = context.Event()
    places = [VetPlace(rank, nodes, hosts[rank], hosts, ("127.0.0.1",)) for rank in range(nodes)]
    processes = [context.Process(target=agent, args=(place, environ, go)) for place in places[1:]]
    for process in processes:
        process.start()
    ours, theirs = socket.socketpair()
    own = threading.Thread(target=converse, args=(Wire(theirs), 0), daemon=True)
    key = key_of(environ)
    leader = Leader(places[0], key, Wire(ours), listen(ports_of(key)))
    settings = VetSettings(no_load=True, budget_s=HANG_S)
    begun, computed = time.monotonic(), time.process_time()
    own.start()
    go.set()
    course = VettingRun(leader, settings, built_in(), begun=begun, deadline=begun + HANG_S)
    report = course.run()
    seconds, computed = time.monotonic() - begun, time.process_time() - computed
    leader.close()
    for process in processes:
        process.join(10.0)
        process.kill()
    return {
        "reported": sum(len(node.outcomes) == CHECKS + 1 for node in report.nodes),  # and its clock
        "seconds": round(seconds, 2),
        "cpu_seconds": round(computed, 2),
        "troubles": [f"{node.host}: {node.missing}" for node in report.nodes if node.missing],
    }


if __name__ == "__main__":
    found = report_to_leader(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
    sys.stdout.write(json.dumps(found) + "\n")
