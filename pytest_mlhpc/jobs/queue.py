"""The submit-ahead queue: one thread for each partition keeps its provisioner busy, in test order."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable

from pytest_mlhpc.jobs.allocation import Adopted
from pytest_mlhpc.jobs.board import RELEASE_S, Board
from pytest_mlhpc.jobs.callbacks import Callbacks
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.provision.base import Handle, Provisioner

__all__ = ["Callbacks", "Driver"]

#: Longest time that a driver waits for events without looking up; every request wakes it at once.
IDLE_S = 5.0

#: Time between two looks at jobs that wait for other partitions' jobs, in seconds.
PAUSE_S = 0.5

#: The same while all that is left waits for what other partitions' queues do, in seconds.
OTHERS_S = 0.2


class Driver(threading.Thread):
    """Drives one provisioner: keeps up to *max_jobs* allocations in its queue until told to close.

    With *pack*, jobs of the same needs share allocations. *durable* jobs outlive this process, if it is told to leave.
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
        self._board = Board(provisioner, max_jobs, callbacks, pack)
        self.durable = durable  #: whether its jobs outlive this process
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unwanted: dict[Job, str] = {}  #: to be cancelled, with the reason
        self._closing = False
        self._detaching = False
        self._wake_lock = threading.Lock()  #: a provisioner that closes must not be woken at that moment
        self._gone = False
        self.settled = threading.Event()  #: all that fits in the queue was submitted
        self.crash = ""  #: traceback of an error of our own

    # Called from other threads.

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue *jobs* in their order."""
        new = list(jobs)
        self._ask(lambda: self._board.add(new))

    def adopt(self, adopted: Iterable[Adopted]) -> None:
        """Take over allocations that an earlier session submitted, in their order."""
        taken = list(adopted)
        self._ask(lambda: self._board.adopt(taken))

    def cancel(self, jobs: Iterable[Job], reason: str) -> None:
        """End *jobs* wherever they stand; returns at once. What is asked for before the queue looks up is ended together."""
        unwanted = dict.fromkeys(jobs, reason)
        self._ask(lambda: self._give_up(unwanted))

    def release(self, job: Job) -> None:
        """Give back the nodes that the test of *job* held; returns at once."""
        self._ask(lambda: self._board.release(job))

    def close(self, *, detach: bool = False) -> None:
        """Cancel everything that has not ended, or leave it to a later session; join the thread afterwards."""
        self._ask(lambda: self._close(detach=detach))

    @property
    def left(self) -> list[Handle]:
        """After the thread has ended: allocations that were left behind, on purpose or as nobody answered."""
        return self._board.left

    @property
    def kept(self) -> list[Handle]:
        """After the thread has ended: allocations with runs that a later session may ask for."""
        return self._board.kept

    def _ask(self, request: Callable[[], None]) -> None:
        self._requests.put(request)
        with self._wake_lock:
            if not self._gone:
                self._provisioner.wake()

    # The thread.

    def run(self) -> None:
        """Work until closed. Whatever happens, nothing is left running and every job has an outcome."""
        outcome, reason = "cancelled", "the session ended"
        try:
            while not self._closing:
                self._step()
        except BaseException:  # noqa: BLE001 - told to the main thread, which ends the session with it
            # pytest's own skip, fail and exit, and SystemExit, are no Exception; a thread would end with them in silence.
            self.crash = traceback.format_exc()
            outcome, reason = "channel_broken", "an internal error stopped the queue"
            self._detaching = False
        try:
            self._shut(outcome, reason)
        except BaseException:  # noqa: BLE001 - as above; every job has its outcome by now
            self.crash += traceback.format_exc()

    def _step(self) -> None:
        self._take_requests(block=self._board.idle)
        if self._closing:
            return
        if not self._callbacks.beat():
            self._board.abandon(
                "channel_broken", "another session took these jobs over, as this one seemed dead"
            )
            return
        self._board.fill()
        self.settled.set()
        if handles := self._board.handles:
            for event in self._provisioner.events(handles, IDLE_S):
                self._board.on(event)
        elif not self._board.idle:
            self._take_requests(block=True, timeout_s=OTHERS_S)

    def _take_requests(self, *, block: bool, timeout_s: float | None = None) -> None:
        with contextlib.suppress(queue.Empty):
            self._requests.get(block=block, timeout=timeout_s)()
            while True:
                self._requests.get_nowait()()
        if self._unwanted:  # together, as each call of a scheduler may take its time
            unwanted, self._unwanted = self._unwanted, {}
            self._board.cancel(unwanted)

    def _give_up(self, unwanted: dict[Job, str]) -> None:
        self._unwanted = {**unwanted, **self._unwanted}  # the first reason counts

    def _close(self, *, detach: bool) -> None:
        self._closing, self._detaching = True, detach

    def _shut(self, outcome: str, reason: str) -> None:
        """Cancel or leave behind, and close, each step whatever became of the one before."""
        try:
            if self._detaching:
                self._board.leave()
            else:
                try:
                    self._await_released()
                finally:
                    self._board.cancel_all(outcome, reason)
        finally:
            with self._wake_lock:
                self._gone = True
            try:
                self._provisioner.close()
            finally:
                self._board.fail_all(outcome, reason)

    def _await_released(self) -> None:
        """Let nodes that were just given back go by themselves, so that their job reads as completed."""
        until = time.monotonic() + RELEASE_S
        while self._board.releasing and not self.crash and time.monotonic() < until:
            for event in self._provisioner.events(self._board.handles, 1.0):
                self._board.on(event)
