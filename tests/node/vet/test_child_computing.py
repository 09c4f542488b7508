"""What vetting's child measures on cores, for real; and what it would measure on devices, as far as that is a decision."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from child_driver import Child

from pytest_mlhpc.node.vet.finding import CheckOutcome, Severity
from pytest_mlhpc.node.vet.load import collectives, devices, gemm, memory, node_facts
from pytest_mlhpc.node.vet.load.arguments import Failed
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode
from pytest_mlhpc.node.vet.load.main import measured
from pytest_mlhpc.node.vet.policy import FLOOR_NAMES, find_floor

GIB = 1 << 30
V100 = Device("cuda", 0, "Tesla V100-SXM2-16GB", "7.0", 80, 16 * GIB)
A100 = Device("cuda", 0, "NVIDIA A100-SXM4-40GB", "8.0", 108, 40 * GIB)
H200 = Device("cuda", 0, "NVIDIA H200", "9.0", 132, 139 * GIB)
RTX = Device("cuda", 0, "NVIDIA GeForce RTX 3090", "8.6", 82, 24 * GIB)
MI250X = Device("rocm", 0, "AMD Instinct MI250X", "gfx90a", 110, 64 * GIB)
PVC = Device("xpu", 0, "Intel(R) Data Center GPU Max 1550", "", 512, 64 * GIB)


def bare(**changes: object) -> LoadNode:
    """Return a node with one core and no devices."""
    node = LoadNode(torch.__version__, "cpu", (), node_facts.allowed_cores()[:1], "Processor")
    return replace(node, **changes)  # type: ignore[arg-type]  # fields of the dataclass


@pytest.mark.servers
@pytest.mark.parametrize(
    ("do", "metric", "unit"),
    [
        ("gemm", "gemm_fp32", "FLOP/s"),
        ("memory", "memory_copy", "B/s"),
        ("all_reduce", "all_reduce_busbw", "B/s"),
    ],
)
def test_cores_are_measured_with_figures_that_can_be_compared(
    child: Child, do: str, metric: str, unit: str
) -> None:
    outcome, again = (child.outcome(do, seconds=0.02, round=number) for number in (1, 0))
    assert outcome.findings == ()
    assert metric in {reading.metric for reading in outcome.readings}
    assert {(one.check, one.unit, one.round) for one in outcome.readings} == {(do, unit, 1)}
    assert min(one.value for one in outcome.readings) > 1e6
    assert all(one.model.endswith("cores") and one.key.startswith(f"{do}/") for one in outcome.readings)
    assert {reading.key for reading in outcome.readings} == {reading.key for reading in again.readings}


@pytest.mark.servers
def test_nodes_without_devices_have_nothing_to_copy_to(child: Child) -> None:
    assert replace(child.outcome("host_copy"), seconds=0.0) == CheckOutcome()


@pytest.mark.parametrize(
    ("device", "precisions"),
    [
        (V100, "fp32 fp64 fp16"),
        (A100, "fp32 fp64 fp16 bf16 tf32"),
        (RTX, "fp32 fp16 bf16 tf32"),
        (MI250X, "fp32 fp64 fp16 bf16"),
        (PVC, "fp32 fp16 bf16"),
    ],
    ids=lambda value: getattr(value, "model", None),
)
def test_precisions_follow_from_the_model_alone(device: Device, precisions: str) -> None:
    assert {case.precision for case in gemm.cases_of(device)} == set(precisions.split())


def test_matrices_shrink_with_the_memory() -> None:
    assert {case.size for case in gemm.cases_of(H200)} == {8192}
    assert {case.size for case in gemm.cases_of(replace(A100, memory=5 * GIB))} == {4096}


@pytest.mark.parametrize(
    ("count", "flags", "cases"),
    [
        (2, ["avx2"], {"fp32": 1024}),
        (2, ["avx2", "amx_bf16"], {"fp32": 1024, "bf16": 1024}),
        (288, ["bf16"], {"fp32": 4096, "bf16": 4096}),
    ],
)
def test_cores_multiply_bf16_only_where_they_do_it_fast(count, flags, cases) -> None:
    assert {case.precision: case.size for case in gemm.cases_of_cores(count, flags)} == cases


def test_every_floor_that_is_named_is_known() -> None:
    named = {f"gemm/{case.precision}" for device in (V100, A100, MI250X) for case in gemm.cases_of(device)}
    assert {"gemm/fp64", "gemm/fp16", "gemm/bf16"} <= named & set(FLOOR_NAMES)
    for name in ("memory/device", "host_copy"):
        assert find_floor(name, H200.model) is not None
    assert find_floor("all_reduce/4", f"4 x {H200.model}") is not None


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert collectives.bus_factor(2) == 1.0
    assert collectives.bus_factor(8) == pytest.approx(1.75)


def test_a_node_with_one_device_exchanges_nothing_within() -> None:
    outcome = measured(
        "all_reduce", collectives.run_all_reduce, bare(kind="cuda", devices=(H200,)), {}, print
    )
    assert replace(outcome, seconds=0.0) == CheckOutcome()


def test_devices_that_torch_cannot_use_are_unknown_and_never_pass() -> None:
    node = bare(trouble="this node shows NVIDIA devices, but torch finds none")
    (finding,) = measured("host_copy", memory.run_host_copy, node, {}, print).findings
    assert finding.severity is Severity.UNKNOWN
    assert "NVIDIA" in finding.reason


def test_devices_of_the_kernel_are_detected_without_torch(tmp_path: Path) -> None:
    assert node_facts.unused_devices("2.9", tmp_path) == ""
    kfd = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu in enumerate(("0", "51110")):
        (kfd / str(number)).mkdir(parents=True)
        (kfd / str(number) / "gpu_id").write_text(gpu)
    assert "this node shows AMD devices" in node_facts.unused_devices("2.9", tmp_path)
    (kfd / "1/gpu_id").write_text("0")  # processors alone
    assert node_facts.unused_devices("2.9", tmp_path) == ""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert "this node shows NVIDIA devices" in node_facts.unused_devices("2.9", tmp_path)


@pytest.mark.parametrize(
    ("error", "rule", "severity"),
    [
        ("CUDA out of memory. Tried to allocate 512.00 MiB", "device_memory", Severity.CRITICAL),
        ("CUDA error: no kernel image is available for execution", "not_supported", Severity.UNKNOWN),
    ],
)
def test_what_a_device_says_tells_whose_fault_it_is(error: str, rule: str, severity: Severity) -> None:
    finding = devices.failure("gemm", H200, RuntimeError(error))
    assert (finding.rule, finding.severity) == (rule, severity)
    assert ("left on it?" in finding.reason) is (rule == "device_memory")


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        ([0.01] * 80, 100.0),
        (([0.01] * 7 + [0.03]) * 10, 80.0),  # of each 100 ms 20 are lost to one repetition
        ([0.2, 0.2, 5.0, 0.2, 0.2], 5.0),
        ([0.01], 100.0),
    ],
    ids=["steady", "stopped for a fifth of each period", "disturbed once", "a single one"],
)
def test_the_rate_is_that_of_a_usual_period(seconds: list[float], rate: float) -> None:
    assert devices.median_rate(1.0, seconds) == pytest.approx(rate)


@pytest.mark.servers
def test_nodes_say_on_how_many_cores_they_compute(child: Child) -> None:
    (fact,) = child.outcome("gemm", seconds=0.05).facts
    assert (fact.name, fact.value) == ("cores to compute on", str(len(node_facts.allowed_cores())))


@pytest.mark.parametrize(
    ("kind", "environ", "numbers"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "2, 3"}, {0: 2, 1: 3}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-1234"}, {}),
        ("rocm", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, {}),
    ],
)
def test_devices_have_the_numbers_of_the_drivers_tools(kind, environ, numbers) -> None:
    assert devices.shown_indices(kind, environ) == numbers


def test_a_device_is_called_by_its_number_there() -> None:
    assert replace(H200, index=5).name == "GPU 5"


def test_arrays_shrink_with_the_memory_and_are_equal_on_equal_nodes() -> None:
    assert memory.core_bytes(2, 16 * GIB) == 64 << 20
    assert memory.core_bytes(64, 16 * GIB) == memory.core_bytes(64, 16 * GIB - 300_000_000) == 32 << 20
    with pytest.raises(Failed, match="memory needs 1024 MiB, there are 1024 MiB for us"):
        memory.core_bytes(64, GIB)
    assert memory.device_bytes(H200) == GIB
    assert memory.device_bytes(replace(H200, memory=5 * GIB)) == GIB // 2


def test_a_control_groups_quota_limits_the_cores(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/kubepods/pod1/box\n")
    (tmp_path / "kubepods/pod1/box").mkdir(parents=True)
    for folder, quota in (("kubepods", "max"), ("kubepods/pod1", "350000"), ("kubepods/pod1/box", "max")):
        (tmp_path / folder / "cpu.max").write_text(f"{quota} 100000")
    assert node_facts.cores_of_quota(tmp_path, own) == 4
    (tmp_path / "kubepods/pod1/cpu.max").write_text("max 100000")
    assert node_facts.cores_of_quota(tmp_path, own) is None
    assert node_facts.cores_of_quota(tmp_path, tmp_path / "missing") is None


def test_what_one_thread_raises_is_raised_and_no_other_waits_for_it() -> None:
    def work(number: int, barrier: threading.Barrier) -> None:
        if number == 1:
            raise ValueError("one")
        barrier.wait()

    with pytest.raises(ValueError, match="one"):
        node_facts.at_once(3, work)


def test_cores_near_a_device_are_those_of_the_kernels_list(tmp_path: Path) -> None:
    device = replace(H200, pci="0000:1b:00.0")
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    assert memory.near_cores(device, (0, 1, 2), tmp_path) == set()
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("1-3,8\n")
    assert memory.near_cores(device, (0, 1, 2, 8), tmp_path) == {1, 2, 8}
    assert memory.near_cores(H200, (0, 1), tmp_path) == set()
