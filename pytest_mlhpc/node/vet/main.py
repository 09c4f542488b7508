"""One process of a vetting: ``python -m pytest_mlhpc.node.vet.main SETTINGS.json``."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import List, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.agent import Agent, farewell
from pytest_mlhpc.node.vet.checks.job_processes import pids, variables
from pytest_mlhpc.node.vet.finding import Exit
from pytest_mlhpc.node.vet.machine import Machine
from pytest_mlhpc.node.vet.place import WRITE_S, PlaceError, VetPlace, place_of, shared_key
from pytest_mlhpc.node.vet.session import ResultStore, Session, within
from pytest_mlhpc.node.vet.workers import WorkerModules, WorkerSignals, budget_of

#: How long the first task may take to appear, and how often it is looked for, in seconds: srun starts all at once.
APPEARS_S, LOOK_S = 5.0, 0.1


def first_task(machine: Machine) -> Optional[int]:
    """Return the process of our job step's first task on this node, None where there is none (any more)."""
    environ = machine.environ
    step = (environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID"))
    for pid in pids(machine):
        theirs = variables(machine, pid)
        if theirs.get("SLURM_LOCALID") == "0" and step == (
            theirs.get("SLURM_JOB_ID"),
            theirs.get("SLURM_STEP_ID"),
        ):
            return pid
    return None


def stay(environ: Mapping[str, str], most_s: float, machine: Optional[Machine] = None) -> bool:
    """Wait until the first task of this node has ended, *most_s* seconds at most; return whether there was one.

    Without pidfd_open(2) (Linux 5.3, Python 3.9) there is no waiting.
    """
    if not environ.get("SLURM_STEP_ID") or not hasattr(os, "pidfd_open"):
        return False
    machine = machine or Machine(environ=environ)
    deadline = time.monotonic() + min(APPEARS_S, most_s)
    pid = first_task(machine)
    while pid is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)  # nothing tells when another process begins
        pid = first_task(machine)
    if pid is None:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended, or the kernel is old
        return True
    try:
        select.select([descriptor], [], [], max(0.0, most_s))
    finally:
        os.close(descriptor)
    return True


#: How long the folder that all nodes share may take to give the key, in seconds.
KEY_S = 2 * WRITE_S


def run(
    settings: VetSettings,
    environ: Mapping[str, str],
    programs: Optional[WorkerModules] = None,
    memory: Optional[ResultStore] = None,
) -> int:
    """Vet, as one node of those that do; return the exit code. Processes that cannot be ended are left behind.

    Where the leader itself hangs (in writing to a file server, say) this process ends at once, by exit code 4.

    *memory* is asked for earlier results and given this one's, on the first node alone.
    """
    try:
        place = place_of(environ, hosts=settings.hosts, single=settings.single)
    except PlaceError as error:
        _complain(str(error))
        return Exit.USAGE
    if place.extra:
        if settings.wanted.purpose == "job":  # the first one looks at how all tasks of the node are bound
            stay(environ, budget_of(settings))
        return Exit.READY  # another process on this node does it
    if place.rank == 0 and settings.need > place.nodes:
        nodes = "1 node" if place.nodes == 1 else f"{place.nodes} nodes"
        _complain(f"--need {settings.need}, but there is {nodes}{': ' + place.hint if place.hint else ''}")
        return Exit.USAGE
    if place.hint:
        _complain(place.hint)
    try:
        shared, secret = _secret(settings, place, environ)
    except OSError as error:
        _complain(f"the key of this job's processes: {error.filename}: {error.strerror}")
        return Exit.READY if place.rank else Exit.USAGE
    environ = {**environ, **secret}
    signals, chosen = WorkerSignals(), programs or WorkerModules()
    try:
        if place.rank == 0:
            return _lead(settings, place, chosen, signals, environ=environ, memory=memory)
        return _follow(Agent(settings, place, chosen, signals, environ=environ), place, signals)
    finally:
        signals.close()
        if shared and place.rank == 0:
            with contextlib.suppress(OSError):
                Path(shared).unlink()


def _secret(
    settings: VetSettings, place: VetPlace, environ: Mapping[str, str]
) -> Tuple[str, Mapping[str, str]]:
    """Return the file of the secret that all nodes' processes share, and the variable that holds it; neither for one alone.

    Raises:
        OSError: it cannot be had, or is another user's.
    """
    if place.nodes == 1:
        return "", {}
    found = within(KEY_S, lambda: shared_key(environ, settings.out))
    if found is None:
        text = f"no answer within {KEY_S:g} s; look at this file system, or set MLHPC_VET_KEY on all nodes"
        raise OSError(errno.ETIMEDOUT, text, settings.out or ".")
    return found


def _lead(
    settings: VetSettings,
    place: VetPlace,
    programs: WorkerModules,
    signals: WorkerSignals,
    *,
    environ: Mapping[str, str],
    memory: Optional[ResultStore],
) -> int:
    """Be the first node, and conduct."""
    begun = time.monotonic()
    ours, theirs = socket.socketpair()
    session = Session(settings, place, Wire(ours), environ, begun=begun, memory=memory)
    thread = threading.Thread(target=session.run, name="leader", daemon=True)
    thread.start()
    trouble = Agent(settings, place, programs, signals, environ=environ, wire=Wire(theirs)).work()
    if signals.told:
        session.give_up()
        return _told(signals)
    thread.join(max(0.1, begun + budget_of(settings) + session.grace_s - time.monotonic()))
    if session.code is None:
        why = f": {trouble}" if trouble else ""
        _complain(f"the leader did not come to an end in time, {session.stage}{why}")
        leave(Exit.INTERNAL)  # whatever the thread hangs in, it may hold what Python wants before it ends
    return session.code or 0


def _follow(agent: Agent, place: VetPlace, signals: WorkerSignals) -> int:
    """Be a node that is not the first."""
    trouble = agent.work()
    if signals.told:
        return _told(signals)
    if trouble:
        farewell(place, f"{trouble}; the verdict, and the exit code, are the first node's")
    return Exit.READY


def _told(signals: WorkerSignals) -> int:
    _complain(f"ended by {signal.Signals(signals.told).name}: there is no verdict")
    return 128 + signals.told


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(f"mlhpc vet: {text}\n")
        sys.stderr.flush()


def main(
    argv: List[str], programs: Optional[WorkerModules] = None, memory: Optional[ResultStore] = None
) -> int:
    """Read the settings and vet; *programs* and *memory* as of :func:`run`."""
    if len(argv) != 1 or argv[0].startswith("-"):
        _complain("usage: python -m pytest_mlhpc.node.vet.main SETTINGS.json")
        return Exit.USAGE
    try:
        settings = from_json(VetSettings, read_json(Path(argv[0]).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, SchemaError) as error:
        _complain(f"the settings {argv[0]} cannot be used: {error}")
        return Exit.USAGE
    return run(settings, os.environ, programs, memory)


def leave(code: int) -> None:
    """End this process now, with threads and children that hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
