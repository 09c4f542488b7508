"""Floors: which devices they know, what they decide, and when they only warn."""

from __future__ import annotations

import pytest
from judge_worlds import A100, POLICY, found, gemm, measured, severities, verdict_on

from pytest_mlhpc.vet import floors
from pytest_mlhpc.vet.judge import needs_repeat
from pytest_mlhpc.vet.settings import Learned, Settings
from pytest_mlhpc.vet.verdict import Exit

H100 = "NVIDIA H100 80GB HBM3"
GH200 = "NVIDIA GH200 120GB"


@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        (H100, "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        (GH200, "GH200"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_drivers_names_are_known(model, hardware):
    assert floors.find("memory/device", model).hardware == hardware


@pytest.mark.parametrize("model", ["AMD Instinct MI210", "AMD Instinct MI250X", "AMD Instinct MI300X"])
def test_amd_devices_are_known(model):
    assert floors.find("gemm/fp16", model).hardware.split(",")[0] == model.split()[-1]


@pytest.mark.parametrize(
    "model",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA A100-PCIE-40GB",
        "AMD EPYC 9654",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_cards_of_another_form_have_no_floor(model):
    assert not [name for name in floors.NAMES if floors.find(name, model)]


def test_no_device_has_two_floors_of_one_quantity():
    kinds = {(floor.name, floor.hardware) for floor in floors.FLOORS}
    assert len(kinds) == len(floors.FLOORS)


def test_each_floor_has_a_known_name_a_source_and_a_confidence():
    for floor in floors.FLOORS:
        assert floor.name in floors.NAMES
        assert floor.source[0] in "CAZERDVg"
        assert floor.confidence in {"high", "medium", "low"}
        units = {"gemm": "FLOP/s", "storage": "1/s" if floor.name[8:] in {"create", "stat"} else "B/s"}
        assert floor.unit == units.get(floor.name.partition("/")[0], "B/s")
        assert floor.warn is None or floor.warn > floor.fail > 0


def test_a_floor_decides_for_one_node():
    verdict = verdict_on(measured([240.0], model=A100))
    assert verdict.exit is Exit.READY
    finding = found(verdict, "n0")
    assert (finding.rule, finding.floor) == ("floor", pytest.approx(200e12, rel=1e-3))
    assert "E: 271 TFLOP/s" in finding.reason


def test_below_a_floor_a_node_repeats_and_is_unfit():
    report = measured([150.0, 240.0], model=A100)
    assert needs_repeat(report, POLICY) == ("gemm/bf16/8192/random",)
    verdict = verdict_on(report)
    assert (verdict.exit, verdict.exclude) == (Exit.TOO_FEW, ("n0",))
    assert "150 TFLOP/s, below 200 TFLOP/s (floor of A100 SXM, medium confidence" in verdict.nodes[0].reason


def test_between_warn_and_fail_a_floor_warns():
    assert severities(verdict_on(measured([600.0], model=H100))) == {"n0": "WARNING"}


def test_a_floor_of_low_confidence_condemns_nobody():
    low = verdict_on(measured([1.5], model=H100, floor="memory/device", unit="B/s"))
    assert severities(low) == {"n0": "UNKNOWN"}
    assert "too little known to condemn" in found(low, "n0").reason
    enough = verdict_on(measured([2.0], model=H100, floor="memory/device", unit="B/s"))
    assert severities(enough) == {"n0": "PASS"}


def test_a_floor_that_all_peers_miss_only_warns():
    report = measured([150.0] * 8, model=A100)
    assert needs_repeat(report, POLICY) == ()
    verdict = verdict_on(report)
    assert verdict.exit is Exit.READY
    assert set(severities(verdict).values()) == {"WARNING"}
    assert "as its peers may be; look at all nodes" in found(verdict, "n3").reason


def test_a_floor_decides_where_more_than_a_third_is_low_and_low_ones_are_warned_of():
    verdict = verdict_on(measured([150.0, 210.0, 210.0, 260.0, 261.0, 259.0], model=A100))
    assert severities(verdict) == {
        "n0": "CRITICAL",
        "n1": "WARNING",
        "n2": "WARNING",
        "n3": "PASS",
        "n4": "PASS",
        "n5": "PASS",
    }
    assert "3 of 6 nodes are far below the others" in found(verdict, "n1").reason


def test_history_is_stricter_than_a_floor_and_never_milder():
    strict = Settings(learned=(Learned("gemm/bf16/8192/random", A100, 280e12, 2e12, 30),))
    assert severities(verdict_on(measured([240.0], model=A100), strict)) == {"n0": "CRITICAL"}
    mild = Settings(learned=(Learned("gemm/bf16/8192/random", A100, 150e12, 2e12, 30),))
    assert severities(verdict_on(measured([150.0], model=A100), mild)) == {"n0": "CRITICAL"}


def test_a_floor_in_another_unit_decides_nothing():
    assert severities(verdict_on(measured([240.0], model=A100, unit="B/s"))) == {"n0": "UNKNOWN"}


def test_a_reading_without_a_floors_name_has_none():
    assert gemm(1.0, floor="").floor == ""
    assert severities(verdict_on(measured([240.0], model=A100, floor=""))) == {"n0": "UNKNOWN"}
