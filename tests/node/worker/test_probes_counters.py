"""Last caches and counters of memory traffic: found where the kernel shows them, and an answer where it does not."""

import os
import time

import pytest
import torch
from file_trees import write_tree

from pytest_mlhpc.node.cores import last_caches
from pytest_mlhpc.node.worker.probes import kernels, peaks


def resctrl(root, values):
    write_tree(root / "mon_data", {f"mon_L3_{n:02d}/mbm_total_bytes": text for n, text in enumerate(values)})


def controller(root, event="event=0x04,umask=0x03", cpumask="0,2-3", kind="15"):
    events = {f"events/cas_count_{way}": event for way in ("read", "write")}
    write_tree(root / "uncore_imc_0", {**events, "cpumask": cpumask, "type": kind})


def test_the_bytes_of_all_sockets_add_up(tmp_path):
    resctrl(tmp_path, [1000, 234])
    counter, why = kernels.find(tmp_path, tmp_path)
    assert (counter.name, counter.read(), why) == ("resctrl mbm_total_bytes", 1234, "")
    resctrl(tmp_path, [2000, "Unavailable"])
    assert counter.read() is None


def test_the_bytes_of_all_groups_of_tasks_add_up(tmp_path):
    resctrl(tmp_path, [1000])
    resctrl(tmp_path / "job_7", [200])
    resctrl(tmp_path / "mon_groups/mine", [500])  # those of a monitoring group are in its control group's
    assert kernels.find(tmp_path, tmp_path)[0].read() == 1200


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["Error"], "mbm_total_bytes cannot be read; no uncore_imc with CAS counters below {0}/none"),
        ([], "no mbm_total_bytes below {0}; no uncore_imc with CAS counters below {0}/none"),
    ],
    ids=["a counter that is an error", "no counter"],
)
def test_a_machine_without_counters_says_so(tmp_path, values, text):
    resctrl(tmp_path, values)
    counter, why = kernels.find(tmp_path, tmp_path / "none")
    assert (counter, why.endswith(text.format(tmp_path))) == (None, True)


def test_memory_controllers_are_counted_in_cache_lines(tmp_path, monkeypatch):
    controller(tmp_path)
    asked = []

    def opened(kind, config, processor):
        asked.append((kind, config, processor))
        reader, writer = os.pipe()
        os.write(writer, (10).to_bytes(8, "little"))
        os.close(writer)
        return reader

    monkeypatch.setattr(kernels, "perf_open", opened)
    counter, _ = kernels.find(tmp_path / "none", tmp_path)
    assert asked == [(15, 0x304, 0), (15, 0x304, 2), (15, 0x304, 3)] * 2
    assert counter.read() == 6 * 10 * 64
    counter.close()
    assert counter.read() == 0


def test_free_running_counters_of_memory_controllers_are_passed_over(tmp_path, monkeypatch):
    controller(tmp_path)
    write_tree(tmp_path / "uncore_imc_free_running_0", {"events/read": "event=0xff,umask=0x20"})
    monkeypatch.setattr(kernels, "perf_open", lambda *asked: os.open(os.devnull, os.O_RDONLY))
    counter, why = kernels.find(tmp_path / "none", tmp_path)
    assert (counter.name, why) == ("uncore_imc cas_count", "")
    counter.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"event": "event=0x04,inv=1"}, "is not spelt by event and umask"),
        ({"event": "event=four"}, "invalid literal"),
        ({"cpumask": "all"}, "'all' is no list of processors"),
        ({"cpumask": ""}, "'' is no list of processors"),
        ({"kind": "fifteen"}, "invalid literal"),
    ],
)
def test_controllers_that_are_not_understood_are_left_alone(tmp_path, changes, text):
    controller(tmp_path, **changes)
    counter, why = kernels.find(tmp_path / "none", tmp_path)
    assert (counter, "memory controllers cannot be counted" in why, text in why) == (None, True, True)


def test_the_kernel_counts_what_it_is_asked_to():
    """A software event (perf_event.h: type 1, task clock 1) of this process, which most kernels let everybody count."""
    try:
        descriptor = kernels.perf_open(1, 1, -1, pid=0)
    except OSError as error:
        assert "perf_event_open" in str(error)  # noqa: PT017 - both answers are right
        return
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        continue
    counted = int.from_bytes(os.read(descriptor, 8), "little")
    os.close(descriptor)
    assert counted >= 5_000_000


def test_a_machine_whose_number_of_the_call_is_unknown_is_refused(monkeypatch):
    monkeypatch.setattr(kernels.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="perf_event_open is not known on riscv64"):
        kernels.perf_open(1, 1, 0)


@pytest.fixture
def root(tmp_path):
    """Two sockets of two cores, which share a last cache of 16 MiB."""
    for core in range(4):
        of_core = [(1, "Data", "32K", core), (1, "Instruction", "32K", core), (2, "Unified", "1M", core)]
        shared = "0-1" if core < 2 else "2-3"
        for index, described in enumerate([*of_core, (3, "Unified", "16384K", shared)]):
            names = ("level", "type", "size", "shared_cpu_list")
            write_tree(tmp_path / f"cpu{core}/cache/index{index}", dict(zip(names, described, strict=True)))
    return tmp_path


@pytest.mark.parametrize(("cores", "mebibytes"), [([0], 16), ([0, 1], 16), ([1, 2], 32), ([9], 0), ([], 0)])
def test_last_caches_of_the_cores_count_once(root, cores, mebibytes):
    assert last_caches(cores, root) == mebibytes << 20


def test_a_cache_that_is_not_described_whole_is_passed_over(root):
    (root / "cpu0/cache/index3/size").unlink()
    (root / "cpu1/cache/index3/size").write_text("much\n")
    assert last_caches([0, 1], root) == 2 << 20


def test_a_device_that_does_not_tell_has_no_known_cache():
    assert peaks.last_level(torch.device("meta")) == 0
