"""The node's half: processes read from a /proc in which anything may be missing, and devices by their libraries."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_amdsmi import FakeAmdsmi
from fake_nvml import ERRORS, FakeNvml, NVMLError
from pods import run_plan
from polling import poll

from pytest_mlhpc.node.launch import poprun
from pytest_mlhpc.node.telemetry.readings import (
    Reader,
    below,
    find_devices,
    number,
    parse_environ,
    parse_stat,
    rank_of,
)
from pytest_mlhpc.node.telemetry.sampler import SHARE, Sampler, memory
from pytest_mlhpc.node.telemetry.samples import NodeSample, Sample
from pytest_mlhpc.node.worker.environment import SOURCES
from pytest_mlhpc.screen.usage import find_ranks, processes

STAT = "{pid} ({name}) {state} {parent} 1 1 0 -1 0 0 0 0 0 {user} 50 0 0 20 0 3 0 {start} 1000 2560 0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 0 0 7 0 0"


def put(proc, pid, parent=1, *, name="python3", state="S", user=100, environ=b"", start=9, threads=()):
    folder = proc / str(pid)
    for place, thread, thread_state in (
        (folder, pid, state),
        *((folder / "task" / str(one), one, its_state) for one, its_state in ((pid, state), *threads)),
    ):
        place.mkdir(parents=True, exist_ok=True)
        text = STAT.format(pid=thread, name=name, state=thread_state, parent=parent, user=user, start=start)
        (place / "stat").write_text(text)
    (folder / "status").write_text("Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n")
    (folder / "io").write_text("rchar: 900\nread_bytes: 4096\n")
    (folder / "environ").write_bytes(environ)


def test_a_process_is_read_with_its_threads(tmp_path):
    put(tmp_path, 4711, name="my (odd) name", threads=((4712, "R"), (4713, "D")))
    (one,) = Reader(proc=tmp_path).read()
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert (one.name, one.cpu_s, one.blkio_s, one.rss_bytes) == (
        "my (odd) name",
        150 / ticks,
        7 / ticks,
        2560 * page,
    )
    assert (one.running, one.disk, one.sleeping, one.main_state) == (1, 1, 1, "S")
    assert (one.voluntary, one.involuntary, one.read_bytes, one.rchar_bytes) == (12, 3, 4096, 900)


def test_entries_that_vanish_between_two_reads_are_left_out(tmp_path):
    put(tmp_path, 10)
    put(tmp_path, 11)
    (tmp_path / "11/task/11/stat").unlink()  # gone after its first file was read
    put(tmp_path, 12, state="Z")
    put(tmp_path, 13)
    (tmp_path / "13/stat").write_text("13 (cut")
    (tmp_path / "14").mkdir()
    put(tmp_path, 16)
    shutil.rmtree(tmp_path / "16/task")
    (tmp_path / "15").write_text("no folder")
    assert [one.pid for one in Reader(proc=tmp_path).read()] == [10]
    assert Reader(proc=tmp_path / "gone").read() == ()


def test_files_that_may_not_be_read_leave_figures_out(tmp_path):
    put(tmp_path, 10)
    for name in ("io", "status", "environ"):
        (tmp_path / "10" / name).unlink()
    (one,) = Reader(proc=tmp_path).read()
    assert {one.read_bytes, one.rchar_bytes, one.voluntary, one.rank} == {None}


@pytest.mark.parametrize(
    ("among", "found"),
    [({"root": 10}, [(11, None), (12, 5)]), ({"job": "7"}, [(10, None)]), ({"job": "77"}, [(12, 5)])],
    ids=["a tree without its root", "a job", "a job whose rank is known"],
)
def test_only_processes_are_read_of(tmp_path, among, found):
    put(tmp_path, 10, environ=b"SLURM_JOB_ID=7\0")
    put(tmp_path, 11, parent=10)
    put(tmp_path, 12, parent=11, environ=b"SLURM_JOB_ID=77\0SLURM_PROCID=5\0")
    put(tmp_path, 20)
    assert [(one.pid, one.rank) for one in Reader(**among, proc=tmp_path).read()] == found


def test_the_most_certain_classification_of_a_rank_counts_for_all(tmp_path):
    put(tmp_path, 10, environ=b"SLURM_PROCID=0\0")  # torchrun's own process
    put(tmp_path, 11, parent=10, environ=b"SLURM_PROCID=0\0RANK=5\0")
    assert [one.rank for one in Reader(proc=tmp_path).read()] == [None, 5]


def ranks_of(proc):
    taken = [Sample(float(second), 0.0, NodeSample("n1", 8), Reader(proc=proc).read()) for second in range(2)]
    return [(one.number, one.own.name, one.own.pid) for one in find_ranks(processes(taken), ())]


def test_ranks_of_poprun_are_known_by_what_its_launcher_relies_on(tmp_path):
    _, given = poprun(run_plan(ranks=2, launcher="poprun"), ["n1"], {})
    variable = SOURCES[given["MLHPC_RANKS_FROM"]][0].encode()
    put(tmp_path, 10, name="poprun", environ=b"SLURM_PROCID=0\0")
    put(tmp_path, 11, parent=10, name="mpirun", environ=b"SLURM_PROCID=0\0")
    for rank in (1, 0):
        environ = b"SLURM_PROCID=0\0%s=%d\0" % (variable, rank)
        put(tmp_path, 21 + rank, parent=11, environ=environ)
        put(tmp_path, 31 + rank, parent=21 + rank, name="loader", environ=environ)
    assert ranks_of(tmp_path) == [(0, "python3", 21), (1, "python3", 22)]


def test_poprun_itself_is_no_rank_whoever_it_starts(tmp_path):
    put(tmp_path, 10, name="poprun", user=900, environ=b"SLURM_PROCID=0\0")
    put(tmp_path, 11, parent=10, environ=b"SLURM_PROCID=0\0")
    assert ranks_of(tmp_path) == [(0, "python3", 11)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *(
            (rank_of({"RANK": odd}), None)
            for odd in ("", "x", "-1", "1.5", "99999999999", "\N{SUPERSCRIPT TWO}")
        ),
        *((parse_stat(cut), None) for cut in ("7 (x) S 1 2", "")),
        (parse_environ(b"RANK=1\0BROKEN\0\xff=\xff", ("RANK",)), {"RANK": "1"}),
        (below(1, {2: 1, 3: 2, 1: 3}), {1, 2, 3}),
    ],
    ids=[
        *["odd rank"] * 6,
        *["a stat that is cut short"] * 2,
        "a broken environment",
        "a process tree with a loop",
    ],
)
def test_what_is_odd_is_read_as_far_as_it_makes_sense(found, expected):
    assert found == expected


def test_a_new_process_is_asked_again_for_its_environment(tmp_path):
    put(tmp_path, 10, environ=b"RANK=0\0")  # its parent's, before exec
    reader = Reader(proc=tmp_path)
    assert reader.read()[0].rank == 0
    (tmp_path / "10/environ").write_bytes(b"RANK=3\0")
    assert reader.read()[0].rank == 3


def test_real_processes_vanish_while_they_are_read_and_nothing_is_raised():
    reader = Reader()
    children = [subprocess.Popen(["true"]) for _ in range(8)]
    reader.read()
    while any(child.poll() is None for child in children):
        reader.read()


def test_a_busy_child_is_found_to_compute():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        sampler = Sampler(Reader(root=os.getpid()), interval_s=0.1)

        def computing():
            sample = sampler.take()
            return any(one.pid == child.pid and one.cpu_s > 0.1 for one in sample.processes) and sample

        try:
            sample = poll(computing)
        finally:
            child.kill()
    assert sample.node.memory_bytes > 0
    assert sample.cost_s > 0


def test_looking_that_is_dear_is_done_less_often():
    sampler = Sampler(Reader(proc=Path("/nowhere")), interval_s=0.1)
    sampler._cost_s = 0.02
    assert sampler.pause_s == pytest.approx(0.02 / SHARE)


def test_memory_is_the_control_groups_where_that_is_less(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8192 kB\nMemAvailable: 4096 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    assert memory(tmp_path) == (8 << 20, 4 << 20)
    (group / "memory.max").write_text("max\n")
    assert memory(tmp_path) == (8 << 20, 4 << 20)
    texts = {"max": f"{2 << 20}\n", "current": f"{1 << 20}\n", "stat": "anon 1\ninactive_file 1024\n"}
    for name, text in texts.items():
        (group / f"memory.{name}").write_text(text)
    assert memory(tmp_path) == (2 << 20, (1 << 20) + 1024)
    assert memory(tmp_path / "gone") == (None, None)


class Nvml(FakeNvml):
    """With the calls that only screening makes."""

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802 - NVML's names
        return self._of(handle, "nvmlDeviceGetPowerUsage")

    def nvmlDeviceGetClockInfo(self, handle, kind, name="nvmlDeviceGetClockInfo"):  # noqa: N802
        assert kind == 1
        return self._of(handle, name)

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):  # noqa: N802
        return self.nvmlDeviceGetClockInfo(handle, kind, "nvmlDeviceGetMaxClockInfo")


H100 = {
    "count": 2,
    "device": {
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3", "nvmlDeviceGetUUID": "GPU-{index}", "nvmlDeviceGetUtilizationRates": 98,
        "nvmlDeviceGetMemoryInfo": [80 << 30, 60 << 30], "nvmlDeviceGetPowerUsage": 698_500, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": 71, "nvmlDeviceGetClockInfo": 1410, "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4, "nvmlDeviceGetComputeRunningProcesses": [{"pid": 4711}],
    },
}  # fmt: skip


def devices_of(**modules):
    """Find devices where only these modules can be imported."""

    def load(name):
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    return find_devices(load)


def test_nvml_is_read_in_base_units():
    one, _ = devices_of(pynvml=Nvml(H100)).read()
    assert (one.power_w, one.power_limit_w, one.celsius, one.busy) == (698.5, 700.0, 71.0, 0.98)
    assert (one.clock_hz, one.highest_clock_hz, one.reasons, one.pids) == (1.41e9, 1.98e9, 4, (4711,))


def test_what_a_board_or_a_library_does_not_tell_is_none():
    bare = {"count": 1, "device": {}, "missing": ["nvmlDeviceGetMemoryInfo"]}
    (one,) = devices_of(pynvml=Nvml(bare)).read()
    assert (one.model, one.pids) == ("GPU", ())
    assert {one.busy, one.power_w, one.memory_bytes, one.reasons} == {None}


def test_the_older_name_of_clock_reasons_is_asked_too():
    old = {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x20}
    nvml = Nvml({"count": 1, "device": old, "missing": ["nvmlDeviceGetCurrentClocksEventReasons"]})
    assert devices_of(pynvml=nvml).read()[0].reasons == 0x20


def test_amdsmi_is_read_where_nvml_is_not():
    metrics = {"current_socket_power": 740, "temperature_hotspot": 80, "current_gfxclk": 2100}
    activity = {"gfx_activity": 97, "umc_activity": 0xFFFF}
    board = {"asic_info": {"market_name": "MI300X"}, "activity": activity, "metrics": metrics}
    (one,) = devices_of(amdsmi=FakeAmdsmi({"devices": [board]})).read()
    found = (one.model, one.busy, one.memory_busy, one.power_w, one.clock_hz)
    assert found == ("MI300X", 0.97, None, 740.0, 2.1e9)
    assert number({"a": "N/A", "b": True, "c": 3}, "a", "b", "c") == 3


def test_without_devices_it_is_said_why():
    broken = Nvml({"init": {"error": "DRIVER_NOT_LOADED"}})
    assert devices_of().text == "no module pynvml; no module amdsmi"
    why = NVMLError(ERRORS["DRIVER_NOT_LOADED"])
    assert devices_of(pynvml=broken).text == f"pynvml: {why}; no module amdsmi"
    assert devices_of(pynvml=Nvml({"count": 0})).read() == ()
