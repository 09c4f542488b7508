import contextlib
from types import SimpleNamespace

import pytest

from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Clock, DeviceMarks, Recorder, check_wall, resolve

SECOND = 1_000_000_000

#: A device whose marks are plain seconds.
QUEUE = SimpleNamespace(asynchronous=True, mark=lambda: 0.0, seconds=lambda start, end: end - start)


def times_of(*rows, **options):
    """Return the times of steps whose six stamps, in seconds, the host took."""
    recorder = Recorder(Clock(perf=lambda: 0))
    recorder.start(Cpu(0, "test"))
    recorder.stamps = [tuple(int(value * SECOND) for value in row) for row in rows]
    return resolve(recorder, Cpu(0, "test"), **options)


def test_each_phase_gets_its_share_of_the_window():
    times = times_of((0, 1, 1.5, 3.5, 6.5, 7), (7, 7.25, 7.5, 9.5, 12.5, 13))
    assert (times.wait_s, times.first_wait_s, times.copy_s, times.exposed_copy_s) == (1.25, 1.0, 0.75, 0.75)
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (4.0, 6.0, 1.0)
    assert times.step_times_s == (7.0, 6.0)


@pytest.mark.parametrize(
    ("ends", "accumulate", "times"),
    [((1, 6), 1, (1.0, 5.0)), ((1, 2, 3, 4), 2, (2.0, 2.0))],
    ids=["time between two steps belongs to the later one", "micro-steps of one step are added up"],
)
def test_a_step_ends_at_its_last_stamp(ends, accumulate, times):
    assert times_of(*((end - 1,) * 5 + (end,) for end in ends), accumulate=accumulate).step_times_s == times


def test_on_a_queue_only_idle_time_of_the_device_counts_as_waiting():
    names = ("asked", "ready", "forward", "backward", "updated", "copy_start", "copy_end")
    # The host asked for the second batch at 2.0, right behind the first step: the device never stood still for it.
    steps = [(0.5, 0.75, 1.0, 1.5, 2.0, 0.25, 0.75), (2.0, 2.0, 2.5, 3.5, 4.0, 0.75, 1.75)]
    recorder = Recorder(start_mark=0.0)
    recorder.marks = [DeviceMarks(**dict(zip(names, step, strict=True))) for step in steps]

    times = resolve(recorder, QUEUE)

    assert (times.wait_s, times.first_wait_s, times.copy_s, times.exposed_copy_s) == (0.5, 0.5, 1.5, 0.25)
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (0.75, 1.5, 1.0)
    assert times.step_times_s == (2.0, 2.0)


def test_a_batch_that_was_on_the_device_already_has_no_copy():
    recorder = Recorder(start_mark=0.0)
    recorder.marks = [DeviceMarks(asked=0.0, ready=0.0, forward=1.0, backward=2.0, updated=3.0)]

    assert resolve(recorder, QUEUE).copy_s == 0.0


def test_a_clock_for_durations_that_goes_back_is_named_with_its_step():
    with pytest.raises(WorkerFailure, match=r"^clock_backwards: .* back by 500000000 ns in step 1"):
        times_of((0, 1, 2, 3, 4, 5), (5, 6, 7, 6.5, 8, 9))


@pytest.mark.parametrize(
    ("start_s", "end_s", "passed_s", "failure"),
    [
        (5, 2, 2.0, r"clock_backwards: the system clock advanced -3\.000 s while 2\.000 s passed"),
        (0, 50, 60.0, "clock_backwards"),
        (0, 3599, 3600.0, None),
        (0, 90, 60.0, None),
    ],
    ids=["set back", "set back by less than the window", "slewed", "set forward"],
)
def test_a_system_clock_may_be_slewed_or_set_forward_and_not_set_back(start_s, end_s, passed_s, failure):
    fails = pytest.raises(WorkerFailure, match=failure) if failure else contextlib.nullcontext()
    with fails:
        check_wall(start_s * SECOND, end_s * SECOND, passed_s)
