"""Streams and events of a GPU that is not there, which write down what is queued where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


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
        stream.queued.append((stream.name, "records"))

    def elapsed_time(self, end):
        return float(end.number - self.number)

    def synchronize(self):
        pass


class Tensor:
    """A host tensor that says on which device it is and who uses it."""

    def __init__(self, queued, device="cpu"):
        self.queued = queued
        self.device = torch.device(device)

    def to(self, device, non_blocking):
        assert non_blocking
        self.queued.append(("copies", "copies to", str(device)))
        return Tensor(self.queued, device)

    def record_stream(self, stream):
        self.queued.append((stream.name, "uses"))


class Graph:
    def __init__(self, queued):
        self.queued = queued

    def replay(self):
        self.queued.append("replays")


def gpu_api(properties: SimpleNamespace, queued: list[Any], count: int = 4) -> SimpleNamespace:
    """Return what stands for ``torch.cuda`` or ``torch.xpu``. The first stream that is made is that of copies."""
    made: list[Stream] = []

    def stream_of(_device):
        made.append(Stream("copies" if not made else "side", queued))
        return made[-1]

    compute = Stream("compute", queued)
    return SimpleNamespace(
        is_available=lambda: count > 0,
        device_count=lambda: count,
        set_device=lambda device: queued.append(("current", str(device))),
        get_device_properties=lambda _device: properties,
        Stream=stream_of,
        stream=lambda stream: stream,
        current_stream=lambda _device: compute,
        Event=Event,
        CUDAGraph=lambda: Graph(queued),
        graph=lambda _graph, capture_error_mode="global": Stream(f"{capture_error_mode} graph", queued),
        synchronize=lambda device: queued.append(("waits", str(device))),
        reset_peak_memory_stats=lambda _device: None,
        max_memory_allocated=lambda _device: 1 << 30,
    )
