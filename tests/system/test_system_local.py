"""What this machine has, read from trees like those of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_mlhpc.system.local import Machine, cpu_model, fingerprint, read_machine
from pytest_mlhpc.system.model import NodeType

GIB = 2**30


def kernel(root: Path, **files: str) -> Path:
    """Write files below *root*; ``__`` in a name stands for ``/`` and ``_dot_`` for ``.``."""
    tree = {
        "proc__meminfo": f"MemTotal:       {64 * 2**20} kB\nMemFree: 1 kB\n",
        "proc__cpuinfo": "model name\t: X\n",
    }
    for name, text in {**tree, **files}.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MOUNT_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = (
    "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "33 24 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)


def test_without_control_groups_all_is_ours(tmp_path: Path):
    assert read_machine(kernel(tmp_path), affinity=8) == Machine(8, 64 * GIB, "X")


def test_limits_of_version_2_hold_also_from_above(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="0::/slice/job\n",
        proc__self__mountinfo=MOUNT_V2,
        sys__fs__cgroup__slice__cpu_dot_max="400000 100000\n",
        sys__fs__cgroup__slice__memory_dot_max=f"{16 * GIB}\n",
        sys__fs__cgroup__slice__job__cpu_dot_max="max 100000\n",
        sys__fs__cgroup__slice__job__memory_dot_max="max\n",
    )
    machine = read_machine(root, affinity=8)
    assert (machine.cores, machine.memory) == (4, 16 * GIB)


def test_limits_of_version_1_are_read_by_controller(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="9:name=systemd:/\n4:memory:/job\n3:pids:/job\n1:cpu,cpuacct:/job\n0::/\n",
        proc__self__mountinfo=MOUNT_V1,
        **{"sys__fs__cgroup__cpu,cpuacct__job__cpu_dot_cfs_quota_us": "250000\n"},
        **{"sys__fs__cgroup__cpu,cpuacct__job__cpu_dot_cfs_period_us": "100000\n"},
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__job__memory_dot_limit_in_bytes=f"{2 * GIB}\n",
    )
    machine = read_machine(root, affinity=8)
    assert (machine.cores, machine.memory) == (2, 2 * GIB)


def test_a_version_1_quota_of_minus_one_is_no_limit(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="1:cpu,cpuacct:/\n",
        proc__self__mountinfo=MOUNT_V1,
        **{"sys__fs__cgroup__cpu,cpuacct__cpu_dot_cfs_quota_us": "-1\n"},
        **{"sys__fs__cgroup__cpu,cpuacct__cpu_dot_cfs_period_us": "100000\n"},
    )
    assert read_machine(root, affinity=8).cores == 8


def test_a_container_that_sees_only_its_own_part_of_the_tree_is_read(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="0::/kubepods/pod1\n",
        proc__self__mountinfo="30 24 0:26 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        sys__fs__cgroup__cpu_dot_max="150000 100000\n",
    )
    assert read_machine(root, affinity=8).cores == 1


def test_affinity_counts_where_it_is_the_smallest(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="0::/\n",
        proc__self__mountinfo=MOUNT_V2,
        sys__fs__cgroup__cpu_dot_max="800000 100000\n",
    )
    assert read_machine(root, affinity=3).cores == 3


def test_less_than_a_core_counts_as_one(tmp_path: Path):
    root = kernel(
        tmp_path,
        proc__self__cgroup="0::/\n",
        proc__self__mountinfo=MOUNT_V2,
        sys__fs__cgroup__cpu_dot_max="50000 100000\n",
    )
    assert read_machine(root, affinity=3).cores == 1


@pytest.mark.parametrize("text", ["", "\0\0", "garbage", "0::", "a:b", ":::::", "0::/../../../etc"])
def test_odd_files_of_the_kernel_are_no_limit(tmp_path: Path, text):
    root = kernel(
        tmp_path,
        proc__self__cgroup=text,
        proc__self__mountinfo=MOUNT_V2 + text,
        sys__fs__cgroup__cpu_dot_max=text,
        sys__fs__cgroup__memory_dot_max=text,
    )
    assert read_machine(root, affinity=8).cores == 8


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor : 0\nmodel name\t: AMD  EPYC 9825\nprocessor : 1\nmodel name : other\n", "AMD EPYC 9825"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", f"{os.uname().machine} 0x41/0xd4f"),
        ("", os.uname().machine),
    ],
)
def test_the_cpu_has_a_name_on_every_architecture(tmp_path: Path, text, model):
    assert cpu_model(kernel(tmp_path, proc__cpuinfo=text)) == model


def test_this_very_machine_can_be_read():
    machine = read_machine()
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory > 2**26
    assert machine.cpu_model


def test_the_fingerprint_is_fit_for_a_file_name():
    machine = Machine(2, 8 * GIB, "Intel(R) Xeon(R) CPU @ 2.50GHz / ../x")
    text = fingerprint(machine, NodeType(2, 8 * GIB, devices=4, device_model="NVIDIA A100-SXM4-40GB"))
    assert text == "intel-xeon-cpu-2.50ghz-..-x_2-cores_8-gib_4-x-nvidia-a100-sxm4-40gb"
    assert "/" not in text


@pytest.mark.parametrize(
    "nodes", [NodeType(4, 8 * GIB), NodeType(2, 16 * GIB), NodeType(2, 8 * GIB, devices=1, device_model="X")]
)
def test_cores_memory_and_devices_change_the_fingerprint(nodes):
    machine = Machine(4, 16 * GIB, "X")
    assert fingerprint(machine, nodes) != fingerprint(machine, NodeType(2, 8 * GIB))
