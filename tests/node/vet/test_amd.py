"""AMD: whatever amdsmi and sysfs say, a check answers with a finding or with UNKNOWN, and leaves the library closed."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from corpus import CORPUS, Case, findings, load, merged, outcomes, rows
from fake_amdsmi import OF_A_DEVICE, FakeAmdsmi

from pytest_mlhpc.node.vet.checks import amd_devices
from pytest_mlhpc.node.vet.checks.amd_devices import (
    MODELS,
    AmdLibrary,
    NotReported,
    number,
    open_session,
    text,
)
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable

ODD: list[Any] = [None, "N/A", 2**64 - 1, -1, True, {}, [None], {"status": 7}, object()]

#: What turns the C library's answers into those of Python.
MAKERS = ("_asic_info", "_vram_info", "_bad_page_info", "_ras_blocks", "_metrics", "_xgmi_link_status")
DEVICE = "0000:c3:00.0"


def case(name: str, **over: Any) -> Case:
    """Return a case of the corpus with something laid over it."""
    found = load(CORPUS / "amd" / f"{name}.yaml")
    return Case(found.name, found.group, merged(copy.deepcopy(found.data), over))


def node_with(specification: dict[str, Any] | None) -> Machine:
    """Return a machine with this amdsmi, and nothing else."""
    modules = {} if specification is None else {"amdsmi": FakeAmdsmi({"release": "7.0.2", **specification})}
    return Machine(root=Path("/nonexistent"), modules=modules)


def unmade(monkeypatch: pytest.MonkeyPatch, *makers: str) -> None:
    """Let the library answer what the specification says, as it stands there."""
    for maker in makers:
        monkeypatch.setattr(FakeAmdsmi, maker, lambda self, raw: raw)


@pytest.mark.parametrize("name", ["mi300x-good", "mi250x-good", "mi300x-counts-fail"])
def test_the_library_is_closed_after_each_reading(name: str) -> None:
    with patch.object(FakeAmdsmi, "__init__", autospec=True, side_effect=FakeAmdsmi.__init__) as begun:
        outcomes(case(name))
    modules = [call.args[0] for call in begun.call_args_list]
    assert modules
    assert all(module._open == 0 for module in modules)


@pytest.mark.parametrize("key", sorted(OF_A_DEVICE.values()))
def test_no_answer_of_the_library_breaks_a_check(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unmade(monkeypatch, "_validated", *MAKERS)
    for odd in ODD:
        odd_case = case("mi210-good", amdsmi={"devices": {1: {key: odd}}})
        assert all(finding.reason for finding in findings(outcomes(odd_case)))


SYSFS = [path for path in case("mi210-sysfs-good").data["files"] if "card2" in path]
CONTENTS: list[Any] = [
    "", "nonsense", "9" * 400, "ue: " + "9" * 400 + "\nce: 0", "a : b : R", "1.2.3 GT/s", "9" * 400 + " GT/s", {"error": "EIO"},
    {"folder": True},
]  # fmt: skip


@pytest.mark.parametrize("path", SYSFS)
def test_no_file_of_sysfs_breaks_a_check(path: str) -> None:
    for content in CONTENTS:
        odd_case = case("mi210-sysfs-good", files={path: content})
        assert all(finding.reason for finding in findings(outcomes(odd_case)))


@pytest.mark.parametrize(
    ("key", "rule"),
    [("total_ecc_count", "amd.ecc_uncorrectable"), ("bad_page_info", "amd.bad_pages_unreservable"),
     ("xgmi_link_status", "amd.xgmi_down"), ("metrics", "amd.throttle_thermal")],
)  # fmt: skip
@pytest.mark.parametrize("nonsense", [None, 7, [{}]])
def test_an_answer_without_sense_is_unknown(
    key: str, rule: str, nonsense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmade(monkeypatch, "_bad_page_info", "_metrics", "_xgmi_link_status")
    found = rows(outcomes(case("mi210-good", amdsmi={"devices": {1: {key: nonsense}}})))
    assert [row[1:] for row in found] == [("UNKNOWN", rule, DEVICE)]


@pytest.mark.parametrize("file", ["umc_err_count", "gfx_err_count", "gpu_vram_bad_pages"])
@pytest.mark.parametrize("content", ["nonsense", "ue: many\nce: 0", "0x1 : 0x1000 : Q", {"error": "EIO"}])
def test_what_the_kernel_never_writes_is_unknown(file: str, content: Any) -> None:
    path = f"/sys/class/drm/card2/device/ras/{file}"
    found = rows(outcomes(case("mi210-sysfs-good", files={path: content})))
    assert [(row[1], row[3]) for row in found] == [("UNKNOWN", DEVICE)]


def test_a_reason_says_what_was_found_where_and_what_to_do() -> None:
    every = findings(outcomes(case("mi300x-uncorrectable")))
    (finding,) = [one for one in every if one.severity is Severity.CRITICAL]
    assert finding.value == 1
    assert all(words in finding.reason for words in (finding.device, "1 uncorrectable", "reset it"))


@pytest.mark.parametrize("described", [1, 8])
def test_partitions_of_a_device_are_counted_as_the_description_counts_them(described: int) -> None:
    device = case("mi300x-good").data["amdsmi"]["devices"][0]
    split = [{**device, "bdf": f"0000:05:00.{place}", "compute_partition": "CPX"} for place in range(8)]
    assert rows(outcomes(case("mi300x-good", amdsmi={"devices": split}, wanted={"devices": described}))) == []


def test_a_partition_finds_the_error_counts_of_its_package() -> None:
    device = case("mi210-good").data["amdsmi"]["devices"][0]
    part = {**device, "bdf": "0000:83:00.1", "total_ecc_count": {"error": 2}}
    with_parts = case("mi210-sysfs-uncorrectable", amdsmi={"devices": [device, part]})
    assert ("amd_memory", "CRITICAL", "amd.ecc_uncorrectable", "0000:83:00.1") in rows(outcomes(with_parts))


@pytest.mark.parametrize(
    ("value", "bits", "expected"),
    [(5, 64, 5), (0, 64, 0), (0xFFFF, 16, None), (0xFFFF, 64, 0xFFFF), (2**64 - 1, 32, None), ("N/A", 64, None),
     (True, 64, None), (-3, 64, None), (7.0, 64, 7), (None, 64, None), (float("nan"), 64, None), (float("inf"), 64, None)],
)  # fmt: skip
def test_numbers_that_stand_for_none_are_none(value: Any, bits: int, expected: int | None) -> None:
    assert number(value, bits) == expected


def test_texts_that_stand_for_none_are_empty() -> None:
    assert [text(value) for value in ("N/A", "n/a", None, " SPX ", "None")] == ["", "", "", "SPX", ""]


@pytest.mark.parametrize(
    ("release", "device", "function", "error", "words"),
    [
        ("6.2.4", {}, "violation_status", NotReported, "amdsmi 6.2.4 has no amdsmi_get_violation_status"),
        ("6.2.4", {}, "gpu_vram_info", NotReported, "NOT_SUPPORTED"),
        ("7.0.2", {"total_ecc_count": {"error": 7}}, "gpu_total_ecc_count", Unreadable, "API_FAILED"),
    ],
    ids=["no such function", "not supported", "it failed"],
)
def test_what_a_device_does_not_tell_says_why(release, device, function, error, words) -> None:
    library = AmdLibrary(node_with({"release": release, "devices": [{"bdf": "x", **device}]}))
    with pytest.raises(Unreadable, match=words) as raised:
        library.ask(function, library.handles()[0])
    library.close()
    assert type(raised.value) is error


def test_one_check_at_a_time_has_the_library() -> None:
    machine = node_with({"devices": []})

    def look(_number: int) -> int:
        library = AmdLibrary(machine)
        held = machine.modules["amdsmi"]._open
        library.close()
        return held

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(look, range(200))) == {1}
    assert machine.modules["amdsmi"]._open == 0


def test_a_library_that_hangs_in_one_check_is_unreadable_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd_devices, "TURN_S", 0.01)
    machine = node_with({})
    holder = AmdLibrary(machine)
    with pytest.raises(Unreadable, match="hangs in another check"):
        AmdLibrary(machine)
    holder.close()
    monkeypatch.undo()
    AmdLibrary(machine).close()


def test_a_node_without_the_library_says_so() -> None:
    with pytest.raises(Absent, match="amdsmi is not installed"):
        AmdLibrary(node_with(None))
    assert open_session(node_with(None), "rocm").without == "the Python module amdsmi is not installed"


@pytest.mark.parametrize(
    ("reported", "model"),
    [
        ({"market_name": "AMD Instinct MI999X", "device_id": 0x7999}, "AMD Instinct MI999X"),
        ({"market_name": "0x7999", "device_id": 0x7999}, ""),
        ({"market_name": "0x74a1", "device_id": 0x74A1}, "AMD Instinct MI300X"),
    ],
    ids=["one that the library knows", "one that nobody knows", "one that we know"],
)
def test_a_model_is_called_as_the_library_does_unless_it_has_only_a_number(reported, model) -> None:
    machine = node_with({"devices": [{"bdf": DEVICE, "asic_info": reported}]})
    with closing(open_session(machine, "rocm")) as session:
        assert [device.model for device in session.devices] == [model]


def test_every_model_is_an_instinct() -> None:
    assert all(name.startswith("AMD Instinct MI") for name in MODELS.values())
