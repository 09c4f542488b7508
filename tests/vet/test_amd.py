"""AMD: whatever amdsmi and sysfs say, a check answers with a finding or with UNKNOWN, and leaves the library closed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import CORPUS, Case, findings, load, merged, outcomes, rows
from fake_amdsmi import OF_A_DEVICE, FakeAmdsmi

from pytest_mlhpc.vet.checks import amd_library
from pytest_mlhpc.vet.checks.amd_devices import MODELS, sight
from pytest_mlhpc.vet.checks.amd_library import Library, Untold, number, text
from pytest_mlhpc.vet.finding import Severity
from pytest_mlhpc.vet.machine import Absent, Machine, Unreadable

ODD: list[Any] = [None, "N/A", 2**64 - 1, -1, True, {}, [None], {"status": 7}, object()]


def case(name: str) -> Case:
    found = load(CORPUS / "amd" / f"{name}.yaml")
    assert found is not None
    return found


def changed(before: Case, **over: Any) -> Case:
    return Case(before.name, before.group, merged(copy.deepcopy(before.data), over))


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeAmdsmi]]:
    made: list[FakeAmdsmi] = []
    begin = FakeAmdsmi.__init__

    def remember(self: FakeAmdsmi, specification: Any) -> None:
        begin(self, specification)
        made.append(self)

    monkeypatch.setattr(FakeAmdsmi, "__init__", remember)
    yield made
    assert made
    assert all(module._open == 0 for module in made)


@pytest.mark.parametrize("name", ["mi300x-good", "mi250x-good", "mi300x-counts-fail"])
def test_the_library_is_closed_after_each_look(name: str, closed: list[FakeAmdsmi]) -> None:
    outcomes(case(name))


@pytest.mark.parametrize("key", sorted(OF_A_DEVICE.values()))
def test_no_answer_of_the_library_breaks_a_check(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAmdsmi, "_validated", lambda self, raw: raw)
    for maker in (
        "_asic_info",
        "_vram_info",
        "_bad_page_info",
        "_ras_blocks",
        "_metrics",
        "_xgmi_link_status",
    ):
        monkeypatch.setattr(FakeAmdsmi, maker, lambda self, raw: raw)
    before = case("mi210-good")
    for odd in ODD:
        odd_case = changed(before, amdsmi={"devices": {1: {key: odd}}})
        for finding in findings(outcomes(odd_case)):
            assert finding.reason


SYSFS = [path for path in case("mi210-sysfs-good").data["files"] if "card2" in path]


CONTENTS: list[Any] = [
    "", "nonsense", "9" * 400, "ue: " + "9" * 400 + "\nce: 0", "a : b : R", "1.2.3 GT/s", "9" * 400 + " GT/s", {"error": "EIO"},
    {"folder": True},
]  # fmt: skip


@pytest.mark.parametrize("path", SYSFS)
def test_no_file_of_sysfs_breaks_a_check(path: str) -> None:
    for content in CONTENTS:
        for finding in findings(outcomes(changed(case("mi210-sysfs-good"), files={path: content}))):
            assert finding.reason


@pytest.mark.parametrize(
    ("key", "rule"),
    [("total_ecc_count", "amd.ecc_uncorrectable"), ("bad_page_info", "amd.bad_pages_unreservable"),
     ("xgmi_link_status", "amd.xgmi_down"), ("metrics", "amd.throttle_thermal")],
)  # fmt: skip
@pytest.mark.parametrize("nonsense", [None, 7, [{}]])
def test_an_answer_without_sense_is_unknown(
    key: str, rule: str, nonsense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for maker in ("_bad_page_info", "_metrics", "_xgmi_link_status"):
        monkeypatch.setattr(FakeAmdsmi, maker, lambda self, raw: raw)
    told = rows(outcomes(changed(case("mi210-good"), amdsmi={"devices": {1: {key: nonsense}}})))
    assert [(row[1], row[2], row[3]) for row in told] == [("UNKNOWN", rule, "0000:c3:00.0")]


@pytest.mark.parametrize("file", ["umc_err_count", "gfx_err_count", "gpu_vram_bad_pages"])
@pytest.mark.parametrize("content", ["nonsense", "ue: many\nce: 0", "0x1 : 0x1000 : Q", {"error": "EIO"}])
def test_what_the_kernel_never_writes_is_unknown(file: str, content: Any) -> None:
    path = f"/sys/class/drm/card2/device/ras/{file}"
    told = rows(outcomes(changed(case("mi210-sysfs-good"), files={path: content})))
    assert [row[1] for row in told] == ["UNKNOWN"]
    assert told[0][3] == "0000:c3:00.0"


def test_a_reason_says_what_was_found_where_and_what_to_do() -> None:
    (finding,) = [
        one for one in findings(outcomes(case("mi300x-uncorrectable"))) if one.severity is Severity.CRITICAL
    ]
    assert finding.device in finding.reason
    assert "1 uncorrectable" in finding.reason
    assert "reset it" in finding.reason
    assert finding.value == 1


def test_partitions_of_a_device_are_counted_as_the_description_counts_them() -> None:
    before = case("mi300x-good")
    devices = before.data["amdsmi"]["devices"]
    split = [{**devices[0], "bdf": f"0000:05:00.{place}", "compute_partition": "CPX"} for place in range(8)]
    for described in (1, 8):
        node = changed(before, amdsmi={"devices": split}, wanted={"devices": described})
        assert rows(outcomes(node)) == []


def test_a_partition_finds_the_error_counts_of_its_package() -> None:
    node = case("mi210-sysfs-uncorrectable")
    devices = case("mi210-good").data["amdsmi"]["devices"]
    part = {**devices[0], "bdf": "0000:83:00.1", "total_ecc_count": {"error": 2}}
    with_parts = changed(node, amdsmi={"devices": [devices[0], part]})
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


def test_what_a_release_does_not_have_is_untold() -> None:
    machine = Machine(
        root=Path("/nonexistent"),
        modules={"amdsmi": FakeAmdsmi({"release": "6.2.4", "devices": [{"bdf": "x"}]})},
    )
    library = Library(machine)
    (handle,) = library.handles()
    with pytest.raises(Untold, match=r"amdsmi 6\.2\.4 has no amdsmi_get_violation_status"):
        library.ask("violation_status", handle)
    with pytest.raises(Untold, match="NOT_SUPPORTED"):
        library.ask("gpu_vram_info", handle)
    library.close()


def test_one_check_at_a_time_has_the_library() -> None:
    module = FakeAmdsmi({"release": "7.0.2", "devices": []})
    machine = Machine(root=Path("/nonexistent"), modules={"amdsmi": module})
    most: list[int] = []

    def look() -> None:
        for _ in range(50):
            library = Library(machine)
            most.append(module._open)
            library.close()

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 200
    assert module._open == 0


def test_a_library_that_hangs_in_one_check_is_unreadable_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd_library, "TURN_S", 0.01)
    machine = Machine(root=Path("/nonexistent"), modules={"amdsmi": FakeAmdsmi({"release": "7.0.2"})})
    holder = Library(machine)
    with pytest.raises(Unreadable, match="hangs in another check"):
        Library(machine)
    holder.close()
    Library(machine).close()


def test_a_node_without_the_library_says_so() -> None:
    machine = Machine(root=Path("/nonexistent"), modules={})
    with pytest.raises(Absent, match="amdsmi is not installed"):
        Library(machine)
    assert sight(machine, "rocm").without == "the Python module amdsmi is not installed"


def test_a_library_that_fails_says_what_failed() -> None:
    node = {"release": "7.0.2", "devices": [{"bdf": "x", "total_ecc_count": {"error": 7}}]}
    library = Library(Machine(root=Path("/nonexistent"), modules={"amdsmi": FakeAmdsmi(node)}))
    with pytest.raises(Unreadable, match="API_FAILED") as raised:
        library.ask("gpu_total_ecc_count", library.handles()[0])
    library.close()
    assert not isinstance(raised.value, Untold)


def test_every_model_is_an_instinct() -> None:
    assert all(name.startswith("AMD Instinct MI") for name in MODELS.values())
