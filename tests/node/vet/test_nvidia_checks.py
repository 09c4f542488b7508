"""What NVIDIA checks make of calls that fail in every way, and of what the corpus does not hold."""

import copy
import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import fake_nvml
import pytest
import yaml
from corpus import CORPUS, Case, findings, load, machine_of, named, outcomes, rows

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.checks import nvidia_load, nvidia_processes
from pytest_mlhpc.node.vet.checks.nvidia_devices import (
    MODELS,
    Answer,
    NvidiaDevice,
    NvmlLibrary,
    unread,
)
from pytest_mlhpc.node.vet.checks.nvidia_processes import is_ours
from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine
from pytest_mlhpc.node.vet.policy import ExpectedNode, built_in

CALLS = yaml.safe_load(Path(__file__).with_name("data").joinpath("nvidia_calls.yaml").read_text())


@functools.cache
def loaded(name: str) -> Case:
    return load(CORPUS / "nvidia" / f"{name}.yaml")


def altered(name: str, **changes: Any) -> Case:
    """Return a case of the corpus with two devices, of which the second answers otherwise, before and under load."""
    data = copy.deepcopy(dict(loaded(name).data))
    data["nvml"]["count"] = data["wanted"]["devices"] = 2
    data["wanted"].pop("expect", None)
    for nvml in (data["nvml"], data["during"]["nvml"], data["after"]["nvml"]):
        nvml["devices"] = {1: changes}
    return Case(name, "nvidia", data)


@pytest.mark.parametrize("error", ["unknown", "not_supported"])
@pytest.mark.parametrize("function", CALLS)
def test_an_error_is_unknown_where_the_model_must_have_the_value(function: str, error: str) -> None:
    found = rows(outcomes(altered("h100-healthy", **{function: {"error": error.upper()}})))
    rule = CALLS[function].get(error)
    assert {row[1:] for row in found} == ({("UNKNOWN", rule, "GPU 1")} if rule else set())


@pytest.mark.parametrize("model", ["v100", "a100-40", "a100-80", "h100", "h200", "gh200"])
@pytest.mark.parametrize("error", ["GPU_IS_LOST", "RESET_REQUIRED"])
def test_a_device_that_answers_nothing_any_more_is_lost(model: str, error: str) -> None:
    said = rows(outcomes(altered(f"{model}-healthy", **{name: {"error": error} for name in CALLS})))
    assert ("nvidia_memory", "CRITICAL", "nvidia.lost", "GPU 1") in said
    assert all(row[3] == "GPU 1" for row in said), said


@pytest.mark.parametrize("error", sorted(fake_nvml.ERRORS))
def test_no_error_of_any_call_is_a_defect_of_ours(error: str) -> None:
    said = rows(outcomes(altered("a100-80-healthy", **{name: {"error": error} for name in CALLS})))
    assert all(row[1] == "UNKNOWN" or row[2] == "nvidia.lost" for row in said), said
    assert said, "a device that says nothing at all is not healthy"


def test_text_that_is_no_text_is_unknown() -> None:
    broken = Mock(nvmlDeviceGetName=lambda handle: b"\xff\xfe".decode("utf-8"))
    answer = NvmlLibrary(broken).ask("nvmlDeviceGetName", None)
    assert (answer.ok, answer.absent) == (False, False)
    assert "utf-8" in answer.text


@pytest.mark.parametrize(
    ("links", "names"),
    [
        (0, ["Tesla V100-PCIE-32GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL"]),
        (6, ["Tesla V100-SXM2-16GB"]),
        (12, ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM-64GB"]),
        (18, ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"]),
    ],
)  # fmt: skip
def test_a_models_links_are_known_by_its_name(names: list[str], links: int) -> None:
    models = [NvidiaDevice(0, None, name, "", "").model for name in names]
    assert set(models) <= set(MODELS)
    assert {model.links for model in models} == {links}


def test_a_model_that_we_do_not_know_has_no_demands() -> None:
    assert NvidiaDevice(0, None, "NVIDIA GeForce GTX 1080", "", "").model is None


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        ({}, True),
        *(({"CUDA_VISIBLE_DEVICES": shown}, True) for shown in ("0,1", "GPU-4a1f", "MIG-4a1f", " 1 , 0")),
        *(({"CUDA_VISIBLE_DEVICES": shown}, False) for shown in ("", "0", "GPU-ffff", "nonsense")),
    ],
)
def test_a_device_is_ours_if_cuda_may_see_it(environ: dict[str, str], ours: bool) -> None:
    assert is_ours(Machine(environ=environ), NvidiaDevice(1, None, "NVIDIA H200", "GPU-4a1f0c52", "")) is ours


@pytest.mark.parametrize(
    ("slow", "of", "severity"),
    [
        (0, 10, ""),
        (2, 10, ""),
        (3, 10, "WARNING"),
        (5, 10, "WARNING"),
        (6, 10, "CRITICAL"),
        (10, 10, "CRITICAL"),
        (2, 2, ""),
    ],
)
def test_a_slowdown_is_sustained_by_its_share_of_several_samples(slow: int, of: int, severity: str) -> None:
    device = NvidiaDevice(0, None, "NVIDIA H100 80GB HBM3", "", "")
    bits = [0x8] * slow + [0x4] * (of - slow)
    answers = [{"reasons": Answer(bit), "temperature": Answer(60)} for bit in bits]
    seen = nvidia_load.WatchedDevices(
        frozenset({0}), tuple(nvidia_load.GpuSample(device, one) for one in answers)
    )
    said = named("nvidia_throttle").end(
        Machine(), Context(built_in(), ExpectedNode(accelerator="cuda")), seen
    )
    expected = [("nvidia_throttle", severity, "nvidia.hw_slowdown", "GPU 0")] if severity else []
    assert rows([said]) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"DCGM Diagnostic": []}', '{"DCGM Diagnostic": {"test_categories": [7]}}',
                                  '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"results": "x"}]}]}}'])  # fmt: skip
def test_what_dcgm_never_printed_gives_no_results(text: str) -> None:
    assert list(nvidia_processes.read(text)) == []


def test_a_dcgm_that_hangs_shows_nothing() -> None:
    hangs = Mock(side_effect=nvidia_processes.Unreadable("dcgmi did not end within 60 s"))
    with machine_of(altered("h100-healthy")) as machine, patch.object(machine, "command", hangs):
        context = Context(built_in(), ExpectedNode(accelerator="cuda"))
        (found,) = named("nvidia_dcgm").examine(machine, context).findings
    assert (found.severity, found.rule) == (Severity.WARNING, "nvidia.dcgm_no_proof")
    assert "did not end within 60 s" in found.reason


def test_a_process_that_the_user_can_end_is_a_problem_of_the_user() -> None:
    every = findings(outcomes(loaded("h100-own-forgotten-process")))
    [found] = [one for one in every if one.rule == "nvidia.own_process"]
    assert found.origin is Origin.USER
    assert "train (4711)" in found.reason


def critical(name: str) -> list[Finding]:
    return [one for one in findings(outcomes(loaded(name))) if one.severity is Severity.CRITICAL]


def test_a_finding_says_where_the_device_is() -> None:
    [found] = critical("a100-remap-failed")
    place = "GPU 5 (00000000:05:00.0, GPU-4a1f0c52-0000-4000-8000-000000000005)"
    assert found.reason.startswith(f"a row of {place} could not be remapped")
    assert found.reason.endswith("have the board replaced")


def test_a_lost_device_is_named_once_by_one_check() -> None:
    exam = Examination("nvidia_memory", Machine(), Context(built_in()))
    device = NvidiaDevice(3, None, "NVIDIA H200", "", "")
    for _ in range(3):
        unread(exam, "nvidia.uncorrectable", device, "anything", Answer(code=15, text="lost"))
    assert [(one.rule, one.device) for one in exam.findings] == [("nvidia.lost", "GPU 3")]


@pytest.mark.parametrize(
    ("name", "metric", "words"),
    [
        ("h100-old-pcie-under-load", "pcie_generation", "had generation 3 of 5"),
        ("a100-half-the-lanes", "pcie_width", "had lanes 8 of 16"),
    ],
)
def test_a_slow_pcie_link_is_reported_with_what_it_could_be(name: str, metric: str, words: str) -> None:
    [found] = critical(name)
    assert (found.metric, words in found.reason) == (metric, True)


@pytest.mark.parametrize(
    ("state", "rules"), [(0, {"nvidia.nvlinks_down"}), (1, set()), (2, set()), (3, {"nvidia.nvlinks_down"})]
)
def test_a_link_that_sleeps_is_up_and_one_without_traffic_is_down(state: int, rules: set[str]) -> None:
    said = rows(outcomes(altered("h200-healthy", nvmlDeviceGetNvLinkState={17: state})))
    assert {row[2] for row in said} == rules


@pytest.mark.parametrize(
    ("model", "verdict"), [("h200", {"nvidia.nvlinks_down"}), ("gh200", set()), ("v100", set())]
)
def test_links_that_are_not_shown_are_missing_where_boards_have_all(model: str, verdict: set[str]) -> None:
    beyond = {link: {"error": "INVALID_ARGUMENT"} for link in range(4, 18)}
    said = outcomes(
        altered(f"{model}-healthy", nvmlDeviceGetNvLinkState={**dict.fromkeys(range(4), 1), **beyond})
    )
    assert {row[2] for row in rows(said)} == verdict
    links = {fact.device: fact.value for one in said for fact in one.facts if fact.name == "nvidia nvlinks"}
    assert links["GPU 1"] == "4", "nodes compare them, whatever this one says"
