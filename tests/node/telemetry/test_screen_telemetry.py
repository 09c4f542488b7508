"""The sampler beside a benchmark: its figures are of the timed window, its file stays small, and it is off unless asked for."""

import contextlib
import io
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from full_disk import small_disk
from polling import ended, poll
from screen_samples import GIB, MIB, device, process, samples

from pytest_mlhpc.node.processes import descendants
from pytest_mlhpc.node.telemetry.samples import (
    LONGEST,
    MOST,
    ZERO_CELSIUS,
    Interval,
    IntervalWriter,
    Mean,
    figures,
    interval_of,
    parse,
    text_of,
    thinned,
    window,
)
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers  # samplers beside ranks


def intervals_of(taken):
    return [interval_of(before, after) for before, after in pairwise([None, *taken])]


def values(taken):
    return {one.name: (one.value, one.unit, one.over) for one in figures(intervals_of(taken))}


def test_cores_are_what_processes_used_while_they_lived():
    def tree(second):
        child = [process(11, second, cores=0.5)] if 5 <= second < 15 else []
        return [process(10, second, cores=1.5), *child]

    found = values(samples(tree, seconds=21))
    assert found["telemetry_cores"] == (pytest.approx((1.5 * 20 + 0.5 * 9) / 20), "1", "sum")
    assert found["telemetry_memory"] == (400 * MIB, "B", "max")
    assert found["telemetry_cost"] == (pytest.approx(0.001), "1", "max")
    assert "telemetry_power" not in found


def test_devices_are_reported_in_base_units():
    intervals = samples(lambda second: [process(10, second, read_bytes=second * MIB)],
                    lambda second: [device(0, celsius=60.0 + second), device(1, power_w=300.0, busy=0.5)])  # fmt: skip
    found = values(intervals)
    assert found["telemetry_power"] == (800.0, "W", "sum")
    assert found["telemetry_temperature"] == (pytest.approx(79 + 273.15), "K", "max")
    assert found["telemetry_device_busy"] == (pytest.approx(0.745), "1", "mean")
    assert found["telemetry_read_rate"] == (pytest.approx(MIB), "B/s", "sum")


def test_the_window_is_what_counts_and_what_is_around_it_where_it_is_shorter_than_two_intervals():
    intervals = intervals_of(samples(lambda second: [process(10, second, rss_bytes=GIB * (second + 1))]))
    assert [one.time_s for one in window(intervals, 103.0, 105.5)] == [103.0, 104.0, 105.0]
    windows = {
        (103.1, 103.2): [103.0, 104.0], (103.5, 104.5): [103.0, 104.0, 105.0], (99.0, 99.5): [100.0, 101.0],
        (130.0, 140.0): [118.0, 119.0], (118.5, 140.0): [118.0, 119.0],
    }  # fmt: skip
    for (begin_s, end_s), times in windows.items():
        assert [one.time_s for one in window(intervals, begin_s, end_s)] == times
    assert figures(intervals[:1]) == ()
    assert [list(window(few, 103.1, 103.2)) for few in (intervals[:1], [])] == [intervals[:1], []]


def test_a_line_that_is_cut_short_or_goes_back_in_time_is_the_end():
    intervals = intervals_of(samples(lambda second: [process(10, second)], seconds=2))
    first, second = map(text_of, intervals)
    for after in (b'{"time_s": 1', first, second, b'{"odd": 1}\n', second[:-1]):
        assert parse(io.BytesIO(first + second + after)) == intervals
    assert ZERO_CELSIUS == 273.15


#: A training of three days, at which so many intervals are taken.
DAYS_S, TAKEN = 3 * 86_400.0, 9_000


def long_course():
    """Looks at a rank whose power rises, a loader process in each third of a minute, and a peak of memory that one look sees."""
    (one,) = samples(lambda _second: [], seconds=1)
    for number in range(TAKEN):
        seconds = number * DAYS_S / TAKEN
        peak = 9 * GIB if number == TAKEN // 3 else GIB
        rank = process(10, seconds, cores=1.5, rss_bytes=peak, read_bytes=number * MIB)
        loader = process(11, number % 3 * DAYS_S / TAKEN, cores=0.6, start_ticks=number // 3)
        board = device(0, power_w=300.0 + 100.0 * number / TAKEN, busy=0.25 if number % 2 else 0.75)
        yield replace(one, time_s=100.0 + seconds, processes=(rank, loader), devices=(board,))


@pytest.mark.parametrize("most", [64, MOST])
def test_days_of_intervals_stay_in_a_small_file_and_say_the_same(most, tmp_path):
    taken, sizes = list(long_course()), []
    with (tmp_path / "intervals").open("w+b") as file:
        writer = IntervalWriter(file.fileno(), most)
        for sample in taken:
            writer.add(sample)
            sizes.append(os.fstat(file.fileno()).st_size)
        file.seek(0)
        kept = parse(file)
    every = intervals_of(taken)
    assert max(sizes) <= most * LONGEST
    assert sizes[0] > 0
    assert most / 4 <= len(kept) <= most
    assert (kept[0], kept[-1].time_s) == (every[0], every[-1].time_s)
    reported = {one.name: one.value for one in figures(kept)}
    assert reported == {one.name: pytest.approx(one.value) for one in figures(every)}
    assert reported["telemetry_memory"] == pytest.approx(9 * GIB + 200 * MIB)
    assert reported["telemetry_cores"] == pytest.approx(1.5 + 0.6 * 2 / 3, rel=1e-3)
    for begin, end in ((0.25, 0.5), (0.5, 1.0), (0.9, 0.999)):
        times = (100.0 + begin * DAYS_S, 100.0 + end * DAYS_S)
        rough, exact = (
            {one.name: one.value for one in figures(window(every_look, *times))}
            for every_look in (kept, every)
        )
        near = 0.02 + 4 / most / (end - begin)
        assert rough == {name: pytest.approx(value, rel=near) for name, value in exact.items()}


def test_the_file_of_samples_has_two_mebibytes_at_most():
    assert MOST * LONGEST == 2 << 20
    worst = -1.0123456789012345e-300
    mean = Mean(worst, 1 << 62)
    assert len(text_of(Interval(worst, worst, worst, 1 << 62, 1 << 62, worst, mean, mean, mean))) <= LONGEST


def test_samples_are_merged_by_spans_of_one_length_and_the_first_stays_as_it_is():
    intervals = [Interval(10.0 + second, 1.0, 0.25, second % 7) for second in range(100)]
    found = thinned(intervals, 16)
    assert [one.time_s for one in found] == [10.0, *(10.0 + end for end in range(16, 100, 16)), 109.0]
    assert found[0] == intervals[0]
    assert sum(one.used_s for one in found) == 100.0
    assert sum(one.cost_s for one in found) == 25.0
    assert [one.rss_bytes for one in found] == [0, 6, 6, 6, 6, 6, 6, 6]
    assert thinned(found, 16) == found


@pytest.fixture
def beside():
    return pytest.importorskip(
        "pytest_mlhpc.node.telemetry.sidecar", reason="torch is not installed", exc_type=ImportError
    )


def test_one_more_sample_is_awaited_while_the_file_is_cut(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "LOOK_S", 600.0)
    with subprocess.Popen(["sleep", "600"]) as watcher, (tmp_path / "intervals").open("w+b") as file:
        try:
            file.write(b"".join(text_of(Interval(float(second), 0.0, 0.0, 1)) for second in range(50)))
            file.flush()
            seen, newest = queue.Queue(), beside._newest
            monkeypatch.setattr(beside, "_newest", lambda file: seen.put(found := newest(file)) or found)
            waiting = threading.Thread(target=beside.await_interval, args=(file, watcher))
            waiting.start()
            assert seen.get() == 49.0
            merged, begun = text_of(Interval(49.0, 1.0, 1.0, 1)), b'{"time_s": 50.0'
            for text in (b"", merged, begun):
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), text, 0)
                seen.queue.clear()
                assert seen.get(timeout=300.0) != 50.0
                assert waiting.is_alive()
            os.pwrite(file.fileno(), text_of(Interval(50.0, 1.0, 1.0, 1)), 0)
            waiting.join(300.0)
        finally:
            watcher.kill()


#: A rank with the sampler beside it, as far as the sampler can tell; its words say how long it waits for the first look.
RANK = """
import sys, tempfile, time
from pytest_mlhpc.node.telemetry import sidecar as beside
with tempfile.TemporaryFile() as file:
    watcher = beside.start(file)
    if sys.argv[1] == "looked":
        beside.await_interval(file, watcher)
    print(watcher.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["started", "looked"])
def test_the_sampler_of_a_rank_that_is_killed_ends_by_itself(when):
    rank = subprocess.Popen([sys.executable, "-c", RANK, when], stdout=subprocess.PIPE, text=True)
    with rank:
        watcher = int(rank.stdout.readline())
        assert watcher in descendants(rank.pid)
        rank.kill()
    assert rank.returncode == -signal.SIGKILL
    try:
        poll(lambda: ended(watcher))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(watcher, signal.SIGKILL)


def test_a_sampler_that_died_is_not_waited_for(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "LOOK_S", 1e9)  # who waits for the dead waits for ever
    dead = subprocess.Popen(["false"])
    dead.wait()
    with (tmp_path / "intervals").open("w+b") as file:
        file.write(b"{}\n" * 3)
        file.flush()
        beside.await_interval(file, dead)
        assert file.tell() == 9


@pytest.fixture
def refused(beside):
    """Return what runs, with the sampler beside it, what must not begin; it returns the failure."""
    from pytest_mlhpc.node.worker.distributed import Group

    def run():
        begun = []
        watched = beside.watched(lambda *_: begun.append("trained"))
        with pytest.raises(WorkerFailure) as failure:
            watched(None, Group(), None, Path(), lambda *_: None)
        assert begun == []
        return failure.value

    return run


@pytest.mark.parametrize("mounted", [True, False])
def test_a_full_disk_is_reported_before_the_training_begins(refused, mounted, tmp_path, monkeypatch):
    folder = tmp_path / "small"
    with small_disk(folder, mounted=mounted) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with disk.full(left=8192):
            failure = refused()
        assert list(folder.iterdir()) == []
    assert str(failure).startswith(f"disk_full: telemetry has no file for what it sees in {folder} on ")
    assert f"{disk.words}; make room there, name another folder in TMPDIR, or run" in failure.text


def test_a_missing_folder_for_temporary_files_is_reported_before_the_training_begins(
    refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    text = "not_writable: .*No such file or directory; make room there, name another folder in TMPDIR"
    assert re.match(text, str(refused()))


@pytest.mark.parametrize(
    ("program", "why"),
    [("/no/python", "cannot be started on "), (shutil.which("false"), "ended with exit code 1 on ")],
)
def test_a_sampler_that_does_not_start_is_reported_before_the_training_begins(
    refused, program, why, monkeypatch
):
    monkeypatch.setattr(sys, "executable", program)
    assert re.match(
        f"launch_failed: .*the sampler of telemetry {why}.*, or run without telemetry$", str(refused())
    )
