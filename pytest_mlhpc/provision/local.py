"""Provisioner `local`: this machine, one process tree for each allocation, measured runs one after another."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.payload import payload_path
from pytest_mlhpc.provision import guardian
from pytest_mlhpc.provision.base import AllocationEnded, Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.device_lock import DeviceLock, lock_directory
from pytest_mlhpc.provision.local_batch import start_batch
from pytest_mlhpc.provision.local_command import CommandProcess, start_command
from pytest_mlhpc.provision.local_process import LocalProcess, no_room
from pytest_mlhpc.provision.messages import result_message, run_message
from pytest_mlhpc.provision.plans import write_private
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.results.store import make_directories

#: How often a lock that another session holds is tried, in seconds: flock(2) tells nobody that it became free.
TRY_LOCK_S = 0.25

#: How often a process is looked at on kernels without pidfd (before Linux 5.3), in seconds.
LOOK_S = 0.05


@dataclass
class _Allocation:
    handle: Handle
    plan: Plan
    lock: DeviceLock
    reason: str = ""
    process: LocalProcess | None = None
    watched: list[int] = field(default_factory=list)


class LocalProvisioner:
    """Runs plans on this machine. Everything started here ends with this object, or with this process.

    Args:
        state_dir: where the payload lies.
        session_id: goes as ``MLHPC_SESSION`` into the environment of all that is started.
    """

    def __init__(self, *, state_dir: Path, session_id: str) -> None:
        self._state_dir = state_dir
        self._session_id = session_id
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._waiting: collections.deque[_Allocation] = collections.deque()
        self._running: dict[str, _Allocation] = {}
        self._found: list[Event] = []
        self._guardian: subprocess.Popen[bytes] | None = None
        self._closed = False

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run on this machine, or an empty string."""
        nodes = spec.target.partition.nodes
        if spec.nodes != 1:
            return f"{spec.nodes} nodes are wanted, this machine is one"
        units = nodes.devices or nodes.cores
        if spec.workload != "command" and spec.ranks > units:
            return f"{spec.ranks} ranks are wanted, this machine has {units} {'devices' if nodes.devices else 'cores'}"
        return ""

    def longest(self) -> float | None:
        """Return None: this machine gives any time."""
        return None

    def submit(self, plan: Plan) -> Handle:
        """Start *plan*, or queue it until its devices, or its place beside others, are free.

        Raises:
            ProvisionError: ``disk_full`` or ``launch_failed``; nothing is left of it.
        """
        directory = Path(plan.directory)
        try:
            make_directories(directory.parent, self._state_dir)  # others of a group may share it
            directory.mkdir(parents=True, exist_ok=True)
            write_private(directory / "plan.json", json.dumps(to_json(plan)), new=True)
        except OSError as error:
            raise ProvisionError("disk_full", no_room(error, directory)) from error
        self._guard()
        allocation = _Allocation(
            Handle(plan.allocation_id, directory), plan, DeviceLock(lock_directory(os.environ))
        )
        self._waiting.append(allocation)
        self._start_waiting()
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = time.monotonic() + timeout_s
        woken = False
        while True:
            self._start_waiting()
            self._keep_time()
            if self._found or woken or time.monotonic() >= until:
                found, self._found = self._found, []
                return found
            for key, _ in self._selector.select(max(0.0, min(until, self._next_look()) - time.monotonic())):
                if key.data is None:
                    woken = True
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._hear(key.data, key.fd)

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads. Harmless after close."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # full: it is awake already
                os.write(self._wake_write, b"w")

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Refuse: nothing outlives the session that started it here.

        Raises:
            ProvisionError: always.
        """
        del native_id
        raise ProvisionError(
            "rejected", f"{plan.allocation_id}: nothing on this machine outlives its session"
        )

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Nothing to do: here no runs share an allocation."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """End the allocations and everything in them; that is always sure here."""
        for handle in handles:
            if (running := self._running.get(handle.id)) is not None and running.process is not None:
                running.process.tell(signal.SIGTERM)  # all at once: they use the same time to end
        for handle in handles:
            self._cancel(handle)
        return []

    def _cancel(self, handle: Handle) -> None:
        for allocation in [one for one in self._waiting if one.handle.id == handle.id]:
            self._waiting.remove(allocation)
            allocation.lock.release()
        running = self._running.get(handle.id)
        if running is not None and running.process is not None:
            running.process.cancel()
            self._forget(running)
        self._found = [event for event in self._found if event.handle.id != handle.id]

    def close(self) -> None:
        """Cancel what is left; the guardian, told to end, looks once more for anything of this session."""
        if self._closed:
            return
        for allocation in self._waiting:
            allocation.lock.release()
        self._waiting.clear()
        self.cancel([allocation.handle for allocation in self._running.values()])
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()
        self._closed = True
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _guard(self) -> None:
        """Start the guardian if there is none, also where somebody ended it."""
        if self._guardian is not None and self._guardian.poll() is None:
            return
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, self._session_id, guardian.socket_base()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ProvisionError("launch_failed", f"cannot start the guardian: {error}") from error

    def _start_waiting(self) -> None:
        """Start what waits, in order. Who has to wait holds up all that come later.

        Only what is not measured goes past runs that wait for devices: these locks mean nothing to it.
        """
        devices_wait = False
        for allocation in list(self._waiting):
            owns, devices = _wants(allocation.plan)
            if owns and devices_wait:
                if devices:
                    continue
                return
            try:
                reason = allocation.lock.acquire(devices) if owns else allocation.lock.share()
            except ProvisionError as error:
                self._waiting.remove(allocation)
                self._found.append(AllocationEnded(allocation.handle, error))
                continue
            if not reason:
                self._waiting.remove(allocation)
                self._start(allocation)
                continue
            if reason != allocation.reason:
                allocation.reason = reason
                self._found.append(StateChanged(allocation.handle, JobState.QUEUED, reason))
            if not devices:
                return
            devices_wait = True

    def _start(self, allocation: _Allocation) -> None:
        handle = allocation.handle
        try:
            process = self._launch(allocation)
        except ProvisionError as error:
            allocation.lock.release()
            self._found.append(AllocationEnded(handle, error))
            return
        if process is None:
            allocation.lock.release()
            self._found.append(AllocationEnded(handle))
            return
        allocation.process = process
        self._running[handle.id] = allocation
        self._found.append(StateChanged(handle, JobState.RUNNING, nodes=(os.uname().nodename,)))
        if isinstance(process, CommandProcess):
            self._found.append(LineArrived(handle, process.started()))
        for fd in (process.output, process.pidfd):
            if fd >= 0:
                self._selector.register(fd, selectors.EVENT_READ, allocation)
                allocation.watched.append(fd)

    def _launch(self, allocation: _Allocation) -> LocalProcess | None:
        """Start a program or a batch; None after having told why the program of a run cannot be started."""
        plan = allocation.plan
        run = plan.runs[0]
        environment = {
            **os.environ,
            **run.variables,  # runs of one allocation are of one environment
            "MLHPC_SESSION": self._session_id,
            "MLHPC_ALLOCATION": plan.allocation_id,
            "MLHPC_RUN": run.run_id,
        }
        if len(plan.runs) > 1 or run.workload != "command" or run.launcher != "plain":
            return start_batch(plan, environment, payload_path(self._state_dir, plan.payload_sha256))
        started = start_command(plan, environment)
        if isinstance(started, CommandProcess):
            return started
        code = 127  # what a shell answers here
        for message in (result_message(run, started), run_message(run, "end", {"exit": [code]})):
            self._found.append(LineArrived(allocation.handle, message))
        return None

    def _hear(self, allocation: _Allocation, fd: int) -> None:
        process = allocation.process
        if process is None or allocation.handle.id not in self._running:
            return  # ended by what was heard a moment ago
        if fd == process.output:
            messages, more = process.read()
            self._found += [LineArrived(allocation.handle, message) for message in messages]
            if not more:
                self._selector.unregister(fd)
                allocation.watched.remove(fd)
        elif process.has_ended():
            self._end(allocation, process)

    def _end(self, allocation: _Allocation, process: LocalProcess) -> None:
        self._found += [LineArrived(allocation.handle, message) for message in process.end()]
        self._found.append(AllocationEnded(allocation.handle, process.error))
        self._forget(allocation)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for allocation in list(self._running.values()):
            process = allocation.process
            if process is None:
                continue
            if now >= process.deadline and not process.has_ended():
                process.out_of_time()
            if process.pidfd < 0 and process.has_ended():
                self._end(allocation, process)

    def _next_look(self) -> float:
        """Return when something has to be looked at although nothing was heard, on the monotonic clock."""
        processes = [one.process for one in self._running.values() if one.process is not None]
        times = [process.deadline for process in processes]
        now = time.monotonic()
        if self._waiting:
            times.append(now + TRY_LOCK_S)
        if any(process.pidfd < 0 for process in processes):
            times.append(now + LOOK_S)
        return min(times, default=float("inf"))

    def _forget(self, allocation: _Allocation) -> None:
        for fd in allocation.watched:
            self._selector.unregister(fd)
        allocation.watched.clear()
        if allocation.process is not None:
            allocation.process.close()
        allocation.lock.release()
        self._running.pop(allocation.handle.id, None)


def _wants(plan: Plan) -> tuple[bool, list[str]]:
    """Return whether *plan* owns what it runs on, and which devices; none means the whole machine."""
    measured = [run for run in plan.runs if run.exclusive]
    if any(run.device_type == "cpu" or not run.device_ids for run in measured):
        return True, []
    return bool(measured), sorted({device for run in plan.runs for device in run.device_ids})
