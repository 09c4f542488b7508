"""GPUs of all makers, with stand-ins whose names are compared with torch's: what is queued on which stream, in which order."""

import sys
from types import SimpleNamespace

import pytest
import torch
from gpu_stand_ins import BUILDS, PROPERTIES, Stream, Tensor, gpu_api, install, lacking

from pytest_mlhpc.node.worker import loop
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.environment import WorkerFailure

of_every_kind = pytest.mark.parametrize("kind", BUILDS)
with_graphs = pytest.mark.parametrize("kind", ["cuda", "rocm"])


@pytest.fixture
def opened(monkeypatch, kind):
    """Return a device of this kind, and what is queued on it from now on."""
    _, queued = install(monkeypatch, kind)
    device = open_device(kind, 1)
    assert queued == [("current", str(device.device))]
    queued.clear()
    return device, queued


def test_all_that_the_stand_in_has_is_in_torch():
    ours = set(vars(gpu_api(PROPERTIES["xpu"], [])))
    graphs = {"CUDAGraph", "graph"}  # of torch.cuda alone
    assert [name for name in sorted(ours - graphs) if not hasattr(torch.xpu, name)] == []
    assert [name for name in sorted(ours) if not hasattr(torch.cuda, name)] == []
    for api in (torch.cuda, torch.xpu):
        assert {"wait_event", "wait_stream"} <= set(dir(api.Stream))
        assert {"record", "elapsed_time", "synchronize"} <= set(dir(api.Event))


@of_every_kind
def test_it_has_all_that_the_protocol_names(opened):
    assert lacking(opened[0]) == []


@pytest.mark.parametrize(
    ("kind", "backend", "place"),
    [("cuda", "nccl", "cuda:1"), ("rocm", "nccl", "cuda:1"), ("xpu", "xccl", "xpu:1")],
)
def test_ranks_talk_by_the_collectives_of_its_maker(opened, kind, backend, place):
    device = opened[0]
    assert (device.type, device.backend, str(device.device), device.index) == (kind, backend, place, 1)
    assert device.model == PROPERTIES[kind]["name"]


@of_every_kind
def test_a_batch_is_copied_during_the_computation_which_waits_for_its_end(opened):
    device, queued = opened
    start = device.mark()
    copied = device.copy((Tensor(queued), Tensor(queued)))
    device.await_copy(copied)
    end = device.mark()
    assert queued == [
        ("compute", "records", start), ("copies", "begins"), ("copies", "records", copied.start),
        *[("copies", "copies to", str(device.device))] * 2, ("copies", "records", copied.end), ("copies", "ends"),
        ("compute", "waits for", copied.end), *(("compute", "uses", tensor) for tensor in copied.tensors),
        ("compute", "records", end),
    ]  # fmt: skip
    assert device.seconds(start, end) == pytest.approx(0.003)
    assert device.seconds(copied.start, copied.end) == pytest.approx(0.001)


@of_every_kind
def test_a_batch_that_is_there_already_is_not_copied(opened):
    device, queued = opened
    tensors = (Tensor(queued, device.device),)
    copied = device.copy(tensors)
    device.await_copy(copied)
    assert copied.tensors is tensors
    assert queued == []


@of_every_kind
def test_work_aside_lies_between_what_is_queued_before_and_after_it(opened):
    device, queued = opened
    assert device.aside(lambda: queued.append("work") or 7) == 7
    assert queued == [
        ("side", "waits for", "compute"), ("side", "begins"), "work", ("side", "ends"), ("compute", "waits for", "side"),
    ]  # fmt: skip


@with_graphs
def test_a_captured_step_is_queued_by_its_replay_alone(opened):
    device, queued = opened
    result, replay = device.capture(lambda: queued.append("work") or 7)
    replay()
    replay()
    assert result == 7
    graph = "thread_local graph"
    assert queued == [(graph, "begins"), "work", (graph, "ends"), "replays", "replays"]


def test_a_torch_before_2_1_captures_in_its_only_mode(monkeypatch):
    api, queued = install(monkeypatch, "cuda")
    api.graph = lambda _graph: Stream("old graph", queued)
    open_device("cuda", 0).capture(lambda: queued.append("work"))
    assert queued[1:] == [("old graph", "begins"), "work", ("old graph", "ends")]


def test_nvidias_energy_is_asked_for_by_uuid_and_given_in_joules(monkeypatch):
    handles = []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: handles.append(uuid) or "a",
        nvmlDeviceGetTotalEnergyConsumption=lambda _handle: 12_500, nvmlDeviceGetIndex=lambda _handle: 6,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    install(monkeypatch, "cuda")
    device = open_device("cuda", 0)
    assert handles == ["GPU-0f1e"]
    assert (device.energy_j(), device.index) == (12.5, 6)


@pytest.mark.parametrize("kind", ["xpu"])
def test_intels_environment_names_driver_and_size_and_leaves_out_what_is_unknown(opened):
    assert opened[0].environment() == {
        "xpu_driver_version": "1.3.30049", "xpu_max_compute_units": "448", "xpu_gpu_eu_count": "448"
    }  # fmt: skip
    assert opened[0].energy_j() is None
    assert not hasattr(opened[0], "capture")  # nor have they graphs


def test_fp16_is_scaled_on_intels_too():
    scaler = loop.grad_scaler("xpu", "fp16", 256.0)
    assert (scaler._init_scale, scaler._device) == (256.0, "xpu")


@pytest.mark.parametrize(("kind", "name"), [("cuda", "CUDA"), ("rocm", "ROCm"), ("xpu", "XPU")])
def test_another_build_of_torch_is_refused_and_named(monkeypatch, kind, name):
    monkeypatch.setattr(torch.version, BUILDS[kind][0], None, raising=False)
    with pytest.raises(WorkerFailure, match=f"^wrong_device: torch .* is built without {name}"):
        open_device(kind, 0)


@pytest.mark.parametrize(
    ("kind", "variable", "text"),
    [
        ("cuda", "CUDA_VISIBLE_DEVICES", r"^wrong_device: .* finds no NVIDIA GPU .*'9'"),
        ("rocm", "ROCR_VISIBLE_DEVICES", r"^wrong_device: .* finds no AMD GPU .*'9'.*/dev/kfd"),
        ("xpu", "ONEAPI_DEVICE_SELECTOR", r"^wrong_device: .* finds no Intel GPU .*'9'"),
    ],
)
def test_a_node_without_a_gpu_is_refused_and_says_what_is_visible(monkeypatch, kind, variable, text):
    install(monkeypatch, kind, count=0)
    monkeypatch.setenv(variable, "9")
    with pytest.raises(WorkerFailure, match=text):
        open_device(kind, 0)


def test_a_torch_that_cannot_time_intels_is_refused(monkeypatch):
    api, _ = install(monkeypatch, "xpu")
    del api.max_memory_allocated
    with pytest.raises(WorkerFailure, match=r"^not_supported: torch .* lacks memory statistics"):
        open_device("xpu", 0)


@of_every_kind
def test_ranks_never_share_a_gpu(monkeypatch, kind):
    install(monkeypatch, kind, count=2)
    with pytest.raises(WorkerFailure, match=r"^too_few_devices: rank 2 of this node finds 2 devices"):
        open_device(kind, 2)
