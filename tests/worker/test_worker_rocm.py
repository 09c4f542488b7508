"""AMD GPUs, with stand-ins for torch's HIP build, MIOpen's variables and amdsmi: no GPU has seen this."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_stand_ins import Tensor, gpu_api

from pytest_mlhpc.worker import amd_energy
from pytest_mlhpc.worker.accelerators import rocm
from pytest_mlhpc.worker.accelerators.base import Accelerator, open_device
from pytest_mlhpc.worker.failure import WorkerFailure

PROPERTIES = SimpleNamespace(
    name="AMD Instinct MI300X",
    gcnArchName="gfx942:sramecc+:xnack-",
    pci_domain_id=0,
    pci_bus_id=0x65,
    pci_device_id=0,
)
ADDRESS = "0000:65:00.0"


def library(**changes):
    """Return an ``amdsmi`` with two boards, the second of which is ours."""
    return SimpleNamespace(
        **{
            "amdsmi_init": lambda: None,
            "amdsmi_get_processor_handles": lambda: ["a", "b"],
            "amdsmi_get_gpu_device_bdf": lambda handle: {"a": "0000:05:00.0", "b": ADDRESS.upper()}[handle],
            "amdsmi_get_energy_count": lambda _handle: {
                "energy_accumulator": 2_000_000,
                "counter_resolution": 15.259,
            },
            **changes,
        }
    )


@pytest.fixture
def queued():
    return []


@pytest.fixture
def device(monkeypatch, queued):
    monkeypatch.setitem(sys.modules, "amdsmi", library())
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    monkeypatch.setattr(torch, "cuda", gpu_api(PROPERTIES, queued))
    return open_device("rocm", 2)


def test_it_has_all_that_the_protocol_names(device):
    assert {name for name in vars(Accelerator) if not name.startswith("_")} <= set(dir(device))
    assert set(Accelerator.__annotations__) <= set(dir(device))


def test_torch_calls_it_cuda_and_its_collectives_nccl(device, queued):
    assert (device.type, device.backend, str(device.device)) == ("rocm", "nccl", "cuda:2")
    assert device.model == "AMD Instinct MI300X"
    assert device.index == 1  # of amdsmi, whatever this process sees
    assert queued == [("current", "cuda:2")]


def test_a_batch_is_copied_beside_the_computation(device, queued):
    queued.clear()
    device.await_copy(device.copy((Tensor(queued),)))
    assert queued == [
        ("copies", "begins"), ("copies", "records"), ("copies", "copies to", "cuda:2"), ("copies", "records"),
        ("copies", "ends"), ("compute", "waits for", queued[5][2]), ("compute", "uses"),
    ]  # fmt: skip


def test_a_step_can_be_captured(device, queued):
    queued.clear()
    done, replay = device.capture(lambda: queued.append("work") or 7)
    replay()
    assert done == 7
    assert queued == [("thread_local graph", "begins"), "work", ("thread_local graph", "ends"), "replays"]


def test_its_environment_names_hip_and_where_miopen_keeps_what_it_finds(device, monkeypatch):
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", "/scratch/miopen")
    found = device.environment()
    assert found["hip"] == "6.2.41133"
    assert found["gcn_architecture"] == "gfx942:sramecc+:xnack-"
    assert found["miopen_database"] == "/scratch/miopen"


def test_a_build_without_rocm_is_refused_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(WorkerFailure, match=r"wrong_device: torch .* is built without ROCm"):
        open_device("rocm", 0)


def test_a_node_without_a_gpu_is_refused_and_says_what_is_visible(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch, "cuda", gpu_api(PROPERTIES, [], count=0))
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "9")
    with pytest.raises(WorkerFailure, match=r"wrong_device: .* finds no AMD GPU .*'9'.*/dev/kfd"):
        open_device("rocm", 0)


def test_energy_is_the_count_times_its_resolution_in_joules(device):
    assert device.energy_j() == pytest.approx(2_000_000 * 15.259e-6)


def test_older_releases_call_the_count_power(monkeypatch):
    old = library(amdsmi_get_energy_count=lambda _handle: {"power": 4_000_000, "counter_resolution": 0.5})
    monkeypatch.setitem(sys.modules, "amdsmi", old)
    assert amd_energy.AmdCounter(ADDRESS).joules() == pytest.approx(2.0)


def broken(*_):
    raise OSError("libamd_smi.so: cannot open shared object file")


@pytest.mark.parametrize(
    "changes",
    [
        {"amdsmi_init": broken},
        {"amdsmi_get_processor_handles": broken},
        {"amdsmi_get_gpu_device_bdf": lambda _handle: "0000:99:00.0"},
        {"amdsmi_get_energy_count": broken},
        {
            "amdsmi_get_energy_count": lambda _handle: {
                "energy_accumulator": "N/A",
                "counter_resolution": 15.3,
            }
        },
        {"amdsmi_get_energy_count": lambda _handle: {"energy_accumulator": 0, "counter_resolution": 15.3}},
        {"amdsmi_get_energy_count": lambda _handle: {}},
        {"amdsmi_get_energy_count": lambda _handle: None},
    ],
)
def test_energy_that_the_board_or_its_library_does_not_tell_is_none(monkeypatch, changes):
    monkeypatch.setitem(sys.modules, "amdsmi", library(**changes))
    assert amd_energy.AmdCounter(ADDRESS).joules() is None


def test_without_the_library_or_an_address_there_is_no_counter(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd_energy.AmdCounter(ADDRESS).joules() is None
    assert amd_energy.AmdCounter(None).index() is None
    assert rocm.pci_address(SimpleNamespace()) is None
    assert rocm.pci_address(PROPERTIES) == ADDRESS


def test_miopen_keeps_what_it_finds_on_the_node_in_one_place_for_all_runs(tmp_path):
    first, second = {}, {}
    rocm.prepare_miopen(first, "dynamic_hybrid", "2.6.0+rocm6.2", tmp_path)
    rocm.prepare_miopen(second, None, "2.6.0+rocm6.2", tmp_path)

    folder = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6.0-rocm6.2"
    assert first == {
        "MIOPEN_FIND_MODE": "DYNAMIC_HYBRID",
        "MIOPEN_USER_DB_PATH": str(folder),
        "MIOPEN_CUSTOM_CACHE_DIR": str(folder),
    }
    assert second["MIOPEN_USER_DB_PATH"] == str(folder)
    assert "MIOPEN_FIND_MODE" not in second
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_the_environment_says_of_miopen_stays(tmp_path):
    site = {
        "MIOPEN_USER_DB_PATH": "/site/db",
        "MIOPEN_CUSTOM_CACHE_DIR": "/site/kernels",
        "MIOPEN_FIND_MODE": "FAST",
    }
    found = dict(site)
    rocm.prepare_miopen(found, None, "2.6", tmp_path)
    assert found == site
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path):
    folder = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6"
    folder.mkdir()
    folder.chmod(0o777)
    found = {}
    rocm.prepare_miopen(found, None, "2.6", tmp_path)
    assert found["MIOPEN_USER_DB_PATH"] != str(folder)
    assert Path(found["MIOPEN_USER_DB_PATH"]).stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / f"mlhpc-miopen-{os.getuid()}-2.6"
    link.symlink_to(tmp_path / "elsewhere")
    found = {}
    rocm.prepare_miopen(found, None, "2.6", tmp_path)
    assert found["MIOPEN_USER_DB_PATH"] != str(link)
