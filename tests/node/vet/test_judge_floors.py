"""Floors: which devices they know, what they decide, and when they only warn."""

import pytest
from judge_worlds import A100, KEY, POLICY, found, measured, severities, verdict_on

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.figures import keys_to_repeat
from pytest_mlhpc.node.vet.finding import Exit
from pytest_mlhpc.node.vet.policy import FLOOR_NAMES, find_floor, floors

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("name", "model", "hardware"),
    [
        ("memory/device", "Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("memory/device", "NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("memory/device", "NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("memory/device", H100, "H100 SXM"),
        ("memory/device", "NVIDIA H200", "H200 SXM"),
        ("memory/device", "NVIDIA GH200 120GB", "GH200"),
        ("memory/device", "NVIDIA GH200 480GB", "GH200"),
        ("gemm/fp16", "AMD Instinct MI210", "MI210"),
        ("gemm/fp16", "AMD Instinct MI250X", "MI250X"),
        ("gemm/fp16", "AMD Instinct MI300X", "MI300X"),
    ],
)
def test_drivers_names_are_known(name, model, hardware):
    assert find_floor(name, model).hardware.split(",")[0] == hardware


@pytest.mark.parametrize(
    "model",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "AMD EPYC 9654",
     "AMD Instinct MI300A", ""],
)  # fmt: skip
def test_cards_of_another_form_have_no_floor(model):
    assert not [name for name in FLOOR_NAMES if find_floor(name, model)]


def test_no_device_has_two_floors_of_one_quantity():
    assert len({(floor.name, floor.hardware) for floor in floors()}) == len(floors())


def test_each_floor_has_a_known_name_a_source_and_a_confidence():
    for floor in floors():
        assert floor.name in FLOOR_NAMES
        assert floor.source[0] in "CAZERDVg"
        assert floor.confidence in {"high", "medium", "low"}
        units = {"gemm": "FLOP/s", "storage": "1/s" if floor.name[8:] in {"create", "stat"} else "B/s"}
        assert floor.unit == units.get(floor.name.partition("/")[0], "B/s")
        assert floor.warn is None or floor.warn > floor.fail > 0


def test_a_floor_decides_for_one_node():
    verdict = verdict_on(measured([240.0], model=A100))
    finding = found(verdict, "n0")
    judged = verdict.exit, finding.rule, finding.floor
    assert judged == (Exit.READY, "floor", pytest.approx(200e12, rel=1e-3))
    assert "E: 271 TFLOP/s" in finding.reason


def test_below_a_floor_a_node_repeats_and_is_unfit():
    report = measured([150.0, 240.0], model=A100)
    assert keys_to_repeat(report, VetSettings(), POLICY) == (KEY,)
    verdict = verdict_on(report)
    assert (verdict.exit, verdict.exclude) == (Exit.TOO_FEW, ("n0",))
    assert "150 TFLOP/s, below 200 TFLOP/s (floor of A100 SXM, medium confidence" in verdict.nodes[0].reason


MEMORY = {"model": H100, "floor": "memory/device", "unit": "B/s"}


@pytest.mark.parametrize(
    ("value", "how", "median", "severity"),
    [
        pytest.param(600.0, {"model": H100}, None, "WARNING", id="between warn and fail"),
        pytest.param(1.5, MEMORY, None, "UNKNOWN", id="below a floor of low confidence"),
        pytest.param(2.0, MEMORY, None, "PASS", id="above a floor of low confidence"),
        pytest.param(240.0, {}, 280e12, "CRITICAL", id="history is stricter"),
        pytest.param(150.0, {}, 150e12, "CRITICAL", id="history is never milder"),
        pytest.param(240.0, {"unit": "B/s"}, None, "UNKNOWN", id="the floor has another unit"),
        pytest.param(240.0, {"floor": ""}, None, "UNKNOWN", id="no floor is named"),
    ],
)
def test_a_figure_of_one_node_is_judged_by_its_floor_and_by_history(value, how, median, severity):
    history = VetSettings(learned=(Learned(KEY, A100, median, 2e12, 30),) if median else ())
    assert severities(verdict_on(measured([value], **{"model": A100, **how}), history)) == {"n0": severity}


def test_a_floor_of_low_confidence_says_that_it_is():
    assert (
        "too little is known of it to condemn a node"
        in found(verdict_on(measured([1.5], **MEMORY)), "n0").reason
    )


def test_a_floor_that_all_peers_miss_only_warns():
    report = measured([150.0] * 8, model=A100)
    assert keys_to_repeat(report, VetSettings(), POLICY) == ()
    verdict = verdict_on(report)
    assert (verdict.exit, set(severities(verdict).values())) == (Exit.READY, {"WARNING"})
    assert "as its peers may be; look at all nodes" in found(verdict, "n3").reason


def test_a_floor_decides_where_more_than_a_third_is_low_and_low_ones_are_warned_of():
    verdict = verdict_on(measured([150.0, 210.0, 210.0, 260.0, 261.0, 259.0], model=A100))
    assert list(severities(verdict).values()) == ["CRITICAL", "WARNING", "WARNING", "PASS", "PASS", "PASS"]
    assert "3 of 6 nodes are far below the others" in found(verdict, "n1").reason
