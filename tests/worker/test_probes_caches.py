"""Last caches: those of the cores of this process, each once; nothing is made up where the kernel does not tell."""

from __future__ import annotations

import pytest
import torch

from pytest_mlhpc.worker.probes import caches


@pytest.fixture
def root(tmp_path):
    """Return four cores of two sockets: 32 KiB first caches of two kinds, 1 MiB second, 16 MiB third caches by socket."""

    def cache(core, index, **said):
        folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in said.items():
            (folder / name).write_text(f"{text}\n")

    for core in range(4):
        socket = "0-1" if core < 2 else "2-3"
        cache(core, 0, level=1, type="Data", size="32K", shared_cpu_list=core)
        cache(core, 1, level=1, type="Instruction", size="32K", shared_cpu_list=core)
        cache(core, 2, level=2, type="Unified", size="1M", shared_cpu_list=core)
        cache(core, 3, level=3, type="Unified", size="16384K", shared_cpu_list=socket)
    return tmp_path


@pytest.mark.parametrize(("cores", "mebibytes"), [([0], 16), ([0, 1], 16), ([1, 2], 32), ([9], 0), ([], 0)])
def test_last_caches_of_the_cores_count_once(root, cores, mebibytes):
    assert caches.of_cores(cores, root) == mebibytes << 20


def test_a_cache_that_is_not_described_whole_is_passed_over(root):
    (root / "cpu0" / "cache" / "index3" / "size").unlink()
    (root / "cpu1" / "cache" / "index3" / "size").write_text("much\n")
    assert caches.of_cores([0, 1], root) == 2 << 20


def test_a_device_that_does_not_tell_has_no_known_cache():
    assert caches.last_level(torch.device("meta")) == 0
