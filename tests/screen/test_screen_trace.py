"""Traces of torch's profiler: what fills the profiled time, and what is left of it."""

import json
from pathlib import Path

import pytest
from screen_samples import reported

from pytest_mlhpc.screen.hook_output import length, profile_of, read_traces, union, without
from pytest_mlhpc.screen.slow_rank import find_slow_rank
from pytest_mlhpc.screen.usage import RankProcess


def event(name, begin, end, cat="cpu_op", tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 7, "tid": tid}


def test_intervals_are_joined_and_subtracted():
    joined = union([(5, 6), (0, 2), (1, 3), (9, 9)])
    assert joined == [(0, 3), (5, 6)]
    assert without([(0, 10)], joined) == [(3, 5), (6, 10)]
    assert without(joined, [(0, 10)]) == []
    assert without([(0, 1), (2, 3)], [(0.5, 2.5)]) == [(0, 0.5), (2.5, 3)]
    assert length(joined) == 4


def test_a_step_on_a_cpu_is_data_computing_exposed_communication_and_python():
    trace = {"traceEvents": [
        event("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 100, "user_annotation"),
        event("aten::linear", 200, 500),
        event("aten::addmm", 210, 490),
        event("gloo:all_reduce", 400, 900, "user_annotation", tid=9),
        event("Optimizer.step#SGD.step", 900, 1000, "user_annotation"),
    ]}  # fmt: skip
    found = profile_of(trace)
    parts = (
        found.seconds,
        found.data_s,
        found.computing_s,
        found.communicating_s,
        found.exposed_s,
        found.host_s,
    )
    # The host's are 100..200 and the optimizer's own frame.
    assert parts == pytest.approx((1000e-6, 100e-6, 300e-6, 500e-6, 400e-6, 200e-6))
    assert found.top == (("aten::addmm", pytest.approx(280 / 300)), ("aten::linear", pytest.approx(20 / 300)))
    assert not found.on_device


def test_on_a_device_its_kernels_count_and_not_their_launches():
    trace = {"traceEvents": [
        event("aten::mm", 0, 1000),
        event("sm90_gemm", 100, 400, "kernel", tid=20),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 600, "kernel", tid=21),
        event("Memcpy HtoD", 600, 650, "gpu_memcpy", tid=22),
    ]}  # fmt: skip
    found = profile_of(trace)
    assert (found.on_device, found.launches) == (True, 2)
    parts = (found.computing_s, found.communicating_s, found.exposed_s, found.host_s)
    assert parts == pytest.approx((350e-6, 300e-6, 200e-6, 450e-6))


@pytest.mark.parametrize(
    "trace",
    [
        *(None, [], {}, {"traceEvents": 1}),
        {"traceEvents": [1, {"ph": "X"}, {"ph": "X", "cat": "cpu_op", "ts": "a", "dur": 1}]},
    ],
    ids=str,
)
def test_what_is_no_trace_says_nothing(trace):
    assert profile_of(trace) is None


def write(folder, *lines):
    """Write what a program tells; the last line may be cut short."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "12.jsonl").write_text("".join(f"{text}\n" for text in texts))


def test_lines_of_a_program_that_was_killed_while_it_wrote_are_read_up_to_there(tmp_path):
    first = {"host": "n1", "rank": None, "ends": [1.0, 2.0], "waits": [0.0, 0.5]}
    second = {**first, "rank": 3, "ends": [3.0], "waits": [0.1]}
    write(tmp_path, first, second, '{"ends": [4.')
    (tmp_path / "12.trace.json").write_text('{"traceEvents": [')
    (one,) = read_traces(tmp_path)
    assert (one.pid, one.rank, one.ends, one.waits) == (12, 3, (1.0, 2.0, 3.0), (0.0, 0.5, 0.1))
    assert one.notes[0].startswith("a trace cannot be read")


def test_steps_under_the_profiler_and_the_first_ones_do_not_count(tmp_path):
    steps = {"ends": [float(number) for number in range(10)], "waits": [0.1] * 10}
    write(tmp_path, {"host": "n1", "rank": 0, **steps, "profiled": [4, 2], "profile_cost_s": 1})
    (one,) = read_traces(tmp_path)
    assert one.steps() == [(1.0, 0.1)] * 5  # steps 2, 3, 7, 8, 9 of 0..9


@pytest.mark.parametrize(
    "text",
    ["", "x", "[1]", '{"ends": 3, "waits": "a", "rank": "b", "profiled": [1]}', '{"ends": [null, "a"]}'],
)
def test_odd_files_are_no_steps(tmp_path, text):
    write(tmp_path, text)
    assert all(not one.ends for one in read_traces(tmp_path))
    assert read_traces(tmp_path / "gone") == ()


def test_recorded_traces_of_two_gloo_ranks_name_the_one_that_does_more():
    """Of torch 2.13, three steps each; rank 1 does ten matrix products more in each step. Events below 100 us are left out."""
    traces = json.loads(Path(__file__).with_name("gloo_traces.json").read_text(encoding="utf-8"))
    profiles = {int(rank): profile_of(trace) for rank, trace in traces.items()}
    assert [profiles[rank].communicating_s for rank in (0, 1)] == pytest.approx([0.1176, 0.0189], rel=0.01)
    assert profiles[1].top[0][0] == "aten::mm"
    ranks = [
        RankProcess(rank, "n1", None, (), reported(rank=rank, profile=one)) for rank, one in profiles.items()
    ]
    slow = find_slow_rank(ranks, ())
    assert (slow.rank, slow.share, slow.certain) == (1, pytest.approx(0.6, abs=0.05), True)
