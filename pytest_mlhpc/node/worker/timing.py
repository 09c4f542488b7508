"""PAYLOAD. What a window of steps cost and where the time went, from stamps taken without waiting for the device.

Each micro-step leaves six stamps of the host's clock: before the loader, after it, after issuing the copy, after
forward, after backward, after the update. An asynchronous device leaves marks at the same points, which are resolved
after the window. One stamp costs 58 ns, all six under 1 % of a 0.3 ms step (docs/performance.md has our own figures).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.worker.accelerators.base import Accelerator, Mark
from pytest_mlhpc.node.worker.failure import WorkerFailure

#: Six readings of the host's clock in nanoseconds.
Stamps = Tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Clock:
    """Where times come from: ``perf`` for durations, ``wall`` for dates, both integer nanoseconds."""

    perf: Callable[[], int] = time.perf_counter_ns
    wall: Callable[[], int] = time.time_ns


@dataclass(frozen=True)
class DeviceMarks:
    """Marks of one micro-step on the compute stream, and around its copy on the copy stream (None: no copy)."""

    asked: Mark  #: the host has the batch and has issued its copy
    ready: Mark  #: the batch is on the device
    forward: Mark
    backward: Mark
    updated: Mark
    copy_start: Optional[Mark] = None
    copy_end: Optional[Mark] = None


@dataclass
class Recorder:
    """What the loop leaves behind; nothing in it is looked at before the window is over."""

    clock: Clock = field(default_factory=Clock)
    stamps: List[Stamps] = field(default_factory=list)
    marks: List[DeviceMarks] = field(default_factory=list)
    losses: List[Any] = field(default_factory=list)  #: 0-d tensors on the device
    last_batch: Any = None  #: kept for the communication pass, which must not read data
    read_s: float = 0.0
    samples: int = 0
    start_ns: int = 0
    start_mark: Optional[Mark] = None

    def start(self, accelerator: Accelerator) -> None:
        """Open the window. The device must be idle."""
        self.start_mark = accelerator.mark()
        self.start_ns = self.clock.perf()


@dataclass(frozen=True)
class WindowTimes:
    """Seconds summed over a window; ``step_times_s`` has one entry for each step (all its micro-steps together).

    ``wait_s`` is the time for which training stood still because no batch was there. Without a queue that is the host's
    wait in the loader. With one the host runs ahead, and only the device's idle time between two steps counts.
    ``copy_s`` is all the time that copies took, ``exposed_copy_s`` the part for which computation waited.
    ``first_wait_s`` is the part of ``wait_s`` that belongs to the first batch.
    """

    wait_s: float
    first_wait_s: float
    copy_s: float
    exposed_copy_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    step_times_s: Tuple[float, ...]


def resolve(recorder: Recorder, accelerator: Accelerator, accumulate: int = 1) -> WindowTimes:
    """Turn stamps and marks into times. The device must have passed the last mark.

    A step lasts from the end of the one before to its own end, so that nothing hides between two steps.

    Raises:
        WorkerFailure: ``clock_backwards``.
    """
    _check_order(recorder)
    if accelerator.asynchronous:
        return _from_marks(recorder, accelerator, accumulate)
    return _from_stamps(recorder, accumulate)


def check_wall(started_ns: int, ended_ns: int, elapsed_s: float) -> None:
    """Compare the date's clock with the clock for durations over one window.

    A clock that is being corrected slowly may lag by 500 ppm (adjtimex(2)); half a second or 0.1 % is more than that.

    Raises:
        WorkerFailure: ``clock_backwards``.
    """
    wall_s = (ended_ns - started_ns) / 1e9
    if ended_ns <= started_ns or wall_s < elapsed_s - max(0.5, elapsed_s * 1e-3):
        text = (
            f"the system clock advanced {wall_s:.3f} s while {elapsed_s:.3f} s passed: it was set back during the run; "
            "check the node's time service and run again"
        )
        raise WorkerFailure("clock_backwards", text)


def _check_order(recorder: Recorder) -> None:
    previous = recorder.start_ns
    for number, stamps in enumerate(recorder.stamps):
        for stamp in stamps:
            if stamp < previous:
                text = f"the clock for durations went back by {previous - stamp} ns in step {number} of the window"
                raise WorkerFailure("clock_backwards", text)
            previous = stamp


def _from_stamps(recorder: Recorder, accumulate: int) -> WindowTimes:
    rows = recorder.stamps
    ends = [recorder.start_ns] + [row[5] for row in rows[accumulate - 1 :: accumulate]]
    copy_s = _total(rows, 1, 2)
    return WindowTimes(
        wait_s=_total(rows, 0, 1),
        first_wait_s=_total(rows[:1], 0, 1),
        copy_s=copy_s,
        exposed_copy_s=copy_s,
        forward_s=_total(rows, 2, 3),
        backward_s=_total(rows, 3, 4),
        optimizer_s=_total(rows, 4, 5),
        step_times_s=tuple((end - start) / 1e9 for start, end in zip(ends, ends[1:])),
    )


def _total(rows: Sequence[Stamps], start: int, end: int) -> float:
    return sum(row[end] - row[start] for row in rows) / 1e9


def _from_marks(recorder: Recorder, accelerator: Accelerator, accumulate: int) -> WindowTimes:
    seconds = accelerator.seconds
    rows = recorder.marks
    before = [recorder.start_mark] + [row.updated for row in rows[:-1]]
    waits = [seconds(previous, row.asked) for previous, row in zip(before, rows)]
    ends = [recorder.start_mark] + [row.updated for row in rows[accumulate - 1 :: accumulate]]
    return WindowTimes(
        wait_s=sum(waits),
        first_wait_s=sum(waits[:1]),
        copy_s=sum(seconds(row.copy_start, row.copy_end) for row in rows if row.copy_start is not None),
        exposed_copy_s=sum(seconds(row.asked, row.ready) for row in rows),
        forward_s=sum(seconds(row.ready, row.forward) for row in rows),
        backward_s=sum(seconds(row.forward, row.backward) for row in rows),
        optimizer_s=sum(seconds(row.backward, row.updated) for row in rows),
        step_times_s=tuple(seconds(start, end) for start, end in zip(ends, ends[1:])),
    )
