"""GPUs that are not there: their streams and events write down what is queued where."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_mlhpc.node.worker.base import Accelerator

#: AMD board's address in the spelling of Linux.
AMD_ADDRESS = "0000:65:00.0"
#: Type of device -> what torch tells of one.
PROPERTIES = {
    "cuda": {"name": "NVIDIA A100", "major": 8, "minor": 0, "uuid": "0f1e"},
    "rocm": {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-", "pci_domain_id": 0,
             "pci_bus_id": 0x65, "pci_device_id": 0},
    "xpu": {"name": "Intel(R) Data Center GPU Max 1550", "driver_version": "1.3.30049", "max_compute_units": 448,
            "gpu_eu_count": 448},
}  # fmt: skip
#: Type of device -> the member of torch.version that names its build, and its value.
BUILDS = {"cuda": ("cuda", "12.8"), "rocm": ("hip", "6.2.41133"), "xpu": ("xpu", "20250000")}


def lacking(device: Accelerator) -> list[str]:
    """Return what the protocol names and a device does not have."""
    names = {*vars(Accelerator), *Accelerator.__annotations__}
    return [name for name in sorted(names) if not name.startswith("_") and not hasattr(device, name)]


class Stream:
    def __init__(self, name: str, queued: list[Any]) -> None:
        self.name = name
        self.queued = queued

    def __enter__(self):
        self.queued.append((self.name, "begins"))
        return self

    def __exit__(self, *_):
        self.queued.append((self.name, "ends"))

    def wait_event(self, event):
        self.queued.append((self.name, "waits for", event))

    def wait_stream(self, stream):
        self.queued.append((self.name, "waits for", stream.name))


class Event:
    """One millisecond lies between each event and the next."""

    count = 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.count += 1
        self.number = Event.count

    def record(self, stream):
        stream.queued.append((stream.name, "records", self))

    def elapsed_time(self, end):
        return float(end.number - self.number)

    def synchronize(self):
        pass


class Tensor:
    """A tensor that says on which device it is and who uses it."""

    def __init__(self, queued, device="cpu"):
        self.queued = queued
        self.device = torch.device(device)

    def to(self, device, non_blocking):
        assert non_blocking
        self.queued.append(("copies", "copies to", str(device)))
        return Tensor(self.queued, device)

    def record_stream(self, stream):
        self.queued.append((stream.name, "uses", self))


def gpu_api(properties: dict[str, Any], queued: list[Any], count: int = 4) -> SimpleNamespace:
    """Return what stands for ``torch.cuda`` or ``torch.xpu``. The first stream that is made is that of copies."""
    names = iter(("copies",))
    compute = Stream("compute", queued)
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        set_device=lambda device: queued.append(("current", str(device))),
        get_device_properties=lambda _device: SimpleNamespace(**properties),
        Stream=lambda _device: Stream(next(names, "side"), queued),
        stream=lambda stream: stream,
        current_stream=lambda _device: compute,
        Event=Event,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: queued.append("replays")),
        graph=lambda _graph, capture_error_mode="global": Stream(f"{capture_error_mode} graph", queued),
        synchronize=lambda device: queued.append(("waits", str(device))),
        reset_peak_memory_stats=lambda _device: None,
        max_memory_allocated=lambda _device: 1 << 30,
    )


def install(monkeypatch: pytest.MonkeyPatch, kind: str, count: int = 4) -> tuple[SimpleNamespace, list[Any]]:
    """Make torch one that was built for GPUs of this kind, of which *count* are there; return its API, and what is queued."""
    name, version = BUILDS[kind]
    queued: list[Any] = []
    api = gpu_api(PROPERTIES[kind], queued, count)
    monkeypatch.setattr(torch.version, name, version, raising=False)
    monkeypatch.setattr(torch, "xpu" if kind == "xpu" else "cuda", api)
    return api, queued
