import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from gpu_stand_ins import lacking

from pytest_mlhpc.node.worker import reporting
from pytest_mlhpc.node.worker.accelerators import gpu
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.environment import WorkerFailure, cpu_model


def test_the_host_is_a_device_that_copies_nothing():
    cpu, tensors = open_device("cpu", 3), (torch.ones(2), torch.zeros(1))
    assert lacking(cpu) == []
    assert (cpu.type, cpu.index, cpu.backend, cpu.asynchronous) == ("cpu", 3, "gloo", False)
    copied = cpu.copy(tensors)
    assert copied.tensors is tensors
    assert copied.start is cpu.energy_j() is None
    assert cpu.seconds(cpu.mark(), cpu.mark()) >= 0
    assert cpu.peak_memory_bytes() > 1 << 20


@pytest.mark.parametrize("kind", ["tpu9", "", "base", "../cpu", "os.path"])
def test_a_device_of_unknown_type_is_refused_by_name(kind):
    with pytest.raises(WorkerFailure, match=f"wrong_device.*{re.escape(repr(kind))}"):
        open_device(kind, 0)


def test_a_rank_takes_the_gpu_of_its_own_number_or_the_only_one_that_it_sees():
    assert [gpu.ordinal_for(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert gpu.ordinal_for(3, 1) == 0  # the launcher shows each rank its own GPU only


def test_a_gpu_is_addressed_by_uuid_or_bus_and_never_by_a_renumbered_index():
    modern = SimpleNamespace(uuid="0f1e", pci_bus_id=0x41, pci_domain_id=1, pci_device_id=0)
    old = SimpleNamespace()
    devices = [(modern, 0, "3"), (old, 1, "GPU-a,GPU-b"), (old, 0, "2,3"), (old, 5, "GPU-a")]

    assert [gpu.device_uuid(*device) for device in devices] == ["GPU-0f1e", "GPU-b", None, None]
    assert gpu.nvml_pci_address(modern) == "00000001:41:00.0"
    assert gpu.nvml_pci_address(old) is None


def test_energy_that_is_unknown_is_none_and_never_zero():
    counter = gpu.NvmlCounter("GPU-does-not-exist")
    assert counter.joules() is counter.index() is None
    intervals = [(None, 2.0), (5.0, 5.0), (5.0, 4.0), (5.0, 7.5)]
    assert [reporting.energy_used(*interval) for interval in intervals] == [None, None, None, 2.5]


def test_the_processor_is_named_as_the_kernel_names_it(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD  EPYC 7742 64-Core\n")

    assert cpu_model(tmp_path / "cpuinfo") == "AMD EPYC 7742 64-Core"
    assert cpu_model(tmp_path / "nothing") == ""


def test_calibration_gives_a_rate_and_takes_no_random_numbers():
    state = torch.get_rng_state()
    assert reporting.calibrate(Cpu(0, "test"), seconds=0.01) > 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.servers  # imports torch in a process of its own
def test_a_cpu_rank_keeps_freed_memory_and_reports_it():
    code = (
        "import resource, torch; from pytest_mlhpc.node.worker.accelerators.cpu import open_device\n"
        "device = open_device(0)\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(10): torch.ones(16 << 20)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); print(faults(), device.environment()['malloc_mmap_threshold'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, threshold = map(int, ended.stdout.split())
    assert threshold in {2**30, 32 * 2**20}
    assert count < 1000 or threshold < 2**30  # 64 MiB ten times are 160,000 pages of 4 KiB
