"""What is said of samples: each limit is found with its figures, and none where there is none."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from screen_samples import GIB, MIB, device, found, process, profile, reported, samples, see

from pytest_mlhpc.node.telemetry.samples import NodeSample
from pytest_mlhpc.screen import run
from pytest_mlhpc.screen.limits import judge
from pytest_mlhpc.screen.report import LINES, report_lines


def alone(*devices, children=(), **more):
    """Looks at one process and its children."""

    def tree(second):
        below = [process(pid, second, parent=10, **child) for pid, child in enumerate(children, 11)]
        return [process(10, second, **more), *below]

    return samples(tree, lambda _second: devices)


def ranks(*cores, devices=()):
    """Looks at ranks that keep so many cores busy each."""
    return samples(
        lambda second: [process(10 + rank, second, cores=one, rank=rank) for rank, one in enumerate(cores)],
        lambda _second: devices,
    )


def with_node(looks, **rates):
    """Give looks a node of eight cores, whose counters grow at these rates."""
    return [
        replace(one, node=NodeSample("n1", 8, **{name: rate * second for name, rate in rates.items()}))
        for second, one in enumerate(looks)
    ]


def assert_found(kind, share, certain, text, *given):
    """One finding of this kind is made, and its text fits the pattern."""
    one = found(*given)[kind]
    assert (one.share, one.certain) == (pytest.approx(share), certain)
    assert fnmatchcase(one.text, text), one.text


@pytest.mark.parametrize(
    ("looks", "spoken", "share", "certain", "text"),
    [
        (
            alone(),
            [reported(step=0.2, wait=0.15)],
            0.75,
            True,
            "*75 % of a step in the DataLoader (150 ms of 200 ms, 28 steps)*",
        ),
        (alone(cores=0.1, children=[{}] * 3), (), 0.9, False, "*3 processes of its own keep 3.0 cores busy"),
        (
            samples(lambda at: [process(10, at, cores=0.1, main_state="D", read_bytes=at * 50 * MIB)]),
            (),
            1.0,
            False,
            "*100 % of samples, 50.0 MiB/s from it",
        ),
    ],
    ids=[
        "told by the hook",
        "seen from outside: a sleeping first thread with busy children",
        "uninterruptible sleep",
    ],
)
def test_waiting_for_data_is_found(looks, spoken, share, certain, text):
    assert_found("waiting for data", share, certain, text, looks, spoken)


@pytest.mark.parametrize(
    ("children", "text", "advice"),
    [
        ([], "no loader processes", "num_workers"),
        ([{"cores": 1.0, "main_state": "R"}] * 2, "its 2 processes of loading", "they compute all the time"),
        ([{"cores": 0.1, "main_state": "D"}] * 2, "its 2 processes of loading", "storage is too slow"),
        ([{"cores": 0.02, "main_state": "S"}] * 2, "its 2 processes of loading", "they wait themselves"),
    ],
)
def test_what_loader_processes_do_tells_what_would_help(children, text, advice):
    one = found(alone(cores=0.2, children=children), [reported(wait=0.08)])["waiting for data"]
    assert text in one.text
    assert advice in one.advice


@pytest.mark.parametrize(
    ("kind", "share", "text", "parts"),
    [
        ("computing", 0.97, "*most of it: aten::mm 80 %, aten::add_ 10 %", {"computing_s": 0.97}),
        ("host-bound", 0.4, "40 % of the profiled time is in Python*", {"computing_s": 0.6, "host_s": 0.4}),
        (
            "host-bound launch gaps",
            0.5,
            "no kernel runs in 50 % of the profiled time; 45000 kernels of 10 us each",
            {"computing_s": 0.45, "host_s": 0.5, "on_device": True, "launches": 45_000},
        ),
    ],
    ids=["the operations", "time between operations on a CPU", "gaps between kernels"],
)
def test_a_profile_names(kind, share, text, parts):
    assert_found(kind, share, True, text, alone(), [reported(profile=profile(**parts))])


def test_an_idle_gpu_below_a_busy_first_thread_is_host_bound():
    text = "GPU 0 is busy 35 % of the time while the first thread of rank 0 computes 100 % of it"
    assert_found("host-bound launch gaps", 0.65, False, text, alone(device(busy=0.35, pids=(10,))))


def in_collectives(*shares, waits=(0.0,) * 9):
    """What ranks tell that are in collectives for these shares of the time."""
    return [
        reported(10 + rank, rank, wait=waits[rank], profile=profile(computing_s=1 - one, communicating_s=one, exposed_s=one))
        for rank, one in enumerate(shares)
    ]  # fmt: skip


def test_collectives_that_nothing_hides_are_communication():
    parts = profile(computing_s=0.4, communicating_s=0.6, exposed_s=0.5)
    one = found(ranks(1.0, 1.0), [reported(10 + rank, rank, profile=parts) for rank in range(2)])
    assert one["communication"].share == pytest.approx(0.5)
    assert "one slow rank" not in one


@pytest.mark.parametrize(
    ("kind", "share", "text"),
    [
        ("one slow rank", 0.5, "rank 2: the others are in collectives 60 % of the time, it 10 %*"),
        ("communication", 0.1, "*(rank 2, which waits least)"),
    ],
)
def test_the_rank_that_is_shortest_in_collectives_keeps_the_others_waiting(kind, share, text):
    assert_found(kind, share, True, text, ranks(*[1.0] * 4), in_collectives(0.6, 0.62, 0.1, 0.58))


def test_a_slow_rank_that_waits_for_data_is_said_to():
    spoken = in_collectives(0.5, 0.01, waits=(0.0, 0.05))
    text = "*it waits for data 50 % of a step, the others 0 %"
    assert_found("one slow rank", 0.49, True, text, ranks(1.0, 1.0), spoken)


def gpus(field, slow, usual):
    """Four GPUs, of which the second has its own figure."""
    return [device(n, pids=(10 + n,), **{field: slow if n == 1 else usual}) for n in range(4)]


@pytest.mark.parametrize(
    ("cores", "devices", "share", "text"),
    [
        (
            (0.3, 0.3, 0.3, 0.9),
            (),
            2 / 3,
            "rank 3 keeps 0.90 cores busy, the others 0.30: they sleep while it works",
        ),
        ([1.0] * 4, gpus("busy", 0.4, 1.0), 0.6, "rank 1: its GPU is idle 60 % of the time*"),
        (
            [1.0] * 4,
            gpus("clock_hz", 1.2e9, 1.9e9),
            7 / 19.8,
            "rank 1: GPU 1 clocks at 61 % of its highest, the others at 96 %",
        ),
    ],
    ids=["the one that never sleeps", "the one whose GPU is idle", "the one whose GPU clocks low"],
)
def test_from_outside_the_slow_rank_is(cores, devices, share, text):
    assert_found("one slow rank", share, False, text, ranks(*cores, devices=devices))


def holding(level, seconds=30, start_ticks=5):
    """Looks at a process whose memory is at a *level*, in bytes, after so many seconds; the first at 100 s."""
    values = {"start_ticks": start_ticks}
    return samples(lambda second: [process(10, second, rss_bytes=level(second), **values)], seconds=seconds)


def grown_until(second):
    return lambda now: GIB + (now if now < second else 0) * 64 * MIB


@pytest.mark.parametrize(
    ("looks", "text"),
    [
        (holding(grown_until(30)), "memory on n1 grows by 64.0 MiB/s: the 32.0 GiB that are free last 9 min"),
        (holding(grown_until(14), 16), "*grows by 64.0 MiB/s*"),
        (samples(lambda second: [process(10, second)], memory_free_bytes=GIB), "*1.0 GiB of 64.0 GiB free"),
    ],
    ids=["grows", "grows, though the program lets it go at its end", "is all but full"],
)
def test_memory_is_reported_as(looks, text):
    assert_found("memory", 0.0, True, text, looks)


@pytest.mark.parametrize(("seconds", "grows"), [(7, False), (29, False), (60, True)])
def test_memory_of_a_start_is_no_growth(seconds, grows):
    looks = holding(grown_until(seconds), seconds, start_ticks=9_950)
    assert ("memory" in found(looks)) is grows


def test_a_program_that_takes_long_to_end_hides_no_growth_of_its_training():
    looks = holding(grown_until(14), 40)
    assert "memory" not in found(looks)
    (one,) = [one for one in judge(run.see(looks, [reported(step=0.45)])) if one.kind == "memory"]
    assert "grows by 64.0 MiB/s" in one.text


@pytest.mark.parametrize(
    ("reasons", "kind", "text"),
    [
        (0x4, "power limit", "held by its power limit in 100 % of samples (690 of 700 W, up to 62 C, clock at 80 %)"),
        (0x80, "power limit", "a power brake of the machine"),
        (0x20, "thermal limit", "heat (by the driver)"),
        (0x48, "thermal limit", "heat (by the board)"),
    ],
)  # fmt: skip
def test_throttled_clocks_have_their_reason(reasons, kind, text):
    one = found(alone(device(reasons=reasons, power_w=690.0, celsius=62.0, clock_hz=0.8 * 1.98e9)))[kind]
    assert text in one.text
    assert one.share == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("looks", "share", "certain", "text"),
    [
        (with_node(alone(), throttled_s=0.5), 0.5, True, "*quota on n1 was used up 50 % of the time"),
        (
            with_node(alone(), busy_s=8.0),
            7 / 8,
            False,
            "all 8 cores of n1 are busy, 7.0 of them with other programs, 1.0 with its own",
        ),
        (with_node(alone(cores=0.2, running=0), busy_s=8.0), 0.2, False, "*"),
        (with_node(alone(cores=0.05, main_state="S"), busy_s=8.0), 7.95 / 8, False, "*"),
        (with_node(alone(cores=0.05, main_state="S"), busy_s=8.0, throttled_s=0.9), 0.9, True, "*"),
        (
            with_node(alone(cores=0.0, running=0, children=[{"cores": 0.8}]), busy_s=8.0),
            0.8,
            False,
            "*7.2 of them with other programs, 0.8 with its own",
        ),
        (alone(cores=0.3, main_state="R"), 0.7, False, "*could run in 100 % of samples, but ran 30 %*"),
    ],
    ids=[
        "a quota that is used up",
        "other programs on the cores of one that computes",
        "no more than the time in which they are wanted",
        "threads that wait though the first one sleeps",
        "threads that wait for a quota though the first one sleeps",
        "helpers that compute",
        "a thread that could run but does not",
    ],
)
def test_cores_limit(looks, share, certain, text):
    assert_found("cores", share, certain, text, looks)


@pytest.mark.parametrize("throttled", [{}, {"throttled_s": 0.9}])
@pytest.mark.parametrize("first", ["S", "R"])
def test_cores_do_not_limit_a_program_that_sleeps(first, throttled):
    def sleeping(second):
        started = first == "R" and second < 4  # a busy node is slow to start it
        state = {"running": int(started), "main_state": "R" if started else "S"}
        return [process(10, second, cores=0.01, name="sleep", **state)]

    assert found(with_node(samples(sleeping), busy_s=8.0, **throttled)) == {}


@pytest.mark.parametrize(
    ("kinds", "looks", "spoken"),
    [
        ({"waiting for data"}, alone(), [reported(wait=0.005)]),
        ({"one slow rank"}, ranks(1.0, 1.02, 1.04, 1.06), ()),
        ({"one slow rank"}, ranks(0.2, 0.2, 0.9, 0.9), ()),
        ({"memory"}, holding(lambda second: min(second, 8) * 500 * MIB), ()),
        ({"memory"}, holding(lambda second: (second % 5) * 500 * MIB), ()),
        ({"memory"}, holding(lambda second: 500 * MIB * (second >= 15)), ()),
        ({"memory"}, holding(lambda second: 8 * GIB - second * MIB), ()),
        ({"power limit", "thermal limit"}, alone(device(busy=0.0, reasons=0x1 | 0x4, clock_hz=3e8)), ()),
        ({"cores"}, with_node(alone(), busy_s=6.0), ()),
    ],
    ids=[
        "waits below a tenth",
        "ranks that spin while they wait",
        "two halves of ranks",
        "a cache that fills",
        "a saw",
        "a jump",
        "a fall",
        "an idle GPU",
        "free cores",
    ],
)
def test_nothing_is_found_in(kinds, looks, spoken):
    assert not kinds & set(found(looks, spoken))


def test_the_report_has_at_most_ten_lines_the_largest_share_first():
    looks = samples(
        lambda second: [process(10 + rank, second, rank=rank, rss_bytes=second * 64 * MIB, cores=0.5) for rank in range(2)],
        lambda _second: [device(rank, reasons=0x24, memory_used_bytes=80 * GIB) for rank in range(2)],
        seconds=30, memory_free_bytes=GIB,
    )  # fmt: skip
    seen = see(looks, [reported(10, 0, wait=0.05), reported(11, 1, wait=0.02)])
    findings = judge(seen)
    text = report_lines("train.py", seen, findings, ["steps (no torch)"])
    assert len(findings) >= 5
    assert len(text) <= LINES
    first = "screened train.py for 29 s: 2 ranks on 1 node, 2 x NVIDIA H100 80GB HBM3, 100 ms a step; screening took"
    assert text[0].startswith(first)
    assert text[-1] == "not seen: steps (no torch)"
    shares = [one.share for one in findings]
    assert shares == sorted(shares, reverse=True)


def test_nothing_found_is_said():
    seen = see(alone(cores=0.0))
    assert judge(seen) == ()
    assert report_lines("sleep", seen, (), ())[1].startswith("nothing stands out")
