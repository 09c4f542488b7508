from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_mlhpc.worker.accelerators.cpu import Cpu
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.timing import Clock, DeviceMarks, Recorder, check_wall, resolve

SECOND = 1_000_000_000


def host_recorder(*rows):
    recorder = Recorder(Clock(perf=lambda: 0))
    recorder.start(Cpu(0, "test"))
    recorder.stamps = [tuple(int(value * SECOND) for value in row) for row in rows]
    return recorder


def queue():
    """A device whose marks are plain seconds."""
    return SimpleNamespace(asynchronous=True, mark=lambda: 0.0, seconds=lambda start, end: end - start)


def test_each_phase_gets_its_share_of_the_window():
    recorder = host_recorder((0, 1, 1.5, 3.5, 6.5, 7), (7, 7.25, 7.5, 9.5, 12.5, 13))

    times = resolve(recorder, Cpu(0, "test"))

    assert times.wait_s == 1.25
    assert times.first_wait_s == 1.0
    assert times.copy_s == times.exposed_copy_s == 0.75
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (4.0, 6.0, 1.0)
    assert times.step_times_s == (7.0, 6.0)


def test_time_between_two_steps_belongs_to_the_later_one():
    times = resolve(host_recorder((0, 0, 0, 0, 0, 1), (5, 5, 5, 5, 5, 6)), Cpu(0, "test"))

    assert times.step_times_s == (1.0, 5.0)


def test_micro_steps_of_one_step_are_added_up():
    rows = [(t, t, t, t, t, t + 1) for t in range(4)]

    times = resolve(host_recorder(*rows), Cpu(0, "test"), accumulate=2)

    assert times.step_times_s == (2.0, 2.0)


def test_on_a_queue_only_idle_time_of_the_device_counts_as_waiting():
    recorder = Recorder(start_mark=0.0)
    # The host asked for the second batch at 2.0, right behind the first step: the device never stood still for it.
    recorder.marks = [
        DeviceMarks(
            asked=0.5, ready=0.75, forward=1.0, backward=1.5, updated=2.0, copy_start=0.25, copy_end=0.75
        ),
        DeviceMarks(
            asked=2.0, ready=2.0, forward=2.5, backward=3.5, updated=4.0, copy_start=0.75, copy_end=1.75
        ),
    ]

    times = resolve(recorder, queue())

    assert (times.wait_s, times.first_wait_s) == (0.5, 0.5)
    assert times.copy_s == 1.5
    assert times.exposed_copy_s == 0.25
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (0.75, 1.5, 1.0)
    assert times.step_times_s == (2.0, 2.0)


def test_a_batch_that_was_on_the_device_already_has_no_copy():
    recorder = Recorder(start_mark=0.0)
    recorder.marks = [DeviceMarks(asked=0.0, ready=0.0, forward=1.0, backward=2.0, updated=3.0)]

    assert resolve(recorder, queue()).copy_s == 0.0


def test_a_clock_for_durations_that_goes_back_is_named_with_its_step():
    recorder = host_recorder((0, 1, 2, 3, 4, 5), (5, 6, 7, 6.5, 8, 9))

    with pytest.raises(WorkerFailure, match=r"clock_backwards: .* back by 500000000 ns in step 1") as caught:
        resolve(recorder, Cpu(0, "test"))

    assert caught.value.outcome == "clock_backwards"


def test_a_system_clock_that_was_set_back_is_named():
    with pytest.raises(
        WorkerFailure, match=r"clock_backwards: the system clock advanced -3\.000 s while 2\.000 s passed"
    ):
        check_wall(5 * SECOND, 2 * SECOND, 2.0)


def test_a_system_clock_that_was_set_back_by_less_than_the_window_is_named_too():
    with pytest.raises(WorkerFailure, match="clock_backwards"):
        check_wall(0, 50 * SECOND, 60.0)


def test_a_slewed_or_forward_set_clock_is_no_failure():
    check_wall(0, 3600 * SECOND - SECOND, 3600.0)
    check_wall(0, 90 * SECOND, 60.0)
