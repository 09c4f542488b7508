"""Intel GPUs, with a stand-in for torch.xpu whose names are compared with torch's: no GPU has seen this."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu_stand_ins import Tensor, gpu_api

from pytest_mlhpc.worker import loop
from pytest_mlhpc.worker.accelerators.base import Accelerator, open_device
from pytest_mlhpc.worker.failure import WorkerFailure

PROPERTIES = SimpleNamespace(
    name="Intel(R) Data Center GPU Max 1550",
    driver_version="1.3.30049",
    max_compute_units=448,
    gpu_eu_count=448,
)


@pytest.fixture
def queued():
    return []


@pytest.fixture
def device(monkeypatch, queued):
    monkeypatch.setattr(torch.version, "xpu", "20250000", raising=False)
    monkeypatch.setattr(torch, "xpu", gpu_api(PROPERTIES, queued))
    return open_device("xpu", 1)


def test_all_that_the_stand_in_has_is_in_torch():
    graphs = {"CUDAGraph", "graph"}  # of torch.cuda alone
    ours = set(vars(gpu_api(PROPERTIES, [])))
    assert [name for name in sorted(ours - graphs) if not hasattr(torch.xpu, name)] == []
    assert [name for name in sorted(ours) if not hasattr(torch.cuda, name)] == []
    for api in (torch.cuda, torch.xpu):
        assert {"wait_event", "wait_stream"} <= set(dir(api.Stream))
        assert {"record", "elapsed_time", "synchronize"} <= set(dir(api.Event))


def test_it_has_all_that_the_protocol_names(device):
    assert {name for name in vars(Accelerator) if not name.startswith("_")} <= set(dir(device))
    assert set(Accelerator.__annotations__) <= set(dir(device))


def test_ranks_talk_by_xccl(device, queued):
    assert (device.type, device.backend, str(device.device), device.index) == ("xpu", "xccl", "xpu:1", 1)
    assert queued == [("current", "xpu:1")]


def test_its_environment_names_driver_and_size_and_leaves_out_what_is_unknown(device):
    assert device.environment() == {
        "xpu_driver_version": "1.3.30049", "xpu_max_compute_units": "448", "xpu_gpu_eu_count": "448"
    }  # fmt: skip
    assert device.energy_j() is None


def test_times_come_from_events_of_both_streams(device, queued):
    queued.clear()
    start = device.mark()
    copied = device.copy((Tensor(queued),))
    device.await_copy(copied)
    end = device.mark()
    assert device.seconds(start, end) == pytest.approx(0.003)
    assert device.seconds(copied.start, copied.end) == pytest.approx(0.001)
    assert [entry[:2] for entry in queued] == [
        ("compute", "records"), ("copies", "begins"), ("copies", "records"), ("copies", "copies to"),
        ("copies", "records"), ("copies", "ends"), ("compute", "waits for"), ("compute", "uses"), ("compute", "records"),
    ]  # fmt: skip


def test_it_has_no_graphs(device):
    assert not hasattr(device, "capture")


def test_fp16_is_scaled_on_it_too():
    scaler = loop.grad_scaler("xpu", "fp16", 256.0)
    assert scaler._init_scale == 256.0
    assert scaler._device == "xpu"


def test_a_build_without_xpu_is_refused_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    with pytest.raises(WorkerFailure, match=r"wrong_device: torch .* is built without XPU"):
        open_device("xpu", 0)


def test_a_node_without_a_gpu_is_refused_and_says_what_is_visible(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", "20250000", raising=False)
    monkeypatch.setattr(torch, "xpu", gpu_api(PROPERTIES, [], count=0))
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:7")
    with pytest.raises(WorkerFailure, match=r"wrong_device: .* finds no Intel GPU .*'level_zero:7'"):
        open_device("xpu", 0)


def test_a_torch_that_cannot_time_is_refused(monkeypatch):
    old = gpu_api(PROPERTIES, [])
    del old.max_memory_allocated
    monkeypatch.setattr(torch.version, "xpu", "20240000", raising=False)
    monkeypatch.setattr(torch, "xpu", old)
    with pytest.raises(WorkerFailure, match=r"not_supported: torch .* lacks memory statistics"):
        open_device("xpu", 0)


def test_ranks_never_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", "20250000", raising=False)
    monkeypatch.setattr(torch, "xpu", gpu_api(PROPERTIES, [], count=2))
    with pytest.raises(WorkerFailure, match="too_few_devices: rank 2 of this node finds 2 devices"):
        open_device("xpu", 2)
