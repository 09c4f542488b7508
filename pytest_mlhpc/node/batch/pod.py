"""A pod's agent: ``python -m pytest_mlhpc.node.batch.pod PLAN`` is the container's command.

The first pod's agent is the batch: it does all runs of the plan and prints worker lines (``node/batch/pod_stream.py``). With several
pods the others' agents connect to it (``node/batch/pod_hub.py``) and start what it asks for. Everything else goes to
standard error.

Exit code 0: all runs came to their end; 2: the plan, or what the manifest tells of the pod, cannot be used; 69: the
first pod's agent is gone; 70: a defect of ours; 71: the pods did not find each other; 74: what the agent prints is not taken;
143: SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import List, MutableMapping

from pytest_mlhpc.node.agents.nodes import NodesUnknown, reachable_as
from pytest_mlhpc.node.batch.main import (
    EXIT_BUG,
    EXIT_CANNOT_WRITE,
    EXIT_PLAN,
    BatchSignals,
    do_all,
)
from pytest_mlhpc.node.batch.pod_agent import serve
from pytest_mlhpc.node.batch.pod_hub import Hub
from pytest_mlhpc.node.batch.pod_place import EXIT_NOT_MET, PodPlace, name_user, place_of, settle
from pytest_mlhpc.node.batch.pod_stream import PodRelay, PodStream
from pytest_mlhpc.node.batch.runs import Site
from pytest_mlhpc.node.processes import EXIT_TERMINATED, become_subreaper, raise_file_limit, say
from pytest_mlhpc.node.protocol.plan import HELD, Plan, read_plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import staged_sets, unpack

#: How long nothing of what the agent prints may be taken at its end, in seconds: a container runtime that restarts is back
#: before that. And the same where the pod is being deleted: half of Kubernetes' usual grace period of 30 s.
STALLED_S, STALLED_ENDING_S = 300.0, 10.0


def main(arguments: List[str], environ: MutableMapping[str, str]) -> int:
    """Do this pod's part and return the exit code."""
    if len(arguments) != 1:
        say("usage: python -m pytest_mlhpc.node.batch.pod PLAN")
        return EXIT_PLAN
    path = Path(arguments[0]).absolute()
    try:
        plan = read_plan(path, own_disk=True)
        place = place_of(environ, plan)
        plan = settle(plan, place)
        _refuse_held(plan)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        say(f"the plan {path} cannot be used: {error}")
        return EXIT_PLAN
    signals = BatchSignals()
    raise_file_limit(max((run.ranks for run in plan.runs), default=1))
    problem = become_subreaper()
    if problem:
        say(f"orphans cannot be held: {problem}")
    name_user(environ)
    stream = PodStream(os.dup(1))
    os.dup2(2, 1)  # whatever prints by mistake must not damage worker lines
    code = EXIT_BUG
    try:
        code = _do_part(plan, place, path.parent, stream, signals, environ)
    except Exception:  # noqa: BLE001 - whatever it is, what was measured has to go out
        traceback.print_exc()
    ending = STALLED_ENDING_S if signals.stop() else STALLED_S
    if not stream.finish(code, ending) and code == 0:
        say(f"what this pod prints is not taken: {stream.error or f'not a byte in {ending:g} s'}")
        code = EXIT_CANNOT_WRITE
    return EXIT_TERMINATED if signals.stop() and code == 0 else code


def _do_part(  # noqa: PLR0917 - from the plan to the environment
    plan: Plan,
    place: PodPlace,
    config: Path,
    stream: PodStream,
    signals: BatchSignals,
    environ: MutableMapping[str, str],
) -> int:
    try:
        path = _prepare(plan, place, config)
        sockets = _sockets(place)
    except OSError as error:
        say(f"cannot write {error.filename or place.work}: {error.strerror}")
        return EXIT_CANNOT_WRITE
    environ.update(MLHPC_SOCKETS=sockets, MLHPC_PLAN=str(path), MLHPC_NODE=place.label, MLHPC_OWN_DISK="1")
    try:
        relay = PodRelay(stream, plan)
        if place.pods == 1:
            site = Site((place.label,), place.label, lifeline=False, pod=True)
            return do_all(plan, path, relay, signals, site)
        if place.rank:
            return serve(plan, place, stream, signals, environ)
        return _lead(plan, place, relay, signals, sockets)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _lead(plan: Plan, place: PodPlace, relay: PodRelay, signals: BatchSignals, sockets: str) -> int:
    """Wait for the other pods, do all runs with them, and tell them that it is over."""
    code = EXIT_BUG
    try:
        hub = Hub(plan, place, sockets, os.environ)
    except OSError as error:
        text = f"the other pods cannot reach {place.label} at port {place.port}: {error.strerror or error}"
        return _give_up(plan, relay, f"{text}; set MLHPC_PORT to a free one")
    try:
        address = place.ip or reachable_as(os.uname().nodename)[0]
        hub.wait(place.meet_s, signals.stop)
        if signals.stop():
            code = EXIT_TERMINATED
        elif hub.missing:
            code = _give_up(plan, relay, _missing(hub, place))
        else:
            site = Site(hub.labels, place.label, lifeline=False, hub=hub.path, address=address, pod=True)
            code = do_all(plan, path_of(place), relay, signals, site)
    except NodesUnknown as error:
        code = _give_up(plan, relay, str(error))
    finally:
        hub.close(code)
    return code


def _missing(hub: Hub, place: PodPlace) -> str:
    missing = ", ".join(map(str, hub.missing))
    text = f"of {place.pods} pods these did not come to {place.label} within {place.meet_s:g} s: {missing}"
    gone = "; ".join(f"{hub.labels[rank]} came and went: {why}" for rank, why in sorted(hub.lost.items()))
    return f"{text}; {gone}" if gone else text


def _give_up(plan: Plan, relay: PodRelay, text: str) -> int:
    """Tell of every run that it could not begin; return the exit code."""
    say(text)
    for run in plan.runs:
        relay.send(run, "failed", {"outcome": "launch_failed", "text": text, "log": ""})
        relay.send(run, "end", {"exit": []})
    return EXIT_NOT_MET


def _refuse_held(plan: Plan) -> None:
    if any(run.workload == HELD for run in plan.runs):
        raise ValueError("a pod cannot hold nodes for a test: it shares no folder with it")


def path_of(place: PodPlace) -> Path:
    """Return where ranks find the plan."""
    return place.work / "plan.json"


def _prepare(plan: Plan, place: PodPlace, config: Path) -> Path:
    """Write the plan where ranks look for it, and beside it the files of its runs, which *config* has as archives."""
    place.work.mkdir(parents=True, exist_ok=True)
    path = path_of(place)
    path.write_text(json.dumps(to_json(plan)), encoding="utf-8")
    for name in staged_sets(plan):
        unpack(config / f"{name}.tar", place.work / name)
    return path


def _sockets(place: PodPlace) -> str:
    """Return a new private folder with a path short enough for sockets: the root file system may be read-only."""
    short = len(str(place.work)) < 60
    folder = tempfile.mkdtemp(prefix="mlhpc-", dir=str(place.work) if short else None)
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)  # noqa: PTH101 - without the setgid bit that a volume's fsGroup hands down
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
