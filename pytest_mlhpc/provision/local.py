"""Provisioner `local`: this machine, one process tree for each allocation, measured runs one after another."""

from __future__ import annotations

import collections
import contextlib
import itertools
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

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.node.processes import copy_of, start_in_new_session
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import stage
from pytest_mlhpc.provision import guardian
from pytest_mlhpc.provision.conversation import result_message, run_message
from pytest_mlhpc.provision.device_lock import MachineLock
from pytest_mlhpc.provision.local_process import (
    BatchProcess,
    CommandProcess,
    LocalProcess,
    RunningBatch,
    start_batch,
    start_command,
)
from pytest_mlhpc.provision.payload import cannot_write, make_directory, payload_path, write_private

#: Interval between tries of a lock that another session holds, in seconds: flock(2) does not notify that it is free.
LOCK_INTERVAL_S = 0.25

#: Most batches that wait for a next plan: each has torch in its memory.
MOST_WAITING = 2

#: Interval between checks for a process's end on kernels without pidfd (before Linux 5.3), in seconds.
EXIT_INTERVAL_S = 0.05


@dataclass
class _LocalAllocation:
    handle: Handle
    plan: Plan
    lock: MachineLock
    reason: str = ""
    process: LocalProcess | None = None
    watched: list[int] = field(default_factory=list)


class LocalProvisioner:
    """Runs plans on this machine. All its processes end with this object, or with this process.

    Args:
        state_dir: the folder of the payload.
        session_id: the value of ``MLHPC_SESSION`` in the environment of all processes.
    """

    def __init__(self, *, state_dir: Path, session_id: str) -> None:
        self._state_dir = state_dir
        self._session_id = session_id
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._waiting: collections.deque[_LocalAllocation] = collections.deque()
        self._running: dict[str, _LocalAllocation] = {}
        self._batches: list[RunningBatch] = []  # that wait for a next plan, the one that did last at the end
        self._events: list[Event] = []
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
        """Return None: this machine has no limit of time."""
        return None

    def submit(self, plan: Plan) -> Handle:
        """Start *plan*, or queue it until its devices, or a shared place on the machine, are free.

        Raises:
            ProvisionError: ``disk_full`` or ``not_writable`` or ``launch_failed``; no process or lock of it is left.
        """
        directory = Path(plan.directory)
        try:
            make_directory(directory)
            stage(plan)
            write_private(directory / "plan.json", json.dumps(to_json(plan)), new=True)
        except OSError as error:
            raise cannot_write(error, directory) from error
        self._guard()
        allocation = _LocalAllocation(Handle(plan.allocation_id, directory), plan, MachineLock(os.environ))
        self._waiting.append(allocation)
        self._start_waiting()
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = time.monotonic() + timeout_s
        woken = False
        while True:
            self._start_waiting()
            self._enforce_deadlines()
            if self._events or woken or time.monotonic() >= until:
                events, self._events = self._events, []
                return events
            for key, _ in self._selector.select(max(0.0, min(until, self._next_wakeup()) - time.monotonic())):
                if key.data is None:
                    woken = True
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    self._process_readable(key.data, key.fd)

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads. Has no effect after close."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
                os.write(self._wake_write, b"w")

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Refuse: no process outlives the session that started it.

        Raises:
            ProvisionError: always.
        """
        del native_id
        raise ProvisionError(
            "rejected", f"{plan.allocation_id}: nothing on this machine outlives its session"
        )

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Do nothing: here no runs share an allocation."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """End the allocations with all their processes; none is ever unsure here."""
        for handle in handles:
            if (running := self._running.get(handle.id)) is not None and running.process is not None:
                running.process.send_signal(signal.SIGTERM)  # all at once: they use the same time to end
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
            self._remove(running)
        self._events = [event for event in self._events if event.handle.id != handle.id]

    def close(self) -> None:
        """Cancel all allocations, and end the guardian, which first ends any remaining process of this session."""
        if self._closed:
            return
        for allocation in self._waiting:
            allocation.lock.release()
        self._waiting.clear()
        self.cancel([allocation.handle for allocation in self._running.values()])
        while self._batches:
            self._batches.pop().end()
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()
        self._closed = True
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _guard(self) -> None:
        """Start the guardian if none runs."""
        if self._guardian is not None and self._guardian.poll() is None:
            return
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
        try:
            self._guardian = start_in_new_session(
                [sys.executable, "-I", "-S", guardian.__file__, self._session_id, guardian.socket_base()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ProvisionError("launch_failed", f"cannot start the guardian: {error}") from error

    def _start_waiting(self) -> None:
        """Start waiting allocations in order. One that has to wait blocks all later ones.

        Only an allocation without measured runs overtakes those that wait for devices, as it needs none of their locks.
        """
        devices_wait = False
        for allocation in list(self._waiting):
            measured, devices = _requirements(allocation.plan)
            if measured and devices_wait:
                if devices:
                    continue
                return
            try:
                reason = allocation.lock.acquire(devices) if measured else allocation.lock.share()
            except ProvisionError as error:
                self._waiting.remove(allocation)
                self._events.append(AllocationEnded(allocation.handle, error))
                continue
            if not reason:
                self._waiting.remove(allocation)
                self._start(allocation)
                continue
            if reason != allocation.reason:
                allocation.reason = reason
                self._events.append(StateChanged(allocation.handle, JobState.QUEUED, reason))
            if not devices:
                return
            devices_wait = True

    def _start(self, allocation: _LocalAllocation) -> None:
        handle = allocation.handle
        try:
            process = self._launch(allocation)
        except ProvisionError as error:
            allocation.lock.release()
            self._events.append(AllocationEnded(handle, error))
            return
        if process is None:
            allocation.lock.release()
            self._events.append(AllocationEnded(handle))
            return
        allocation.process = process
        self._running[handle.id] = allocation
        beside, nodes = allocation.lock.beside, (os.uname().nodename,)
        self._events.append(StateChanged(handle, JobState.RUNNING, beside, nodes, beside=beside))
        if isinstance(process, CommandProcess):
            self._events.append(LineArrived(handle, process.started()))
        for fd in (*process.outputs, process.pidfd):
            if fd >= 0:
                self._selector.register(fd, selectors.EVENT_READ, allocation)
                allocation.watched.append(fd)

    def _launch(self, allocation: _LocalAllocation) -> LocalProcess | None:
        """Start a program or a batch; None, with events for the reason, where the program cannot be started."""
        plan = allocation.plan
        run = plan.runs[0]
        environment = {
            **copy_of(os.environ),
            **_shared_variables(plan),
            "MLHPC_SESSION": self._session_id,
            "MLHPC_ALLOCATION": plan.allocation_id,
            "MLHPC_RUN": run.run_id,
        }
        if len(plan.runs) > 1 or run.workload != "command" or run.launcher != "plain" or run.builds:
            return start_batch(
                plan, environment, payload_path(self._state_dir, plan.payload_sha256), self._batches
            )
        started = start_command(plan, environment)
        if isinstance(started, CommandProcess):
            return started
        code = 127  # the exit code of a shell for this case
        for message in (result_message(run, started), run_message(run, "end", {"exit": [code]})):
            self._events.append(LineArrived(allocation.handle, message))
        return None

    def _process_readable(self, allocation: _LocalAllocation, fd: int) -> None:
        process = allocation.process
        if process is None or allocation.handle.id not in self._running:
            return  # it ended while earlier output was processed
        if fd in process.outputs:
            messages, more = process.read(fd)
            self._events += [LineArrived(allocation.handle, message) for message in messages]
            if not more:
                self._selector.unregister(fd)
                allocation.watched.remove(fd)
            if isinstance(process, BatchProcess) and process.waits:
                self._end(allocation, process)
        elif process.has_ended():
            self._end(allocation, process)

    def _end(self, allocation: _LocalAllocation, process: LocalProcess) -> None:
        self._events += [LineArrived(allocation.handle, message) for message in process.finish()]
        self._events.append(AllocationEnded(allocation.handle, process.error))
        self._remove(allocation)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for allocation in list(self._running.values()):
            process = allocation.process
            if process is None:
                continue
            if now >= process.deadline and not process.has_ended():
                process.on_deadline()
            if process.pidfd < 0 and process.has_ended():
                self._end(allocation, process)

    def _next_wakeup(self) -> float:
        """Return when a deadline, lock or process has to be checked, on the monotonic clock in seconds."""
        processes = [one.process for one in self._running.values() if one.process is not None]
        times = [process.deadline for process in processes]
        now = time.monotonic()
        if self._waiting:
            times.append(now + LOCK_INTERVAL_S)
        if any(process.pidfd < 0 for process in processes):
            times.append(now + EXIT_INTERVAL_S)
        return min(times, default=float("inf"))

    def _remove(self, allocation: _LocalAllocation) -> None:
        for fd in allocation.watched:
            self._selector.unregister(fd)
        allocation.watched.clear()
        if allocation.process is not None:
            allocation.process.close()
        if isinstance(allocation.process, BatchProcess) and allocation.process.waits:
            self._batches.append(allocation.process.waits)
            if len(self._batches) > MOST_WAITING:
                self._batches.pop(0).end()
        allocation.lock.release()
        self._running.pop(allocation.handle.id, None)


def _shared_variables(plan: Plan) -> dict[str, str]:
    """Return the variables that all runs and builds of *plan* have: of two that differ, neither inherits the other's."""
    sets = ((run.variables, *(build.variables for build in run.builds)) for run in plan.runs)
    first, *others = itertools.chain.from_iterable(sets)
    return {name: text for name, text in first.items() if all(one.get(name) == text for one in others)}


def _requirements(plan: Plan) -> tuple[bool, list[str]]:
    """Return whether *plan* has measured runs, and the devices that it owns; no devices means the whole machine."""
    measured = [run for run in plan.runs if run.exclusive]
    if any(run.device_type == "cpu" or not run.device_ids for run in measured):
        return True, []
    return bool(measured), sorted({device for run in plan.runs for device in run.device_ids})
