"""What is queued on which stream, in which order. Streams and events are stand-ins: no GPU is needed to see that."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from gpu_stand_ins import gpu_api

from pytest_mlhpc.worker.accelerators.cuda import Cuda


class Stream:
    def __init__(self, name, queued):
        self.name = name
        self.queued = queued

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait_event(self, event):
        self.queued.append((self.name, "waits for", event))


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        stream.queued.append((stream.name, "records", self))


class Tensor:
    """A host tensor that says on which device it is and who uses it."""

    def __init__(self, queued, device="cpu"):
        self.queued = queued
        self.device = torch.device(device)

    def to(self, device, non_blocking):
        assert non_blocking
        self.queued.append(("copies", "copies to", device))
        return Tensor(self.queued, device)

    def record_stream(self, stream):
        self.queued.append((stream.name, "uses", self))


@pytest.fixture
def queued():
    return []


@pytest.fixture
def device(monkeypatch, queued):
    streams = {"copies": Stream("copies", queued), "compute": Stream("compute", queued)}
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: streams["copies"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: streams["compute"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Cuda(0)


def test_a_batch_is_copied_beside_the_computation_which_waits_for_its_end(device, queued):
    copied = device.copy((Tensor(queued), Tensor(queued)))
    device.await_copy(copied)

    moved = copied.tensors
    assert queued == [
        ("copies", "records", copied.start),
        ("copies", "copies to", device.device),
        ("copies", "copies to", device.device),
        ("copies", "records", copied.end),
        ("compute", "waits for", copied.end),
        ("compute", "uses", moved[0]),
        ("compute", "uses", moved[1]),
    ]


def test_a_batch_that_is_there_already_is_not_copied(device, queued):
    tensors = (Tensor(queued, "cuda:0"),)

    copied = device.copy(tensors)
    device.await_copy(copied)

    assert copied.tensors is tensors
    assert queued == []


def test_a_mark_lies_on_the_compute_stream(device, queued):
    mark = device.mark()

    assert queued == [("compute", "records", mark)]
    assert device.model == "NVIDIA H100 80GB HBM3"


def test_work_aside_lies_between_what_is_queued_before_and_after_it(monkeypatch):
    queued = []
    monkeypatch.setattr(torch, "cuda", gpu_api(SimpleNamespace(name="NVIDIA A100", major=8, minor=0), queued))
    device = Cuda(0)
    queued.clear()

    assert device.aside(lambda: queued.append("work") or 7) == 7

    assert queued == [
        ("side", "waits for", "compute"), ("side", "begins"), "work", ("side", "ends"), ("compute", "waits for", "side"),
    ]  # fmt: skip


def test_a_captured_step_is_queued_by_its_replay_alone(monkeypatch):
    queued = []
    monkeypatch.setattr(torch, "cuda", gpu_api(SimpleNamespace(name="NVIDIA A100", major=8, minor=0), queued))
    device = Cuda(0)
    queued.clear()

    done, replay = device.capture(lambda: queued.append("work") or 7)
    replay()
    replay()

    assert done == 7
    assert queued == [
        ("thread_local graph", "begins"),
        "work",
        ("thread_local graph", "ends"),
        "replays",
        "replays",
    ]


def test_a_torch_before_2_1_captures_in_its_only_mode(monkeypatch):
    queued = []
    api = gpu_api(SimpleNamespace(name="NVIDIA A100", major=8, minor=0), queued)
    api.graph = lambda _graph: Stream("old graph", queued)
    monkeypatch.setattr(torch, "cuda", api)
    device = Cuda(0)

    device.capture(lambda: queued.append("work"))

    assert "work" in queued


def test_energy_is_asked_for_by_uuid_and_told_in_joules(monkeypatch):
    asked = []

    def handle_of(uuid):
        asked.append(uuid)
        return "handle"

    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetTotalEnergyConsumption=lambda _handle: 12_500, nvmlDeviceGetIndex=lambda _handle: 6,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, uuid="0f1e")
    monkeypatch.setattr(torch, "cuda", gpu_api(properties, []))

    device = Cuda(0)

    assert asked == ["GPU-0f1e"]
    assert device.energy_j() == 12.5
    assert device.index == 6
