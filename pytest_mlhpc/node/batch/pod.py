"""A pod's agent: ``python -m pytest_mlhpc.node.batch.pod PLAN`` is the container's command.

It is also the agent of the second and each further node of a job, where ``node/batch/job_nodes.py`` starts it.

The first pod's agent is the batch: it does all runs of the plan and prints worker lines (``node/batch/pod_stream.py``). With several
pods the others' agents connect to it (``node/batch/pod_hub.py``) and start what it asks for. Everything else goes to
standard error.

Exit code 0: all runs came to their end; 2: the plan, or what the manifest tells of the pod, cannot be used; 69: the
first pod's agent is gone; 70: a defect of ours; 71: the pods did not find each other; 74: what the agent prints is not taken;
143: SIGTERM.

Its own output shows what the processes print that it started; the first pod's shows it too, beside that of its own. What
a run's ranks print goes to the first pod by their own connections (``node/protocol/channel.py``).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import selectors
import shutil
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, MutableMapping, Optional, Tuple

from pytest_mlhpc.node.agents.nodes import NodesUnknown, reachable_as
from pytest_mlhpc.node.agents.wire import Wire
from pytest_mlhpc.node.batch.main import (
    EXIT_BUG,
    EXIT_CANNOT_WRITE,
    EXIT_PLAN,
    BatchSignals,
    do_all,
)
from pytest_mlhpc.node.batch.output import LOG_CAP, Lines
from pytest_mlhpc.node.batch.pod_hub import (
    EXIT_NOT_MET,
    SHARED,
    FirstPodNotFound,
    PodHub,
    PodPlace,
    meet,
    name_user,
    own_variables,
    place_of,
    planned_variables,
    settle,
    take_environment,
)
from pytest_mlhpc.node.batch.pod_stream import LogSource, PodRelay, PodStream, tags
from pytest_mlhpc.node.batch.podrun import Share, Tasks
from pytest_mlhpc.node.batch.runs import Site
from pytest_mlhpc.node.batch.vetting import all_runs
from pytest_mlhpc.node.batch.warm import WarmRanks, warm_ranks
from pytest_mlhpc.node.processes import (
    EXIT_TERMINATED,
    CappedLog,
    end_descendants,
    raise_file_limit,
    reap,
    say,
)
from pytest_mlhpc.node.protocol.plan import HELD, Plan, RunPlan, read_plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import link_files, packed_sets, unpack

EXIT_LEADER_GONE = 69

#: Time between SIGTERM and SIGKILL for the processes of a run, in seconds; when the pod itself is ended, less.
GRACE_S, GRACE_ENDING_S = 5.0, 1.0

#: From how many bytes on, waiting for the first pod to take them, programs are not listened to.
FULL = 1024 * 1024


def serve(
    plan: Plan, place: PodPlace, stream: PodStream, signals: BatchSignals, environ: Mapping[str, str]
) -> int:
    """Do what the first pod says until it says that all is over; return the exit code."""
    try:
        wire = meet(plan, place, signals)
    except FirstPodNotFound as error:
        say(f"pod {place.rank} ({place.label}): {error}")
        return error.code
    if wire is None:
        return EXIT_TERMINATED
    say(f"pod {place.rank} ({place.label}): found the first pod")
    try:
        return PodAgent(plan, place, wire, stream, signals=signals, environ=environ).work()
    finally:
        wire.close()


class PodAgent:
    """Serves the first pod."""

    def __init__(
        self,
        plan: Plan,
        place: PodPlace,
        wire: Wire,
        stream: PodStream,
        *,
        signals: BatchSignals,
        environ: Mapping[str, str],
    ) -> None:
        self._place, self._wire, self._stream, self._signals = place, wire, stream, signals
        self._runs = all_runs(plan)
        #: The controller knows the runs of the plan alone: no other may have a tag that is taken for one of theirs.
        self._tags = {**{name: name for name in self._runs}, **tags([run.run_id for run in plan.runs])}
        self._environ = own_variables(environ)
        self._code: Optional[int] = None
        self._tasks: Optional[Tasks] = None
        self._log: Optional[CappedLog] = None
        self._pipe = -1

    def work(self) -> int:
        """Stay until all is over; return the exit code."""
        try:
            while self._code is None:
                self._wait()
                self._turn()
        finally:
            end_descendants(os.getpid(), GRACE_ENDING_S, self._signals.wakeup)
            self._end_run(reported=False)
        return self._code

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wakeup, selectors.EVENT_READ)
            writing = selectors.EVENT_WRITE if self._wire.waiting else 0
            selector.register(self._wire.socket, selectors.EVENT_READ | writing)
            if self._pipe >= 0 and self._wire.waiting < FULL:
                selector.register(self._pipe, selectors.EVENT_READ)
            selector.select(0 if self._wire.arrived else 1.0)

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals.wakeup, 4096)
        if self._signals.stop():
            self._wire.send({"kind": "leaving", "text": "its pod is being ended (SIGTERM)"})
            self._code = EXIT_TERMINATED
            return
        self._wire.flush()
        for message in self._wire.read():
            self._handle(message)
        if self._code is not None:
            return
        self._wire.tend(self._place.silence_s)
        if self._wire.ended:
            say(
                f"pod {self._place.rank} ({self._place.label}): the first pod's agent is gone: {self._wire.ended}"
            )
            self._code = EXIT_LEADER_GONE
            return
        if self._wire.waiting < FULL:
            self._read_output(reads=4)
        self._note(reap())

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(message)
        elif kind == "kill":
            if self._tasks is not None and self._tasks.share.run_id == message.get("run"):
                self._note(end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)[0])
        elif kind == "over":
            code = message.get("exit")
            self._code = code if isinstance(code, int) else EXIT_LEADER_GONE

    def _start(self, message: Mapping[str, Any]) -> None:
        run = self._runs.get(str(message["run"]))
        if run is None:
            self._wire.send({"kind": "refused", "run": message["run"], "text": "its plan has no such run"})
            return
        end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)  # what a former run may have left
        numbers: Tuple[int, int] = (int(message["pods"]), int(message["per_pod"]))
        share = Share(run.run_id, self._place.rank, *numbers, bool(message["ranks"]), tuple(message["argv"]))
        folder = self._place.work / run.run_id
        try:
            if not self._place.shared:
                folder.mkdir(parents=True, exist_ok=True)
                link_files(run, self._place.work, folder)
            self._open_log(run, folder)
            reading, writing = os.pipe()
        except OSError as error:
            self._refuse(run, f"cannot write {error.filename or folder}: {error.strerror}")
            return
        os.set_blocking(reading, False)
        self._pipe = reading
        cwd = run.cwd if run.workload == "command" and run.cwd else str(folder)
        try:
            self._tasks = Tasks(share, self._environment(run, message), cwd, writing)
        finally:
            os.close(writing)
        if self._tasks.error:
            self._refuse(run, self._tasks.error)
        else:
            self._wire.send({"kind": "started", "run": run.run_id})

    def _refuse(self, run: RunPlan, text: str) -> None:
        self._wire.send({"kind": "refused", "run": run.run_id, "text": text})
        end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)
        self._end_run(reported=False)
        self._wire.send({"kind": "done", "run": run.run_id})

    def _open_log(self, run: RunPlan, folder: Path) -> None:
        name = f"pod{self._place.rank}"
        path = folder / f"{name}.log"
        with contextlib.suppress(FileNotFoundError):  # of a first start of this run
            path.unlink()
        self._log = CappedLog(path, LOG_CAP)
        self._stream.open(LogSource(run, self._tags[run.run_id], name, self._log))

    def _environment(self, run: RunPlan, message: Mapping[str, Any]) -> Dict[str, str]:
        """Return the run's variables over our own: devices, names and folders are this pod's."""
        planned = planned_variables(run)
        found = {**self._environ, **{name: planned[name] for name in message["planned"]}, **message["env"]}
        for name in ("MLHPC_PLAN", "MLHPC_NODE", "MLHPC_SOCKETS"):
            if name in self._environ:
                found[name] = self._environ[name]
        return found

    def _read_output(self, reads: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(reads if self._pipe >= 0 else 0):
                data = os.read(self._pipe, 1 << 16)
                if not data:
                    os.close(self._pipe)
                    self._pipe = -1
                    return
                self._printed(data)

    def _printed(self, data: bytes) -> None:
        log = self._log
        if log is None or self._tasks is None:
            return
        before = log.written
        with contextlib.suppress(OSError):  # the disk is full; the first pod gets what it would have had
            log.write(data)
            data = data[: log.written - before]
        if data:
            text = base64.b64encode(data).decode("ascii")
            self._wire.send({"kind": "output", "run": self._tasks.share.run_id, "data": text})

    def _note(self, ended: Mapping[int, int]) -> None:
        if self._tasks is None:
            return
        exits = list(self._tasks.note(ended))
        if exits:
            self._read_output(reads=64)  # what they said before they ended
        for one in exits:
            body = {"task": one.task, "code": one.code, "memory": one.memory}
            self._wire.send({"kind": "exit", "run": self._tasks.share.run_id, **body})
        if not self._tasks.running:
            end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)
            self._read_output(reads=64)
            run_id, dropped = self._tasks.share.run_id, self._log.dropped if self._log is not None else 0
            self._end_run(reported=True)
            self._wire.send({"kind": "done", "run": run_id, "dropped": dropped})

    def _end_run(self, *, reported: bool) -> None:
        """Give back what a run has taken; *reported*: its log is whole."""
        if self._log is not None:
            self._log.close()
        if self._pipe >= 0:
            os.close(self._pipe)
        if self._tasks is not None and reported:
            self._stream.end(self._runs[self._tasks.share.run_id])
        self._tasks, self._log, self._pipe = None, None, -1


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
        take_environment(environ)
        plan = read_plan(path, own_disk=SHARED not in environ)
        place = place_of(environ, plan)
        plan = settle(plan, place)
        _refuse_test_nodes(plan)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        say(f"the plan {path} cannot be used: {error}")
        return EXIT_PLAN
    signals = BatchSignals()
    raise_file_limit(max((run.ranks for run in plan.runs), default=1))
    name_user(environ)
    # What the processes of a job's node print goes to the first node alone.
    stream = PodStream(os.open(os.devnull, os.O_WRONLY) if place.shared else os.dup(1))
    os.dup2(2, 1)  # whatever prints by mistake must not damage worker lines
    code = EXIT_BUG
    try:
        with warm_ranks() as warm:
            code = _do_part(plan, place, path.parent, stream, signals, environ, warm)
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
    warm: Optional[WarmRanks],
) -> int:
    try:
        path = _prepare(plan, place, config)
        sockets = _sockets(place)
    except OSError as error:
        doing = "find" if error.errno == errno.ENOENT else "write"
        say(f"cannot {doing} {error.filename or place.work}: {error.strerror}")
        return EXIT_CANNOT_WRITE
    environ.update(MLHPC_SOCKETS=sockets, MLHPC_PLAN=str(path), MLHPC_NODE=place.label)
    if not place.shared:
        environ["MLHPC_OWN_DISK"] = "1"
    try:
        relay = PodRelay(stream, plan)
        if place.pods == 1:
            site = Site((place.label,), place.label, lifeline=False, pod=True, warm=warm)
            return do_all(plan, path, relay, signals, site)
        if place.rank:
            return serve(plan, place, stream, signals, environ)
        return _lead(plan, place, relay, signals, sockets, warm)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _lead(  # noqa: PLR0917 - from the plan to what forks its ranks
    plan: Plan,
    place: PodPlace,
    relay: PodRelay,
    signals: BatchSignals,
    sockets: str,
    warm: Optional[WarmRanks],
) -> int:
    """Wait for the other pods, do all runs with them, and tell them that it is over."""
    code = EXIT_BUG
    try:
        hub = PodHub(plan, place, sockets, os.environ)
    except OSError as error:
        text = f"the other pods cannot reach {place.label} at port {place.port}: {error.strerror or error}"
        return give_up(plan, relay, f"{text}; set MLHPC_PORT to a free one")
    try:
        address = place.ip or reachable_as(os.uname().nodename)[0]
        hub.wait(place.meet_s, signals.stop)
        if signals.stop():
            code = EXIT_TERMINATED
        elif hub.missing:
            code = give_up(plan, relay, missing_pods(hub, place))
        else:
            site = Site(hub.labels, place.label, lifeline=False, hub=hub.path, address=address, pod=True)
            code = do_all(plan, path_of(place), relay, signals, replace(site, warm=warm))
    except NodesUnknown as error:
        code = give_up(plan, relay, str(error))
    finally:
        hub.close(code)
    return code


def missing_pods(hub: PodHub, place: PodPlace) -> str:
    """Return which pods have not come to *hub*, and why some that came are gone."""
    missing = ", ".join(map(str, hub.missing))
    text = f"of {place.pods} pods these did not come to {place.label} within {place.meet_s:g} s: {missing}"
    gone = "; ".join(
        f"{hub.labels[rank]} came and went: {why}" for rank, why in sorted(hub.lost_pods.items())
    )
    return f"{text}; {gone}" if gone else text


def give_up(plan: Plan, relay: Lines, text: str) -> int:
    """Tell of every run that it could not begin; return the exit code."""
    say(text)
    for run in plan.runs:
        relay.send(run, "failed", {"outcome": "launch_failed", "text": text, "log": ""})
        relay.send(run, "end", {"exit": []})
    return EXIT_NOT_MET


def _refuse_test_nodes(plan: Plan) -> None:
    if any(run.workload == HELD for run in plan.runs):
        raise ValueError("a pod cannot hold nodes for a test: it shares no folder with it")


def path_of(place: PodPlace) -> Path:
    """Return where ranks find the plan."""
    return place.work / "plan.json"


def _prepare(plan: Plan, place: PodPlace, config: Path) -> Path:
    """Write the plan where ranks look for it, and beside it the files of its runs, which *config* has as archives."""
    path = path_of(place)
    if place.shared:
        return path
    place.work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(plan)), encoding="utf-8")
    for name in packed_sets(plan):
        unpack(config / f"{name}.tar", place.work / name)
    for name, folder in plan.on_volume.items():
        if not Path(folder).is_dir():
            raise FileNotFoundError(errno.ENOENT, "the files of the tests are not on this volume", folder)
        if not (place.work / name).is_symlink():
            (place.work / name).symlink_to(folder)
    return path


def _sockets(place: PodPlace) -> str:
    """Return a new private folder with a path short enough for sockets: the root file system may be read-only."""
    short = len(str(place.work)) < 60 and not place.shared  # not every network disk holds sockets
    folder = tempfile.mkdtemp(prefix="mlhpc-", dir=str(place.work) if short else None)
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)  # noqa: PTH101 - without the setgid bit that a volume's fsGroup hands down
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
