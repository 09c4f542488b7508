"""Many agents at once: processes that say what agents of nodes say, each for some nodes; one real leader hears them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time

from pytest_mlhpc.node.agents.hub import FirstNodeNotReached
from pytest_mlhpc.node.agents.wire import Wire, listen
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.vet import vetting_run
from pytest_mlhpc.node.vet.agent import SILENCE_S
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Severity
from pytest_mlhpc.node.vet.judge import judge
from pytest_mlhpc.node.vet.leader import Leader
from pytest_mlhpc.node.vet.place import Search, VetPlace, key_of, ports_of
from pytest_mlhpc.node.vet.policy import built_in
from pytest_mlhpc.node.vet.vetting_run import VettingRun

#: Checks of one node, and findings and facts of each: a node with eight devices says about so much.
CHECKS, EACH = 25, 8

#: A guard against hangs, in seconds.
HANG_S = 600.0

#: Agents of one process. Each has a connection of its own.
OF_ONE_PROCESS = 128


def outcome(check: str) -> dict:
    """Return what a check of eight devices says."""
    findings = [Finding(check, Severity.PASS, f"all is well with device {n}", f"gpu{n}") for n in range(EACH)]
    facts = [Fact(check, f"version of {n}", "550.54.15", device=f"gpu{n}") for n in range(EACH)]
    return to_json(CheckOutcome(tuple(findings), facts=tuple(facts), seconds=0.01))


def report(wire: Wire, rank: int) -> None:
    """Say what the agent of one node says."""
    wire.send({"kind": "plan", "boot_id": f"boot-{rank}"})
    for number in range(CHECKS):
        wire.send({"kind": "begun", "what": f"check{number}"})
        wire.send({"kind": "checked", "check": f"check{number}", "outcome": outcome(f"check{number}")})
    wire.send({"kind": "checks_done"})


def obey(wires: list[Wire]) -> None:
    """Obey and give signs of life, as all these agents, until all is over for each."""
    with selectors.DefaultSelector() as selector:
        left = dict.fromkeys(wires)
        for wire in left:
            selector.register(wire.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)
        beat = 0.0
        while left:
            for key, _ in selector.select(1.0):
                serve(key.data)
                if key.data.ended:
                    selector.unregister(key.data.socket)
                    del left[key.data]
                elif not key.data.waiting:
                    selector.modify(key.data.socket, selectors.EVENT_READ, key.data)
            if time.monotonic() > beat:
                beat = time.monotonic() + 1.0
                for wire in left:
                    wire.tend(SILENCE_S)


def serve(wire: Wire) -> None:
    """Obey what has arrived on one connection."""
    wire.flush()
    for message in wire.read():
        if message["kind"] == "do":
            wire.send({"kind": "answer", "id": message["id"], "done": True})
        elif message["kind"] == "over":
            wire.end("over")


def crowd(places: list[VetPlace], environ: dict[str, str], go: object) -> None:
    """Be the agents of these nodes, once *go* is set."""
    go.wait()
    wires = []
    with contextlib.suppress(FirstNodeNotReached):
        for place in places:
            wire = Search(place, key_of(environ), "").meet(HANG_S, lambda: False)
            report(wire, place.rank)
            wires.append(wire)
            for other in wires:  # while the rest look for the leader
                serve(other)
                other.tend(SILENCE_S)
    obey(wires)
    os._exit(0)


def first_agent(wire: Wire) -> None:
    """Be the agent in the leader's process."""
    report(wire, 0)
    obey([wire])


def report_to_leader(nodes: int) -> dict[str, object]:
    """Have *nodes* agents report to a leader in this process.

    Return how many of them said all, the time from the first connection to the verdict, the computing and memory of the
    leader's process, the nodes that are good, and what was wrong.
    """
    environ = {"MLHPC_VET_KEY": secrets.token_hex(8)}
    hosts = tuple(f"n{rank}" for rank in range(nodes))
    context = multiprocessing.get_context("fork")
    go = context.Event()
    places = [VetPlace(rank, nodes, hosts[rank], hosts, ("127.0.0.1",)) for rank in range(nodes)]
    crowds = [places[start : start + OF_ONE_PROCESS] for start in range(1, nodes, OF_ONE_PROCESS)]
    processes = [context.Process(target=crowd, args=(of_one, environ, go)) for of_one in crowds]
    for process in processes:
        process.start()
    ours, theirs = socket.socketpair()
    own = threading.Thread(target=first_agent, args=(Wire(theirs),), daemon=True)
    key = key_of(environ)
    leader = Leader(places[0], key, Wire(ours), listen(ports_of(key)))
    settings = VetSettings(no_load=True, budget_s=HANG_S)
    begun, computed = time.monotonic(), time.process_time()
    own.start()
    go.set()
    vetting_run.COME_MOST_S = HANG_S  # thousands of agents share this machine's cores with the leader
    course = VettingRun(leader, settings, built_in(), begun=begun, deadline=begun + HANG_S)
    found = course.run()
    verdict = judge(found, settings, built_in())
    seconds, computed = time.monotonic() - begun, time.process_time() - computed
    leader.close()
    for process in processes:
        process.join(10.0)
        process.kill()
    return {
        "reported": sum(len(node.outcomes) == CHECKS + 1 for node in found.nodes),  # and its clock
        "seconds": round(seconds, 2),
        "cpu_seconds": round(computed, 2),
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "good": len(verdict.good),
        "troubles": [f"{node.host}: {node.missing}" for node in found.nodes if node.missing],
    }


if __name__ == "__main__":
    found = report_to_leader(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
    sys.stdout.write(json.dumps(found) + "\n")
