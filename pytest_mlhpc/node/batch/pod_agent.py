"""The agent of a pod that is not the first: finds the first, starts what it asks for, ends what it says is over.

Its own output shows what the processes print that it started; the first pod's shows it too, beside that of its own. What
a run's ranks print goes to the first pod by their own connections (``node/protocol/channel.py``).
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from pytest_mlhpc.node.agents.wire import BEAT_S, Wire
from pytest_mlhpc.node.batch.main import BatchSignals
from pytest_mlhpc.node.batch.output import LOG_CAP
from pytest_mlhpc.node.batch.pod_hub import own_variables, planned_variables
from pytest_mlhpc.node.batch.pod_place import FirstPodNotFound, PodPlace, meet
from pytest_mlhpc.node.batch.pod_stream import LogSource, PodStream, tags
from pytest_mlhpc.node.batch.podrun import Share, Tasks
from pytest_mlhpc.node.batch.vetting import all_runs
from pytest_mlhpc.node.processes import EXIT_TERMINATED, CappedLog, end_descendants, reap, say
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.run_files import link_files

EXIT_LEADER_GONE, EXIT_REFUSED = 69, 2

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
        self._tags = tags(list(self._runs))
        self._environ = own_variables(environ)
        self._code: Optional[int] = None
        self._tasks: Optional[Tasks] = None
        self._log: Optional[CappedLog] = None
        self._pipe = -1
        self._next_beat = 0.0

    def work(self) -> int:
        """Stay until all is over; return the exit code."""
        try:
            while self._code is None:
                self._wait()
                self._turn()
        finally:
            end_descendants(os.getpid(), GRACE_ENDING_S, self._signals.wakeup)
            self._end_run(told=False)
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
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + min(BEAT_S, self._place.silence_s / 3)
            self._wire.send({"kind": "beat"})
        self._wire.flush()
        for message in self._wire.read():
            self._hear(message)
        if self._code is not None:
            return
        if now - self._wire.heard > self._place.silence_s:
            self._wire.end(f"no sign of life for {self._place.silence_s:g} s")
        if self._wire.ended:
            say(
                f"pod {self._place.rank} ({self._place.label}): the first pod's agent is gone: {self._wire.ended}"
            )
            self._code = EXIT_LEADER_GONE
            return
        if self._wire.waiting < FULL:
            self._read_output(reads=4)
        self._note(reap())

    def _hear(self, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(message)
        elif kind == "kill":
            if self._tasks is not None and self._tasks.share.run_id == message.get("run"):
                self._note(end_descendants(os.getpid(), GRACE_S, self._signals.wakeup)[0])
        elif kind == "refused":
            say(
                f"pod {self._place.rank} ({self._place.label}): the first pod refuses it: {message.get('text')}"
            )
            self._code = EXIT_REFUSED
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
        self._end_run(told=False)
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
            self._end_run(told=True)
            self._wire.send({"kind": "done", "run": run_id, "dropped": dropped})

    def _end_run(self, *, told: bool) -> None:
        """Give back what a run has taken; *told*: its log is whole."""
        if self._log is not None:
            self._log.close()
        if self._pipe >= 0:
            os.close(self._pipe)
        if self._tasks is not None and told:
            self._stream.end(self._runs[self._tasks.share.run_id])
        self._tasks, self._log, self._pipe = None, None, -1
