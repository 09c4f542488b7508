"""What vetting's child does with devices, with cores in their place: everything but the driver is real."""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import CheckOutcome, Severity
from pytest_mlhpc.node.vet.load import devices, digest, gemm, memory, node_facts
from pytest_mlhpc.node.vet.load.devices import Device, LoadNode
from pytest_mlhpc.node.vet.load.digest import EXACT, Digests
from pytest_mlhpc.node.vet.load.gemm import GemmCase
from pytest_mlhpc.node.vet.load.main import COMMANDS, measured
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import built_in

MODEL = "NVIDIA H200"


@dataclass(frozen=True)
class Stand(Device):
    """A device whose work is done by the host's cores."""

    breaks: str = ""

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    @property
    def module(self) -> Any:
        return SimpleNamespace(synchronize=lambda ordinal: None)

    def use(self) -> None:
        if self.breaks:
            raise RuntimeError(self.breaks)

    def timed(self, work: Callable[[], object]) -> float:
        return devices.by_clock(work)


def node(*breaks: str, models: tuple[str, ...] = ()) -> LoadNode:
    """Return a node with a device for each of *breaks*, which says why it fails, or nothing."""
    names = models or (MODEL,) * len(breaks)
    found = tuple(
        Stand("cuda", number, names[number], "9.0", 132, 64 << 20, breaks=text)
        for number, text in enumerate(breaks)
    )
    return LoadNode(torch.__version__, "cuda", found, node_facts.allowed_cores(), "Processor")


def run(name: str, on: LoadNode, **args: object) -> tuple[CheckOutcome, list[str]]:
    begun: list[str] = []
    module, function = COMMANDS[name]
    command = getattr(importlib.import_module(f"pytest_mlhpc.node.vet.load.{module}"), function)
    outcome = measured(name, command, on, {"seconds": 0.01, **args}, begun.append)
    return outcome, begun


def shown(outcome: CheckOutcome) -> set[tuple[str, str]]:
    """Return key and device of all readings."""
    return {(reading.key, reading.device) for reading in outcome.readings}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep matrices and arrays small, and torch as it was."""
    cases = (
        GemmCase("fp32", "float32", 64),
        GemmCase("bf16", "bfloat16", 64),
        GemmCase("tf32", "float32", 64),
    )
    for module in (gemm, digest):
        monkeypatch.setattr(module, "cases_of", lambda device: cases)
    for module, name, value in (
        (devices, "REPETITION_S", 0.0), (memory, "CORE_BYTES", 1 << 20),
        (digest, "DEVICE_SIZE", digest.CORE_SIZE),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def test_all_devices_are_measured_in_each_precision() -> None:
    outcome, begun = run("gemm", node("", ""), round=1)
    assert begun == ["gemm fp32", "gemm bf16", "gemm tf32"]
    assert outcome.findings == ()
    keys = [f"gemm/{precision}/64/uniform" for precision in ("fp32", "bf16", "tf32")]
    assert shown(outcome) == set(product(keys, ("GPU 0", "GPU 1")))
    assert {(one.model, one.round, one.unit) for one in outcome.readings} == {(MODEL, 1, "FLOP/s")}
    assert not torch.backends.cuda.matmul.allow_tf32


def test_all_devices_compute_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=300.0)

    class Meeting(Stand):
        def timed(self, work: Callable[[], object]) -> float:
            meeting.wait()  # breaks if the other device is not at work
            return super().timed(work)

    devices = tuple(Meeting("cuda", number, MODEL, "9.0") for number in range(2))
    both = gemm.on_all(devices, lambda device, meet: device.timed(lambda: None), print, "gemm")
    assert all(isinstance(seconds, float) for _, seconds in both)


@pytest.mark.parametrize("after", [False, True])
def test_a_device_that_hangs_is_named_while_it_does(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Before all are ready, or after the others have ended."""
    monkeypatch.setattr(devices, "LATE_S", 0.01)
    hanging = threading.Event()

    def begun(what: str) -> None:
        if what == "gemm bf16 on GPU 1":  # a busy machine may be late with the others too, for a while
            hanging.set()

    def work(device: Device, meet: devices.Meet) -> None:
        if after:
            meet()
        if device.ordinal == 1:
            assert hanging.wait(300.0)
        if not after:
            meet()

    results = devices.on_all(node("", "", "").devices, work, begun, "gemm bf16")
    assert [result for _, result in results] == [None, None, None]
    assert hanging.is_set()


@pytest.mark.parametrize("command", ["gemm", "memory", "hash"])
def test_a_broken_device_is_named_by_every_measurement_and_the_others_are_measured(command: str) -> None:
    outcome, _ = run(command, node("", "CUDA error: uncorrectable ECC error encountered", ""))
    assert {(one.device, one.severity, one.rule) for one in outcome.findings} == {
        ("GPU 1", Severity.CRITICAL, "device_error")
    }
    assert all("uncorrectable ECC error" in one.reason for one in outcome.findings)
    assert {one.device for one in (*outcome.readings, *outcome.facts)} - {""} == {"GPU 0", "GPU 2"}


def test_memory_of_host_and_devices_is_measured() -> None:
    outcome, begun = run("memory", node("", ""))
    assert begun == ["memory of the host", "memory of the devices"]
    assert {(one.key, one.model, one.device) for one in outcome.readings} == {
        ("memory/copy/1MiB", node("").cpu_model, ""),
        ("memory/device_copy/8MiB", MODEL, "GPU 0"),
        ("memory/device_copy/8MiB", MODEL, "GPU 1"),
    }


def test_devices_vote_by_model_and_software() -> None:
    outcome, _ = run("hash", node("", ""))
    assert outcome.findings == ()
    first, second = (fact for fact in outcome.facts if fact.device)
    assert second == replace(first, device="GPU 1")
    assert (first.device, first.scope) == ("GPU 0", f"{MODEL}, 132 units")
    assert first.name.startswith("hash/bfloat16/256x8/torch ")


def test_a_device_that_computes_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Digests({EXACT[digest.DEVICE_SIZE]: 2}, {"a": 2})
    answers = {0: right, 1: Digests({"f" * 64: 2}, {"b": 2})}

    class Told(Stand):
        @property
        def torch(self) -> Any:
            return self.ordinal

    monkeypatch.setattr(digest, "compute", lambda given, device, dtype, seconds: answers[device])
    two = tuple(Told("cuda", number, MODEL, "9.0", 132) for number in range(2))
    exam = Examination("hash", Machine(), Context(built_in()))
    digest.of_devices(exam, LoadNode("2.9", "cuda", two, (0,), "Processor"), 0.0, print)
    assert [(one.device, one.rule) for one in exam.findings] == [("GPU 1", "exact")]
    assert [(one.device, one.value) for one in exam.facts] == [("GPU 0", "a"), ("GPU 1", "b")]


def test_copies_of_each_device_are_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = torch.empty
    monkeypatch.setattr(memory, "COPY_BYTES", 1 << 20)

    def unpinned(*size: int, pin_memory: bool = False, **other: Any) -> torch.Tensor:
        return honest(*size, **other)  # without a driver nothing can be pinned

    monkeypatch.setattr(torch, "empty", unpinned)
    outcome, begun = run("host_copy", node("", "CUDA error: device lost"))
    assert begun == ["host_copy GPU 0", "host_copy GPU 1"]
    ways = ("host_copy/h2d/1MiB/pinned", "host_copy/d2h/1MiB/pinned")
    assert shown(outcome) == {(way, "GPU 0") for way in ways}
    assert [one.device for one in outcome.findings] == ["GPU 1"]


class Nccl:
    """Sums as NCCL does, in place on all devices; *wrong* is added to one element of the last."""

    def __init__(self, wrong: float) -> None:
        self.wrong = wrong

    def all_reduce(self, data: list[torch.Tensor]) -> None:
        total = torch.stack(data).sum(0)
        for tensor in data:
            tensor.copy_(total)
        data[-1].view(-1)[-7].add_(self.wrong)


def test_devices_of_one_model_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "nccl", Nccl(wrong=0.0))
    outcome, begun = run("all_reduce", node("", "", "", ""))
    assert (outcome.findings, begun) == ((), ["all_reduce of 4 devices by nccl"])
    assert [(one.model, one.floor) for one in outcome.readings] == [(f"4 x {MODEL}", "all_reduce/4")]


@pytest.mark.parametrize(
    ("wrong", "models", "found"),
    [
        (1.0, (MODEL,) * 4, (Severity.CRITICAL, "sum", "nccl between the 4 devices of this node")),
        (0.0, ("A", "B"), (Severity.INFO, "not_supported", "")),
    ],
    ids=["a wrong sum", "several models"],
)
def test_a_sum_that_is_wrong_or_was_not_made_is_said(
    monkeypatch: pytest.MonkeyPatch, wrong: float, models: tuple[str, ...], found: tuple[Severity, str, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "nccl", Nccl(wrong))
    outcome, _ = run("all_reduce", node(*[""] * len(models), models=models))
    (finding,) = outcome.findings
    assert (finding.severity, finding.rule) == found[:2]
    assert found[2] in finding.reason
