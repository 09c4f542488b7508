"""Last caches: those of the cores of this process, each once; nothing is made up where the kernel does not tell."""

import pytest
import torch
from file_trees import write_tree

from pytest_mlhpc.worker.probes import caches

#: Level, type and size of the four caches of a core; the last is that of a socket of two cores.
CACHES = [(1, "Data", "32K"), (1, "Instruction", "32K"), (2, "Unified", "1M"), (3, "Unified", "16384K")]


@pytest.fixture
def root(tmp_path):
    for core in range(4):
        for index, (level, kind, size) in enumerate(CACHES):
            shared = ("0-1" if core < 2 else "2-3") if level == 3 else core
            described = {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}
            write_tree(tmp_path / f"cpu{core}/cache/index{index}", described)
    return tmp_path


@pytest.mark.parametrize(("cores", "mebibytes"), [([0], 16), ([0, 1], 16), ([1, 2], 32), ([9], 0), ([], 0)])
def test_last_caches_of_the_cores_count_once(root, cores, mebibytes):
    assert caches.of_cores(cores, root) == mebibytes << 20


def test_a_cache_that_is_not_described_whole_is_passed_over(root):
    (root / "cpu0/cache/index3/size").unlink()
    (root / "cpu1/cache/index3/size").write_text("much\n")
    assert caches.of_cores([0, 1], root) == 2 << 20


def test_a_device_that_does_not_tell_has_no_known_cache():
    assert caches.last_level(torch.device("meta")) == 0
