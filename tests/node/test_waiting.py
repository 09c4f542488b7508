"""How long threads of a rank spin for each other, as the machine is busy or not."""

import threading

import pytest
from pods import run_plan

from pytest_mlhpc.node import cores
from pytest_mlhpc.node.cores import BRIEF, used_cores, waiting_variables


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two cores; while others are watched, so many ticks of ten are used on each: ``machine(7, 0)``."""
    stat = tmp_path / "stat"

    def write(used, all_ticks):
        lines = [
            f"cpu{core} {busy} 0 0 {ticks - busy} 0 0 0 0 0 0"
            for core, (busy, ticks) in enumerate(zip(used, all_ticks, strict=True))
        ]
        stat.write_text("\n".join(["cpu 0 0 0 0 0 0 0 0", *lines, "intr 1", ""]))

    def watched(*used):
        write((100, 100), (1000, 1000))
        monkeypatch.setattr(cores.time, "sleep", lambda _s: write([100 + one for one in used], [1010, 1010]))
        return stat

    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _pid: {0, 1})
    return watched


def training(**changes):
    return run_plan(workload="resnet50", argv=(), cores_per_rank=2, **changes)


@pytest.mark.parametrize(("used", "cores"), [((0, 0), 0.0), ((7, 0), 0.7), ((10, 5), 1.5)])
def test_the_use_of_cores_is_read_from_the_kernels_ticks(machine, used, cores):
    assert used_cores({0, 1}, stat=machine(*used)) == pytest.approx(cores)
    assert used_cores({1}, stat=machine(*used)) == pytest.approx(used[1] / 10)


def test_threads_wait_briefly_where_others_use_half_a_core(machine):
    assert waiting_variables(training(), {}, machine(4, 0)) == {}
    assert waiting_variables(training(), {}, machine(5, 0)) == BRIEF


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_who_has_chosen_keeps_the_choice(machine, name):
    assert waiting_variables(training(), {name: "active"}, machine(10, 10)) == {}


@pytest.mark.parametrize("changes", [{"workload": "command"}, {"device_type": "cuda"}, {"cores_per_rank": 1}])
def test_programs_devices_and_single_threads_are_left_alone(machine, changes):
    run = run_plan(**{"workload": "resnet50", "cores_per_rank": 2, **changes})
    assert waiting_variables(run, {}, machine(10, 10)) == {}


def test_a_kernel_that_does_not_tell_is_a_quiet_machine(tmp_path):
    assert used_cores({0}, 0.0, tmp_path / "none") == 0
    (tmp_path / "odd").write_text("cpu0 many\n")
    assert used_cores({0}, 0.0, tmp_path / "odd") == 0


def test_a_busy_core_of_this_machine_is_detected():
    """Whatever else runs here: with one more thread that computes, at least its core is used."""
    ends = threading.Event()

    def compute():
        while not ends.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        assert used_cores(range(1024), 0.5) > 0
    finally:
        ends.set()
        thread.join()
