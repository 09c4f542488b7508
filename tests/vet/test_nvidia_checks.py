"""What NVIDIA checks make of calls that fail in every way, and of what the corpus does not hold."""

from __future__ import annotations

import copy
import functools
from typing import Any

import fake_nvml
import pytest
from corpus import CORPUS, Case, findings, load, machine_of, outcomes, rows

from pytest_mlhpc.vet.check import Context, Wanted
from pytest_mlhpc.vet.checks import nvidia_dcgm, nvidia_load, nvidia_throttle
from pytest_mlhpc.vet.checks.nvidia_library import MODELS, Answer, Device, Library, Notes
from pytest_mlhpc.vet.checks.nvidia_processes import is_ours
from pytest_mlhpc.vet.finding import Origin, Severity
from pytest_mlhpc.vet.machine import Machine
from pytest_mlhpc.vet.policy import built_in

#: What an error that says nothing makes of each call on an H100: the rule that becomes UNKNOWN, or nothing.
WITHOUT = {
    "nvmlDeviceGetName": {"nvidia.model"},
    "nvmlDeviceGetUUID": set(),
    "nvmlDeviceGetVbiosVersion": set(),
    "nvmlDeviceGetPciInfo": set(),
    "nvmlDeviceGetMemoryInfo": set(),
    "nvmlDeviceGetEccMode": {"nvidia.ecc_off"},
    "nvmlDeviceGetMigMode": {"nvidia.mig"},
    "nvmlDeviceGetPersistenceMode": set(),
    "nvmlDeviceGetEnforcedPowerLimit": set(),
    "nvmlDeviceGetTemperature": set(),
    "nvmlDeviceGetUtilizationRates": set(),
    "nvmlDeviceGetCurrentClocksEventReasons": {"nvidia.hw_slowdown"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"nvidia.pcie_generation"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"nvidia.pcie_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"nvidia.pcie_width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"nvidia.pcie_width"},
    "nvmlDeviceGetNvLinkState": {"nvidia.nvlinks_down"},
    "nvmlDeviceGetRemappedRows": {"nvidia.remap_failure"},
    "nvmlDeviceGetTotalEccErrors": {"nvidia.uncorrectable"},
    "nvmlDeviceGetMemoryErrorCounter": set(),
    "nvmlDeviceGetFieldValues": {"nvidia.recovery_action"},
    "nvmlDeviceGetComputeRunningProcesses": {"nvidia.foreign_process"},
    "nvmlDeviceGetGpuFabricInfoV": {"nvidia.fabric"},
    "nvmlDeviceGetSramEccErrorStatus": set(),
}

#: What is essential on an H100 although "not supported" is an answer.
ESSENTIAL = {
    "nvmlDeviceGetEccMode": {"nvidia.ecc_off"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"nvidia.hw_slowdown"},
    "nvmlDeviceGetRemappedRows": {"nvidia.remap_failure"},
    "nvmlDeviceGetTotalEccErrors": {"nvidia.uncorrectable"},
    "nvmlDeviceGetNvLinkState": {"nvidia.nvlinks_down"},
}


@functools.cache
def loaded(name: str) -> Case:
    case = load(CORPUS / "nvidia" / f"{name}.yaml")
    assert case is not None
    return case


def altered(name: str, **changes: Any) -> Case:
    """Return a case of the corpus with two devices, of which the second answers otherwise, before and under load."""
    case = loaded(name)
    data = copy.deepcopy(dict(case.data))
    data["nvml"]["count"], data["wanted"]["devices"] = 2, 2
    data["wanted"].pop("expect", None)
    data["nvml"]["devices"] = {1: changes}
    for moment in ("during", "after"):
        data[moment]["nvml"]["devices"] = {1: changes}
    return Case(case.name, case.group, data)


@pytest.mark.parametrize("function", WITHOUT)
def test_an_error_that_says_nothing_is_unknown_where_the_call_matters(function: str) -> None:
    said = rows(outcomes(altered("h100-healthy", **{function: {"error": "UNKNOWN"}})))
    assert {row[2] for row in said} == WITHOUT[function]
    assert {(row[1], row[3]) for row in said} <= {("UNKNOWN", "GPU 1")}


@pytest.mark.parametrize("function", WITHOUT)
def test_what_is_not_supported_is_unknown_only_where_the_model_must_have_it(function: str) -> None:
    said = rows(outcomes(altered("h100-healthy", **{function: {"error": "NOT_SUPPORTED"}})))
    expected = ESSENTIAL.get(function, {"nvidia.model"} if function == "nvmlDeviceGetName" else set())
    assert {row[2] for row in said} == expected, said
    assert {(row[1], row[3]) for row in said} <= {("UNKNOWN", "GPU 1")}


@pytest.mark.parametrize("model", ["v100", "a100-40", "a100-80", "h100", "h200", "gh200"])
@pytest.mark.parametrize("error", ["GPU_IS_LOST", "RESET_REQUIRED"])
def test_a_device_that_answers_nothing_any_more_is_lost(model: str, error: str) -> None:
    said = rows(outcomes(altered(f"{model}-healthy", **{name: {"error": error} for name in WITHOUT})))
    assert ("nvidia_memory", "CRITICAL", "nvidia.lost", "GPU 1") in said
    assert all(row[3] == "GPU 1" for row in said), said


@pytest.mark.parametrize("error", sorted(fake_nvml.ERRORS))
def test_no_error_of_any_call_is_a_defect_of_ours(error: str) -> None:
    said = rows(outcomes(altered("a100-80-healthy", **{name: {"error": error} for name in WITHOUT})))
    assert all(row[1] == "UNKNOWN" or row[2] == "nvidia.lost" for row in said), said
    assert said, "a device that says nothing at all is not healthy"


def test_text_that_is_no_text_is_unknown() -> None:
    class Broken:
        def nvmlDeviceGetName(self, handle: object) -> str:  # noqa: N802 - the real name
            return b"\xff\xfe".decode("utf-8")

    answer = Library(Broken()).ask("nvmlDeviceGetName", None)
    assert not answer.ok
    assert not answer.absent
    assert "utf-8" in answer.words


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("Tesla V100-SXM2-16GB", 6),
        ("Tesla V100-PCIE-32GB", 0),
        ("NVIDIA A100-SXM4-40GB", 12),
        ("NVIDIA A100-SXM-64GB", 12),
        ("NVIDIA A100 80GB PCIe", 0),
        ("NVIDIA H100 80GB HBM3", 18),
        ("NVIDIA H100 PCIe", 0),
        ("NVIDIA H100 NVL", 0),
        ("NVIDIA H200", 18),
        ("NVIDIA H200 NVL", 0),
        ("NVIDIA GH200 480GB", 18),
    ],
)
def test_a_models_links_are_known_by_its_name(name: str, links: int) -> None:
    model = Device(0, None, name, "", "").model
    assert model in MODELS
    assert model.links == links


def test_a_model_that_we_do_not_know_has_no_demands() -> None:
    assert Device(0, None, "NVIDIA GeForce GTX 1080", "", "").model is None


@pytest.mark.parametrize(
    ("visible", "ours"),
    [
        (None, True),
        ("", False),
        ("0,1", True),
        ("0", False),
        ("GPU-4a1f", True),
        ("GPU-ffff", False),
        ("MIG-4a1f", True),
        (" 1 , 0", True),
        ("nonsense", False),
    ],
)
def test_a_device_is_ours_if_cuda_may_see_it(visible: str | None, ours: bool) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert is_ours(Machine(environ=environ), Device(1, None, "NVIDIA H200", "GPU-4a1f0c52", "")) is ours


def judged(bits: list[int]) -> list[tuple[str, str]]:
    """Return what is said of one device with these bits in its samples under load."""
    device = Device(0, None, "NVIDIA H100 80GB HBM3", "", "")
    samples = tuple(
        nvidia_load.Sample(device, {"reasons": Answer(bit), "temperature": Answer(60)}) for bit in bits
    )
    context = Context(built_in(), Wanted(accelerator="cuda"))
    said = nvidia_throttle.Throttle().end(Machine(), context, nvidia_load.Seen(frozenset({0}), samples))
    return [
        (one.severity.value, one.rule)
        for one in said.findings
        if one.severity not in (Severity.INFO, Severity.PASS)
    ]


@pytest.mark.parametrize(
    ("slow", "said"),
    [(0, []), (2, []), (3, [("WARNING", "nvidia.hw_slowdown")]), (5, [("WARNING", "nvidia.hw_slowdown")]),
     (6, [("CRITICAL", "nvidia.hw_slowdown")]), (10, [("CRITICAL", "nvidia.hw_slowdown")])],
)  # fmt: skip
def test_a_slowdown_is_sustained_by_its_share_of_samples(slow: int, said: list[tuple[str, str]]) -> None:
    assert judged([0x8] * slow + [0x4] * (10 - slow)) == said


def test_two_samples_tell_nothing() -> None:
    assert judged([0x8, 0x8]) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"DCGM Diagnostic": []}', '{"DCGM Diagnostic": {"test_categories": [7]}}',
                                  '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"results": "x"}]}]}}'])  # fmt: skip
def test_what_dcgm_never_printed_gives_no_results(text: str) -> None:
    assert list(nvidia_dcgm.read(text)) == []


def test_a_dcgm_that_hangs_shows_nothing() -> None:
    case = altered("h100-healthy")
    with machine_of(case) as machine:
        machine.commands = None

        def hang(argv: object, timeout_s: float = 0.0) -> None:
            raise nvidia_dcgm.Unreadable("dcgmi did not end within 60 s")

        machine.command = hang  # type: ignore[method-assign] - a program that hangs for a minute is too slow for a test
        said = nvidia_dcgm.Dcgm().examine(machine, Context(built_in(), Wanted(accelerator="cuda")))
    assert [(one.severity.value, one.rule) for one in said.findings] == [("WARNING", "nvidia.dcgm_no_proof")]
    assert "did not end within 60 s" in said.findings[0].reason


def test_a_process_that_the_user_can_end_is_a_problem_of_the_user() -> None:
    found = [
        one
        for one in findings(outcomes(loaded("h100-own-forgotten-process")))
        if one.rule == "nvidia.own_process"
    ]
    assert [one.origin for one in found] == [Origin.USER]
    assert "train (4711)" in found[0].reason


def test_a_finding_says_where_the_device_is() -> None:
    [found] = [
        one for one in findings(outcomes(loaded("a100-remap-failed"))) if one.severity is Severity.CRITICAL
    ]
    assert found.reason.startswith(
        "a row of GPU 5 (00000000:05:00.0, GPU-4a1f0c52-0000-4000-8000-000000000005) could not be remapped"
    )
    assert found.reason.endswith("have the board replaced")


def test_a_lost_device_is_named_once_by_one_check() -> None:
    notes = Notes("nvidia_memory", Context(built_in()))
    device = Device(3, None, "NVIDIA H200", "", "")
    for _ in range(3):
        notes.unread("uncorrectable", device, "anything", Answer(code=15, words="lost"))
    assert [(one.rule, one.device) for one in notes.findings] == [("nvidia.lost", "GPU 3")]


@pytest.mark.parametrize("name", ["h100-old-pcie-under-load", "a100-half-the-lanes"])
def test_a_slow_pcie_link_is_told_with_what_it_could_be(name: str) -> None:
    [found] = [one for one in findings(outcomes(loaded(name))) if one.severity is Severity.CRITICAL]
    assert ("had generation 3 of 5" in found.reason) or ("had lanes 8 of 16" in found.reason)
    assert found.metric in {"pcie_generation", "pcie_width"}


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
