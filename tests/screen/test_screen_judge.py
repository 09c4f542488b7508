"""What is said of samples: each limit is found with its figures, and none where there is none."""

from __future__ import annotations

import pytest
from screen_samples import GIB, MIB, device, found, process, profile, samples, see, told

from pytest_mlhpc.screen import screen_cli
from pytest_mlhpc.screen.judge import judge
from pytest_mlhpc.screen.node.samples import NodeSample, Sample
from pytest_mlhpc.screen.words import LINES, lines


def alone(second):
    return [process(10, second)]


def test_waiting_for_data_that_the_hook_told_is_a_share_of_the_steps():
    one = found(samples(alone), [told(step=0.2, wait=0.15)])["waiting for data"]
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
    assert "waiting for data" not in found(samples(alone), [told(wait=0.005)])


def test_a_sleeping_first_thread_with_busy_children_waits_for_data_as_far_as_one_sees_from_outside():
    def tree(second):
        return [process(10, second, cores=0.1), *(process(pid, second, parent=10) for pid in (11, 12, 13))]

    one = found(samples(tree))["waiting for data"]
    assert not one.certain
    assert "3 processes of its own keep 3.0 cores busy" in one.text


def test_a_rank_in_uninterruptible_sleep_waits_for_storage():
    one = found(
        samples(lambda second: [process(10, second, cores=0.1, main_state="D", read_bytes=second * 50 * MIB)])
    )
    assert "100 % of looks, 50.0 MiB/s from it" in one["waiting for data"].text


def test_computing_names_the_operations():
    one = found(samples(alone), [told(profile=profile(computing_s=0.97))])
    assert list(one) == ["computing"]
    assert one["computing"].text.endswith("most of it: aten::mm 80 %, aten::add_ 10 %")


def test_collectives_that_nothing_hides_are_communication():
    parts = profile(computing_s=0.4, communicating_s=0.6, exposed_s=0.5)
    spoken = [told(pid, rank, profile=parts) for rank, pid in enumerate((10, 20))]
    one = found(samples(lambda second: [process(10, second), process(20, second)]), spoken)
    assert one["communication"].share == pytest.approx(0.5)
    assert "one slow rank" not in one


def test_the_rank_that_is_shortest_in_collectives_keeps_the_others_waiting():
    waits = (0.6, 0.62, 0.1, 0.58)
    spoken = [
        told(10 + rank, rank, profile=profile(computing_s=1 - wait, communicating_s=wait, exposed_s=wait))
        for rank, wait in enumerate(waits)
    ]
    one = found(samples(lambda second: [process(10 + rank, second) for rank in range(4)]), spoken)
    assert one["one slow rank"].share == pytest.approx(0.5)
    assert one["one slow rank"].text.startswith(
        "rank 2: the others are in collectives 60 % of the time, it 10 %"
    )
    assert one["communication"].share == pytest.approx(0.1)


def test_a_slow_rank_that_waits_for_data_is_said_to():
    spoken = [
        told(10, 0, wait=0.0, profile=profile(communicating_s=0.5, exposed_s=0.5, computing_s=0.5)),
        told(11, 1, wait=0.05, profile=profile(communicating_s=0.01, exposed_s=0.01, computing_s=0.5)),
    ]
    one = found(samples(lambda second: [process(10, second), process(11, second)]), spoken)
    assert one["one slow rank"].text.endswith("it waits for data 50 % of a step, the others 0 %")


def test_from_outside_the_slow_rank_is_the_one_that_never_sleeps():
    def ranks(second):
        return [process(10 + rank, second, cores=0.9 if rank == 3 else 0.3, rank=rank) for rank in range(4)]

    one = found(samples(ranks))["one slow rank"]
    assert not one.certain
    assert one.text == "rank 3 keeps 0.90 cores busy, the others 0.30: they sleep while it works"


def test_ranks_that_spin_while_they_wait_name_nobody():
    assert "one slow rank" not in found(
        samples(
            lambda second: [
                process(10 + rank, second, cores=1.0 + 0.02 * rank, rank=rank) for rank in range(4)
            ]
        )
    )


def test_two_halves_of_ranks_are_no_slow_rank():
    assert "one slow rank" not in found(
        samples(
            lambda second: [
                process(10 + rank, second, cores=0.9 if rank > 1 else 0.2, rank=rank) for rank in range(4)
            ]
        )
    )


def test_an_idle_gpu_among_busy_ones_belongs_to_the_slow_rank():
    looks = samples(
        lambda second: [process(10 + rank, second, rank=rank) for rank in range(4)],
        lambda _second: [
            device(rank, busy=0.4 if rank == 1 else 1.0, pids=(10 + rank,)) for rank in range(4)
        ],
    )
    assert "rank 1: its GPU is idle 60 % of the time" in found(looks)["one slow rank"].text


def test_a_gpu_with_a_lower_clock_belongs_to_the_slow_rank():
    looks = samples(
        lambda second: [process(10 + rank, second, rank=rank) for rank in range(4)],
        lambda _second: [
            device(rank, clock_hz=1.2e9 if rank == 2 else 1.9e9, pids=(10 + rank,)) for rank in range(4)
        ],
    )
    assert (
        "rank 2: GPU 2 clocks at 61 % of its highest, the others at 96 %"
        in found(looks)["one slow rank"].text
    )


def test_an_idle_gpu_below_a_busy_first_thread_is_host_bound():
    looks = samples(alone, lambda _second: [device(busy=0.35, pids=(10,))])
    one = found(looks)["host-bound launch gaps"]
    assert one.share == pytest.approx(0.65)
    assert "GPU 0 is busy 35 % of the time while the first thread of rank 0 computes 100 % of it" in one.text


def test_gaps_between_kernels_of_a_profile_are_host_bound():
    parts = profile(computing_s=0.45, host_s=0.5, on_device=True, launches=45_000)
    one = found(samples(alone), [told(profile=parts)])["host-bound launch gaps"]
    assert one.text == "no kernel runs in 50 % of the profiled time; 45000 kernels of 10 us each"


def test_time_between_operations_on_a_cpu_is_python():
    one = found(samples(alone), [told(profile=profile(computing_s=0.6, host_s=0.4))])
    assert "40 % of the profiled time is in Python" in one["host-bound"].text


def test_memory_that_grows_has_an_end():
    looks = samples(lambda second: [process(10, second, rss_bytes=GIB + second * 64 * MIB)], seconds=30)
    one = found(looks)["memory"]
    assert "memory on n1 grows by 64.0 MiB/s: the 32.0 GiB that are free last 9 min" in one.text


def test_what_a_program_lets_go_at_its_end_hides_no_growth():
    looks = samples(
        lambda second: [process(10, second, rss_bytes=GIB + (second if second < 14 else 0) * 64 * MIB)],
        seconds=16,
    )
    assert "grows by 64.0 MiB/s" in found(looks)["memory"].text


def test_a_program_that_takes_long_to_end_hides_no_growth_of_its_training():
    looks = samples(
        lambda second: [process(10, second, rss_bytes=GIB + (second if second < 14 else 0) * 64 * MIB)],
        seconds=40,
    )
    assert "memory" not in found(looks)
    one = next(one for one in judge(screen_cli.see(looks, [told(step=0.45)])) if one.kind == "memory")
    assert "grows by 64.0 MiB/s" in one.text


@pytest.mark.parametrize(
    "level",
    [
        lambda second: min(second, 8) * 500 * MIB,  # a cache that fills
        lambda second: (second % 5) * 500 * MIB,  # a saw
        lambda second: 500 * MIB * (second >= 15),  # a jump
        lambda second: 8 * GIB - second * MIB,
    ],
)
def test_memory_that_only_moves_is_no_growth(level):
    assert "memory" not in found(
        samples(lambda second: [process(10, second, rss_bytes=level(second))], seconds=30)
    )


def test_memory_that_is_all_but_full_is_told():
    assert "1.0 GiB of 64.0 GiB free" in found(samples(alone, memory_free_bytes=GIB))["memory"].text


@pytest.mark.parametrize(
    ("reasons", "kind", "words"),
    [
        (
            0x4,
            "power limit",
            "held by its power limit in 100 % of looks (690 of 700 W, up to 62 C, clock at 80 %)",
        ),
        (0x80, "power limit", "a power brake of the machine"),
        (0x20, "thermal limit", "heat (by the driver)"),
        (0x48, "thermal limit", "heat (by the board)"),
    ],
)
def test_clocks_that_are_held_down_have_their_reason(reasons, kind, words):
    held = device(reasons=reasons, power_w=690.0, celsius=62.0, clock_hz=0.8 * 1.98e9)
    one = found(samples(alone, lambda _second: [held]))[kind]
    assert words in one.text
    assert one.share == pytest.approx(0.2)


def test_an_idle_gpu_is_not_held_by_anything():
    looks = samples(alone, lambda _second: [device(busy=0.0, reasons=0x1 | 0x4, clock_hz=3e8)])
    assert not {"power limit", "thermal limit"} & set(found(looks))


def test_a_quota_that_is_used_up_is_told():
    looks = [
        Sample(one.time_s, one.cost_s, type(one.node)("n1", 8, throttled_s=0.5 * second), one.processes)
        for second, one in enumerate(samples(alone))
    ]
    assert "quota on n1 was used up 50 % of the time" in found(looks)["cores"].text


def crowded(tree, busy=8.0, throttled=None):
    """Looks at a node of eight cores that all programs together keep *busy*."""
    return [
        Sample(
            one.time_s,
            one.cost_s,
            NodeSample(
                "n1", 8, busy_s=busy * second, throttled_s=None if throttled is None else throttled * second
            ),
            one.processes,
        )
        for second, one in enumerate(samples(tree))
    ]


def test_other_programs_on_the_cores_of_one_that_computes_are_told():
    one = found(crowded(alone))["cores"]
    assert one.text == "all 8 cores of n1 are busy, 7.0 of them with other programs, 1.0 with its own"
    assert one.share == pytest.approx(7 / 8)
    assert not one.certain


@pytest.mark.parametrize("throttled", [None, 0.9])
@pytest.mark.parametrize("first", ["S", "R"])
def test_cores_do_not_limit_a_program_that_sleeps(first, throttled):
    def sleeping(second):
        started = first == "R" and second < 4  # a busy node is slow to start it
        return [
            process(
                10,
                second,
                cores=0.01,
                name="sleep",
                running=int(started),
                main_state="R" if started else "S",
            )
        ]

    assert found(crowded(sleeping, throttled=throttled)) == {}


def test_cores_limit_no_more_than_the_time_in_which_they_are_wanted():
    def resting(second):
        return [process(10, second, cores=0.2, running=0)]

    assert found(crowded(resting))["cores"].share == pytest.approx(0.2)


@pytest.mark.parametrize("throttled", [None, 0.9])
def test_threads_that_wait_for_a_core_want_it_all_the_time_though_the_first_one_sleeps(throttled):
    def backward(second):
        return [process(10, second, cores=0.05, running=1, main_state="S")]

    one = found(crowded(backward, throttled=throttled))["cores"]
    assert one.share == pytest.approx(0.9 if throttled else 7.95 / 8)


def test_helpers_that_compute_want_cores():
    def loading(second):
        return [
            process(10, second, cores=0.0, running=0),
            process(11, second, cores=0.8, parent=10),
        ]

    one = found(crowded(loading))["cores"]
    assert one.share == pytest.approx(0.8)
    assert one.text.endswith("7.2 of them with other programs, 0.8 with its own")


def test_free_cores_limit_nobody():
    assert "cores" not in found(crowded(alone, busy=6.0))


def test_a_thread_that_could_run_but_does_not_waits_for_a_core():
    one = found(samples(lambda second: [process(10, second, cores=0.3, main_state="R")]))["cores"]
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
    assert text[0].startswith(
        "screened train.py for 29 s: 2 ranks on 1 node, 2 x NVIDIA H100 80GB HBM3, 100 ms a step; looking took"
    )
    assert text[-1] == "not seen: steps (no torch)"
    shares = [one.share for one in findings]
    assert shares == sorted(shares, reverse=True)


def test_nothing_found_is_said():
    seen = see(samples(lambda second: [process(10, second, cores=0.0)]))
    assert judge(seen) == ()
    assert lines("sleep", seen, (), ())[1].startswith("nothing stands out")
