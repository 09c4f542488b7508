"""The thread of one partition: it submits ahead in test order, processes the provisioner's events, and closes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable

from pytest_mlhpc.jobs.job import AdoptedAllocation, Job
from pytest_mlhpc.jobs.partition_queue import RELEASE_S, Callbacks, PartitionQueue
from pytest_mlhpc.jobs.provisioner import Handle, Provisioner

#: Longest wait of a driver for events, in seconds; every request wakes it at once.
IDLE_S = 5.0


#: Time limit of a closing driver for the events of ended allocations, in seconds.
COLLECT_S = 1.0

#: Longest wait for requests while all jobs wait for other partitions' queues, in seconds.
READY_INTERVAL_S = 0.2


class Driver(threading.Thread):
    """Drives one provisioner: up to *max_jobs* allocations are active until it is closed.

    With *pack*, jobs of the same needs share allocations. *durable* jobs outlive this process if it is closed by detaching.
    """

    def __init__(
        self,
        name: str,
        provisioner: Provisioner,
        max_jobs: int,
        callbacks: Callbacks,
        *,
        pack: bool = False,
        durable: bool = False,
    ) -> None:
        super().__init__(name=f"mlhpc-{name}", daemon=True)
        self._provisioner = provisioner
        self._callbacks = callbacks
        self._queue = PartitionQueue(provisioner, max_jobs, callbacks, pack)
        self.durable = durable  #: whether its jobs outlive this process
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unwanted: dict[Job, str] = {}  #: job -> reason, to be cancelled
        self._closing = False
        self._detaching = False
        self._wake_lock = threading.Lock()  #: a provisioner must not be woken while it closes
        self._gone = False
        self.settled = threading.Event()  #: set once all that fits into the queue was submitted
        self.crash = ""  #: traceback of an internal error

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue *jobs* in their order."""
        new = list(jobs)
        self._request(lambda: self._queue.add(new))

    def adopt(self, adopted: Iterable[AdoptedAllocation]) -> None:
        """Take over allocations that an earlier session submitted, in their order."""
        taken = list(adopted)
        self._request(lambda: self._queue.adopt(taken))

    def cancel(self, jobs: Iterable[Job], reason: str) -> None:
        """Cancel *jobs* in any state; returns at once. Requests before the queue's next step are cancelled together."""
        unwanted = dict.fromkeys(jobs, reason)
        self._request(lambda: self._give_up(unwanted))

    def release(self, job: Job) -> None:
        """Release the nodes that the test of *job* held; returns at once."""
        self._request(lambda: self._queue.release(job))

    def close(self, *, detach: bool = False) -> None:
        """Cancel all that has not ended, or leave it to a later session; join the thread afterwards."""
        self._request(lambda: self._close(detach=detach))

    @property
    def remaining(self) -> list[Handle]:
        """Allocations that remain in the ledger: left to a later session, or unsure; before the thread has ended, all."""
        return self._queue.remaining

    @property
    def resumable(self) -> list[Handle]:
        """Allocations with runs that a later session may resume."""
        return self._queue.resumable

    def _request(self, request: Callable[[], None]) -> None:
        self._requests.put(request)
        with self._wake_lock:
            if not self._gone:
                self._provisioner.wake()

    def run(self) -> None:
        """Work until closed. After any error, too, no allocation is left active and every job has an outcome."""
        outcome, reason = "cancelled", "the session ended"
        try:
            while not self._closing:
                self._step()
        except BaseException:  # noqa: BLE001 - the main thread ends the session with it
            # pytest's own skip, fail and exit, and SystemExit, are no Exception; they would end a thread silently.
            self.crash = traceback.format_exc()
            outcome, reason = "channel_broken", "an internal error stopped the queue"
            self._detaching = False
        try:
            self._shut(outcome, reason)
        except BaseException:  # noqa: BLE001 - as above; every job has its outcome by now
            self.crash += traceback.format_exc()

    def _step(self) -> None:
        self._take_requests(block=self._queue.idle)
        if self._closing:
            return
        if not self._callbacks.beat():
            self._queue.abandon()
            return
        self._queue.fill()
        self.settled.set()
        if handles := self._queue.handles:
            for event in self._provisioner.events(handles, IDLE_S):
                self._queue.process(event)
        elif not self._queue.idle:
            self._take_requests(block=True, timeout_s=READY_INTERVAL_S)

    def _take_requests(self, *, block: bool, timeout_s: float | None = None) -> None:
        with contextlib.suppress(queue.Empty):
            self._requests.get(block=block, timeout=timeout_s)()
            while True:
                self._requests.get_nowait()()
        if self._unwanted:  # together, as each call of a scheduler may take seconds
            unwanted, self._unwanted = self._unwanted, {}
            self._queue.cancel(unwanted)

    def _give_up(self, unwanted: dict[Job, str]) -> None:
        self._unwanted = {**unwanted, **self._unwanted}  # the first reason counts

    def _close(self, *, detach: bool) -> None:
        self._closing, self._detaching = True, detach

    def _shut(self, outcome: str, reason: str) -> None:
        """Cancel or leave the allocations, and close the provisioner; every step runs even if an earlier one failed."""
        try:
            if self._detaching:
                self._queue.leave()
            else:
                try:
                    self._await_released()
                    self._collect_ended()
                finally:
                    self._queue.cancel_all(outcome, reason)
        finally:
            with self._wake_lock:
                self._gone = True
            try:
                self._provisioner.close()
            finally:
                self._queue.fail_all(outcome, reason)

    def _await_released(self) -> None:
        """Wait for released allocations to end by themselves, so that their job counts as completed."""
        until = time.monotonic() + RELEASE_S
        while self._queue.releasing and not self.crash and time.monotonic() < until:
            for event in self._provisioner.events(self._queue.handles, 1.0):
                self._queue.process(event)

    def _collect_ended(self) -> None:
        """Process events of allocations that ended meanwhile: they are recorded."""
        until = time.monotonic() + COLLECT_S
        while self._queue.handles and not self.crash and time.monotonic() < until:
            self._provisioner.wake()  # so that it only returns present events
            if not (events := self._provisioner.events(self._queue.handles, COLLECT_S)):
                return
            for event in events:
                self._queue.process(event)
