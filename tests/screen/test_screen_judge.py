"""What is said of samples: each limit is found with its figures, and none where there is none."""

from dataclasses import replace

import pytest
from screen_samples import GIB, MIB, device, found, process, profile, samples, see, told

from pytest_mlhpc.screen import screen_cli
from pytest_mlhpc.screen.judge import judge
from pytest_mlhpc.screen.node.samples import NodeSample
from pytest_mlhpc.screen.words import LINES, lines


def alone(devices=(), **more):
    """Looks at one process."""
    return samples(lambda second: [process(10, second, **more)], lambda _second: devices)


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


def test_waiting_for_data_that_the_hook_told_is_a_share_of_the_steps():
    one = found(alone(), [told(step=0.2, wait=0.15)])["waiting for data"]
    assert one.share == pytest.approx(0.75)
    assert "75 % of a step in the DataLoader (150 ms of 200 ms, 28 steps); no loader processes" in one.text
    assert "num_workers" in one.advice


@pytest.mark.parametrize(
    ("cores", "state", "advice"),
    [
        (1.0, "R", "they compute all the time"),
        (0.1, "D", "storage is too slow"),
        (0.02, "S", "they wait themselves"),
    ],
)
def test_what_loader_processes_do_tells_what_would_help(cores, state, advice):
    def tree(second):
        workers = [process(pid, second, cores=cores, parent=10, main_state=state) for pid in (11, 12)]
        return [process(10, second, cores=0.2), *workers]

    one = found(samples(tree), [told(wait=0.08)])["waiting for data"]
    assert "its 2 processes of loading" in one.text
    assert advice in one.advice


def test_waiting_below_a_tenth_is_not_told():
    assert "waiting for data" not in found(alone(), [told(wait=0.005)])


def test_a_sleeping_first_thread_with_busy_children_waits_for_data_as_far_as_one_sees_from_outside():
    def tree(second):
        return [process(10, second, cores=0.1), *(process(pid, second, parent=10) for pid in (11, 12, 13))]

    one = found(samples(tree))["waiting for data"]
    assert not one.certain
    assert "3 processes of its own keep 3.0 cores busy" in one.text


def test_a_rank_in_uninterruptible_sleep_waits_for_storage():
    def reading(second):
        return [process(10, second, cores=0.1, main_state="D", read_bytes=second * 50 * MIB)]

    assert "100 % of looks, 50.0 MiB/s from it" in found(samples(reading))["waiting for data"].text


def test_computing_names_the_operations():
    one = found(alone(), [told(profile=profile(computing_s=0.97))])
    assert list(one) == ["computing"]
    assert one["computing"].text.endswith("most of it: aten::mm 80 %, aten::add_ 10 %")


def in_collectives(*shares, waits=(0.0,) * 9):
    """What ranks tell that are in collectives for these shares of the time."""
    return [
        told(10 + rank, rank, wait=waits[rank], profile=profile(computing_s=1 - one, communicating_s=one, exposed_s=one))
        for rank, one in enumerate(shares)
    ]  # fmt: skip


def test_collectives_that_nothing_hides_are_communication():
    parts = profile(computing_s=0.4, communicating_s=0.6, exposed_s=0.5)
    one = found(ranks(1.0, 1.0), [told(10 + rank, rank, profile=parts) for rank in range(2)])
    assert one["communication"].share == pytest.approx(0.5)
    assert "one slow rank" not in one


def test_the_rank_that_is_shortest_in_collectives_keeps_the_others_waiting():
    one = found(ranks(*[1.0] * 4), in_collectives(0.6, 0.62, 0.1, 0.58))
    assert one["one slow rank"].share == pytest.approx(0.5)
    text = "rank 2: the others are in collectives 60 % of the time, it 10 %"
    assert one["one slow rank"].text.startswith(text)
    assert one["communication"].share == pytest.approx(0.1)


def test_a_slow_rank_that_waits_for_data_is_said_to():
    one = found(ranks(1.0, 1.0), in_collectives(0.5, 0.01, waits=(0.0, 0.05)))
    assert one["one slow rank"].text.endswith("it waits for data 50 % of a step, the others 0 %")


def test_from_outside_the_slow_rank_is_the_one_that_never_sleeps():
    one = found(ranks(0.3, 0.3, 0.3, 0.9))["one slow rank"]
    assert not one.certain
    assert one.text == "rank 3 keeps 0.90 cores busy, the others 0.30: they sleep while it works"


@pytest.mark.parametrize(
    "cores", [(1.0, 1.02, 1.04, 1.06), (0.2, 0.2, 0.9, 0.9)], ids=["ranks that spin while they wait", "two halves"]
)  # fmt: skip
def test_no_rank_is_slow_among(cores):
    assert "one slow rank" not in found(ranks(*cores))


@pytest.mark.parametrize(
    ("field", "slow", "usual", "text"),
    [
        ("busy", 0.4, 1.0, "rank 1: its GPU is idle 60 % of the time"),
        ("clock_hz", 1.2e9, 1.9e9, "rank 1: GPU 1 clocks at 61 % of its highest, the others at 96 %"),
    ],
)
def test_a_gpu_unlike_the_others_belongs_to_the_slow_rank(field, slow, usual, text):
    boards = [device(n, pids=(10 + n,), **{field: slow if n == 1 else usual}) for n in range(4)]
    assert text in found(ranks(*[1.0] * 4, devices=boards))["one slow rank"].text


def test_an_idle_gpu_below_a_busy_first_thread_is_host_bound():
    one = found(alone([device(busy=0.35, pids=(10,))]))["host-bound launch gaps"]
    assert one.share == pytest.approx(0.65)
    assert "GPU 0 is busy 35 % of the time while the first thread of rank 0 computes 100 % of it" in one.text


def test_gaps_between_kernels_of_a_profile_are_host_bound():
    parts = profile(computing_s=0.45, host_s=0.5, on_device=True, launches=45_000)
    one = found(alone(), [told(profile=parts)])["host-bound launch gaps"]
    assert one.text == "no kernel runs in 50 % of the profiled time; 45000 kernels of 10 us each"


def test_time_between_operations_on_a_cpu_is_python():
    one = found(alone(), [told(profile=profile(computing_s=0.6, host_s=0.4))])
    assert "40 % of the profiled time is in Python" in one["host-bound"].text


def holding(level, seconds):
    """Looks at a process whose memory is at a *level*, in bytes, after so many seconds."""
    return samples(lambda second: [process(10, second, rss_bytes=level(second))], seconds=seconds)


def grown_until(second):
    return lambda now: GIB + (now if now < second else 0) * 64 * MIB


def test_memory_that_grows_has_an_end():
    text = "memory on n1 grows by 64.0 MiB/s: the 32.0 GiB that are free last 9 min"
    assert text in found(holding(grown_until(30), 30))["memory"].text


def test_what_a_program_lets_go_at_its_end_hides_no_growth():
    assert "grows by 64.0 MiB/s" in found(holding(grown_until(14), 16))["memory"].text


def test_a_program_that_takes_long_to_end_hides_no_growth_of_its_training():
    looks = holding(grown_until(14), 40)
    assert "memory" not in found(looks)
    (one,) = [one for one in judge(screen_cli.see(looks, [told(step=0.45)])) if one.kind == "memory"]
    assert "grows by 64.0 MiB/s" in one.text


MOVES = {
    "a cache that fills": lambda second: min(second, 8) * 500 * MIB,
    "a saw": lambda second: (second % 5) * 500 * MIB,
    "a jump": lambda second: 500 * MIB * (second >= 15),
    "a fall": lambda second: 8 * GIB - second * MIB,
}


@pytest.mark.parametrize("level", MOVES.values(), ids=MOVES)
def test_memory_that_only_moves_is_no_growth(level):
    assert "memory" not in found(holding(level, 30))


def test_memory_that_is_all_but_full_is_told():
    looks = samples(lambda second: [process(10, second)], memory_free_bytes=GIB)
    assert "1.0 GiB of 64.0 GiB free" in found(looks)["memory"].text


@pytest.mark.parametrize(
    ("reasons", "kind", "text"),
    [
        (0x4, "power limit", "held by its power limit in 100 % of looks (690 of 700 W, up to 62 C, clock at 80 %)"),
        (0x80, "power limit", "a power brake of the machine"),
        (0x20, "thermal limit", "heat (by the driver)"),
        (0x48, "thermal limit", "heat (by the board)"),
    ],
)  # fmt: skip
def test_clocks_that_are_held_down_have_their_reason(reasons, kind, text):
    one = found(alone([device(reasons=reasons, power_w=690.0, celsius=62.0, clock_hz=0.8 * 1.98e9)]))[kind]
    assert text in one.text
    assert one.share == pytest.approx(0.2)


def test_an_idle_gpu_is_not_held_by_anything():
    idle = device(busy=0.0, reasons=0x1 | 0x4, clock_hz=3e8)
    assert not {"power limit", "thermal limit"} & set(found(alone([idle])))


def test_a_quota_that_is_used_up_is_told():
    one = found(with_node(alone(), throttled_s=0.5))["cores"]
    assert "quota on n1 was used up 50 % of the time" in one.text


def test_other_programs_on_the_cores_of_one_that_computes_are_told():
    one = found(with_node(alone(), busy_s=8.0))["cores"]
    assert one.text == "all 8 cores of n1 are busy, 7.0 of them with other programs, 1.0 with its own"
    assert one.share == pytest.approx(7 / 8)
    assert not one.certain


@pytest.mark.parametrize("throttled", [{}, {"throttled_s": 0.9}])
@pytest.mark.parametrize("first", ["S", "R"])
def test_cores_do_not_limit_a_program_that_sleeps(first, throttled):
    def sleeping(second):
        started = first == "R" and second < 4  # a busy node is slow to start it
        state = {"running": int(started), "main_state": "R" if started else "S"}
        return [process(10, second, cores=0.01, name="sleep", **state)]

    assert found(with_node(samples(sleeping), busy_s=8.0, **throttled)) == {}


def test_cores_limit_no_more_than_the_time_in_which_they_are_wanted():
    resting = with_node(alone(cores=0.2, running=0), busy_s=8.0)
    assert found(resting)["cores"].share == pytest.approx(0.2)


@pytest.mark.parametrize(("throttled", "share"), [({}, 7.95 / 8), ({"throttled_s": 0.9}, 0.9)])
def test_threads_that_wait_for_a_core_want_it_all_the_time_though_the_first_one_sleeps(throttled, share):
    backward = alone(cores=0.05, running=1, main_state="S")
    assert found(with_node(backward, busy_s=8.0, **throttled))["cores"].share == pytest.approx(share)


def test_helpers_that_compute_want_cores():
    def loading(second):
        return [process(10, second, cores=0.0, running=0), process(11, second, cores=0.8, parent=10)]

    one = found(with_node(samples(loading), busy_s=8.0))["cores"]
    assert one.share == pytest.approx(0.8)
    assert one.text.endswith("7.2 of them with other programs, 0.8 with its own")


def test_free_cores_limit_nobody():
    assert "cores" not in found(with_node(alone(), busy_s=6.0))


def test_a_thread_that_could_run_but_does_not_waits_for_a_core():
    one = found(alone(cores=0.3, main_state="R"))["cores"]
    assert one.share == pytest.approx(0.7)
    assert "could run in 100 % of looks, but ran 30 %" in one.text


def test_the_report_has_at_most_ten_lines_the_largest_share_first():
    looks = samples(
        lambda second: [process(10 + rank, second, rank=rank, rss_bytes=second * 64 * MIB, cores=0.5) for rank in range(2)],
        lambda _second: [device(rank, reasons=0x24, memory_used_bytes=80 * GIB) for rank in range(2)],
        seconds=30, memory_free_bytes=GIB,
    )  # fmt: skip
    seen = see(looks, [told(10, 0, wait=0.05), told(11, 1, wait=0.02)])
    findings = judge(seen)
    text = lines("train.py", seen, findings, ["steps (no torch)"])
    assert len(findings) >= 5
    assert len(text) <= LINES
    first = "screened train.py for 29 s: 2 ranks on 1 node, 2 x NVIDIA H100 80GB HBM3, 100 ms a step; looking took"
    assert text[0].startswith(first)
    assert text[-1] == "not seen: steps (no torch)"
    shares = [one.share for one in findings]
    assert shares == sorted(shares, reverse=True)


def test_nothing_found_is_said():
    seen = see(alone(cores=0.0))
    assert judge(seen) == ()
    assert lines("sleep", seen, (), ())[1].startswith("nothing stands out")
