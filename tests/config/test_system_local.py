"""What this machine has, read from trees like those of the kernel."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.config.model import NodeType
from pytest_mlhpc.config.this_machine import LocalMachine, cpu_model, fingerprint, read_machine

GIB = 2**30


def kernel(root: Path, files: Mapping[str, str] | None = None) -> Path:
    """Write files below *root*, besides those that every kernel has."""
    usual = {
        "proc/meminfo": f"MemTotal:       {64 * 2**20} kB\nMemFree: 1 kB\n",
        "proc/cpuinfo": "model name\t: X\n",
    }
    for name, text in {**usual, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MOUNT_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


LIMITS = yaml.safe_load(Path(__file__).with_name("control_groups.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_the_smallest_limit_holds(tmp_path: Path, limits):
    machine = read_machine(kernel(tmp_path, limits["files"]), affinity=limits["affinity"])
    assert [machine.cores, machine.memory // GIB, machine.cpu_model] == [*limits["found"], "X"]


@pytest.mark.parametrize("text", ["", "\0\0", "garbage", "0::", "a:b", ":::::", "0::/../../../etc"])
def test_odd_files_of_the_kernel_are_no_limit(tmp_path: Path, text):
    files = dict.fromkeys(("proc/self/cgroup", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max"), text)
    root = kernel(tmp_path, {**files, "proc/self/mountinfo": MOUNT_V2 + text})
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
    assert cpu_model(kernel(tmp_path, {"proc/cpuinfo": text})) == model


def test_this_very_machine_can_be_read():
    machine = read_machine()
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.memory > 2**26
    assert machine.cpu_model


def test_the_fingerprint_is_fit_for_a_file_name():
    machine = LocalMachine(2, 8 * GIB, "Intel(R) Xeon(R) CPU @ 2.50GHz / ../x")
    text = fingerprint(machine, NodeType(2, 8 * GIB, devices=4, device_model="NVIDIA A100-SXM4-40GB"))
    assert text == "intel-xeon-cpu-2.50ghz-..-x_2-cores_8-gib_4-x-nvidia-a100-sxm4-40gb"
    assert "/" not in text


@pytest.mark.parametrize(
    "nodes", [NodeType(4, 8 * GIB), NodeType(2, 16 * GIB), NodeType(2, 8 * GIB, devices=1, device_model="X")]
)
def test_cores_memory_and_devices_change_the_fingerprint(nodes):
    machine = LocalMachine(4, 16 * GIB, "X")
    assert fingerprint(machine, nodes) != fingerprint(machine, NodeType(2, 8 * GIB))
