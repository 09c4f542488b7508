"""What AMD GPUs alone have, with stand-ins for torch's HIP build, MIOpen's variables and amdsmi: no GPU has run this."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_stand_ins import AMD_ADDRESS as ADDRESS
from gpu_stand_ins import PROPERTIES, install

from pytest_mlhpc.node.worker.accelerators import gpu
from pytest_mlhpc.node.worker.base import open_device


def library(**changes):
    """Return an ``amdsmi`` with two boards, the second of which is ours."""
    functions = {
        "init": lambda: None,
        "get_processor_handles": lambda: ["a", "b"],
        "get_gpu_device_bdf": lambda handle: {"a": "0000:05:00.0", "b": ADDRESS.upper()}[handle],
        "get_energy_count": lambda _handle: {"energy_accumulator": 2_000_000, "counter_resolution": 15.259},
        **changes,
    }
    return SimpleNamespace(**{f"amdsmi_{name}": function for name, function in functions.items()})


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", library())
    install(monkeypatch, "rocm")
    return open_device("rocm", 2)


def test_its_environment_names_hip_and_where_miopen_keeps_what_it_finds(device, monkeypatch):
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", "/scratch/miopen")
    assert device.environment().items() >= {
        ("hip", "6.2.41133"),
        ("gcn_architecture", "gfx942:sramecc+:xnack-"),
        ("miopen_database", "/scratch/miopen"),
    }


def test_index_and_energy_are_those_of_the_library_whatever_this_process_sees(device):
    assert (device.index, str(device.device)) == (1, "cuda:2")
    assert device.energy_j() == pytest.approx(2_000_000 * 15.259e-6)


def energy_of(monkeypatch, **changes):
    monkeypatch.setitem(sys.modules, "amdsmi", library(**changes))
    return gpu.AmdCounter(ADDRESS).joules()


def test_older_releases_call_the_count_power(monkeypatch):
    count = {"power": 4_000_000, "counter_resolution": 0.5}
    assert energy_of(monkeypatch, get_energy_count=lambda _handle: count) == pytest.approx(2.0)


def broken(*_):
    raise OSError("libamd_smi.so: cannot open shared object file")


@pytest.mark.parametrize(
    "changes",
    [
        {"init": broken},
        {"get_processor_handles": broken},
        {"get_gpu_device_bdf": lambda _handle: "0000:99:00.0"},
        {"get_energy_count": broken},
        *(
            {"get_energy_count": lambda _handle, count=count: count}
            for count in (
                {"energy_accumulator": "N/A", "counter_resolution": 15.3},
                {"energy_accumulator": 0, "counter_resolution": 15.3},
                {},
                None,
            )
        ),
    ],
)
def test_energy_that_the_board_or_its_library_does_not_tell_is_none(monkeypatch, changes):
    assert energy_of(monkeypatch, **changes) is None


def test_without_the_library_or_an_address_there_is_no_counter(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert gpu.AmdCounter(ADDRESS).joules() is None
    assert gpu.AmdCounter(None).index() is None
    assert gpu.linux_pci_address(SimpleNamespace()) is None
    assert gpu.linux_pci_address(SimpleNamespace(**PROPERTIES["rocm"])) == ADDRESS


def prepared(folder, site=None, find=None, torch="2.6"):
    """Return the variables of MIOpen, of which the environment has those of *site* already."""
    found = dict(site or {})
    gpu.prepare_miopen(found, find, torch, folder)
    return found


def test_miopen_keeps_what_it_finds_on_the_node_in_one_place_for_all_runs(tmp_path):
    version = "2.6.0+rocm6.2"
    folder = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6.0-rocm6.2"
    databases = {"MIOPEN_USER_DB_PATH": str(folder), "MIOPEN_CUSTOM_CACHE_DIR": str(folder)}
    found = [prepared(tmp_path, find=find, torch=version) for find in ("dynamic_hybrid", None)]
    assert found == [{"MIOPEN_FIND_MODE": "DYNAMIC_HYBRID", **databases}, databases]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_the_environment_says_of_miopen_stays(tmp_path):
    site = {
        "MIOPEN_USER_DB_PATH": "/site/db", "MIOPEN_CUSTOM_CACHE_DIR": "/site/kernels", "MIOPEN_FIND_MODE": "FAST",
    }  # fmt: skip
    assert prepared(tmp_path, site) == site
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path):
    folder = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6"
    folder.mkdir()
    folder.chmod(0o777)
    found = prepared(tmp_path)["MIOPEN_USER_DB_PATH"]
    assert found != str(folder)
    assert Path(found).stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6"
    link.symlink_to(tmp_path / "elsewhere")
    assert prepared(tmp_path)["MIOPEN_USER_DB_PATH"] != str(link)
