"""Figures judged by peers: bounds, the second round, those that are low, and what no figure is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from judge_worlds import KEY, POLICY, UNNAMED, found, gemm, measured, node, severities, verdict_on

from pytest_mlhpc.vet.finding import Finding, Reading, Severity
from pytest_mlhpc.vet.judge import needs_repeat
from pytest_mlhpc.vet.report import Report
from pytest_mlhpc.vet.settings import Learned, Settings
from pytest_mlhpc.vet.verdict import Exit, Fitness

EVEN = [99.0, 100.0, 100.0, 101.0, 100.0, 100.0, 99.5]


def test_equal_nodes_pass_and_repeat_nothing():
    report = measured(EVEN)
    assert needs_repeat(report, POLICY) == ()
    verdict = verdict_on(report)
    assert (verdict.exit, verdict.exclude) == (Exit.READY, ())
    assert set(severities(verdict).values()) == {"PASS"}


def test_a_slow_node_makes_all_repeat_and_is_named_with_its_figures():
    report = measured([*EVEN, 85.0])
    assert needs_repeat(report, POLICY) == (KEY,)
    verdict = verdict_on(measured([*EVEN, 85.0], [*EVEN, 85.0]))
    assert (verdict.exit, verdict.exclude) == (Exit.TOO_FEW, ("n7",))
    finding = found(verdict, "n7")
    assert (finding.severity, finding.rule, finding.value, finding.peer_median) == (
        Severity.CRITICAL,
        "peers",
        85e12,
        100e12,
    )
    assert (
        "85 TFLOP/s, mean of two rounds, 15.0% worse than the median of its peers, 100 TFLOP/s"
        in finding.reason
    )
    assert "leave the node out" in finding.reason


def test_the_mean_of_both_rounds_decides():
    once = measured([*EVEN, 92.0], [*EVEN, 99.0])  # mean 95.5: beyond 3 %, not beyond 5 %
    assert severities(verdict_on(once))["n7"] == "WARNING"
    never = measured([*EVEN, 96.0], [*EVEN, 100.0])
    assert severities(verdict_on(never))["n7"] == "PASS"


def test_what_was_repeated_is_not_asked_for_again():
    assert needs_repeat(measured([*EVEN, 85.0], [*EVEN, 85.0]), POLICY) == ()


def test_a_node_that_only_warns_is_fit():
    verdict = verdict_on(measured([*EVEN, 96.0]))
    assert verdict.exit is Exit.READY
    assert verdict.nodes[7].fitness is Fitness.FIT
    assert verdict.nodes[7].reason.startswith("[node_problem] gemm_bf16 is 96 TFLOP/s")


@pytest.mark.parametrize(
    ("value", "severity"), [(97.1, "PASS"), (96.9, "WARNING"), (95.1, "WARNING"), (94.9, "CRITICAL")]
)
def test_bounds_are_3_and_5_percent_among_equals(value, severity):
    assert severities(verdict_on(measured([100.0] * 7 + [value])))["n7"] == severity


@pytest.mark.parametrize(
    ("value", "severity"), [(93.1, "PASS"), (92.9, "WARNING"), (90.1, "WARNING"), (89.8, "CRITICAL")]
)
def test_bounds_are_3_and_a_half_and_5_mads_where_peers_differ(value, severity):
    spread = 2 / 1.4826  # MAD of the peers is 1.35, times 1.4826: 2 %
    peers = [100 - spread, 100 + spread] * 40 + [100.0] * 21
    assert severities(verdict_on(measured([*peers, value])))["n101"] == severity


def test_nobody_is_blamed_for_being_fast():
    assert set(severities(verdict_on(measured([*EVEN, 160.0]))).values()) == {"PASS"}


def test_where_lower_is_better_the_higher_one_is_slow():
    verdict = verdict_on(measured([*EVEN, 118.0], better="lower", unit="s"))
    assert severities(verdict)["n7"] == "CRITICAL"
    assert severities(verdict_on(measured([*EVEN, 82.0], better="lower", unit="s")))["n7"] == "PASS"


def test_a_third_of_slow_nodes_does_not_hide_behind_its_own_spread():
    good = [100 + offset / 2 for offset in range(-6, 7)] * 2
    verdict = verdict_on(measured([85.0] * 13 + good))
    assert verdict.exclude == tuple(f"n{i}" for i in range(13))


def test_with_more_than_a_third_low_nobody_can_tell():
    report = measured([80.0, 80.0, 100.0, 101.0, 99.0])
    assert needs_repeat(report, POLICY) == (KEY,)
    verdict = verdict_on(report)
    assert verdict.exit is Exit.UNKNOWN
    assert set(severities(verdict).values()) == {"UNKNOWN"}
    assert "2 of 5 nodes are far below the others" in found(verdict, "n4").reason


def test_peers_that_differ_wildly_decide_nothing():
    verdict = verdict_on(measured([100.0, 80.0, 60.0, 50.0, 75.0, 90.0]))
    assert set(severities(verdict).values()) == {"UNKNOWN"}
    assert "differ too much" in found(verdict, "n0").reason


def test_three_nodes_are_no_peers():
    verdict = verdict_on(measured([100.0, 100.0, 85.0]))
    assert verdict.exit is Exit.UNKNOWN
    assert "it takes 4 nodes to be peers, and 3 measured it" in verdict.text
    assert "there is no floor for a device without floor, and no history" in verdict.text


def test_a_lone_node_is_not_repeated_for_having_no_peers():
    assert needs_repeat(measured([100.0]), POLICY) == ()


def test_one_device_of_a_single_node_is_named_among_its_own():
    readings = [
        gemm(value, device=f"gpu{i}") for i, value in enumerate([100.0, 100.0, 85.0, 101.0, 99.0, 100.0])
    ]
    verdict = verdict_on(Report((node("n0", *readings),)))
    assert verdict.nodes[0].fitness is Fitness.UNFIT
    bad = [finding for finding in verdict.nodes[0].findings if finding.severity is Severity.CRITICAL]
    assert [finding.device for finding in bad] == ["gpu2"]
    assert "gemm_bf16 of gpu2 is" in bad[0].reason
    # the others may all be slow together: one node does not know
    assert {finding.severity for finding in verdict.nodes[0].findings} == {
        Severity.CRITICAL,
        Severity.UNKNOWN,
    }


def test_a_node_is_unfit_for_one_of_its_devices():
    nodes = [
        node(f"n{i}", gemm(100.0, device="gpu0"), gemm(100.0 if i else 80.0, device="gpu1")) for i in range(4)
    ]
    assert verdict_on(Report(tuple(nodes))).exclude == ("n0",)


def test_models_and_keys_are_not_compared_with_each_other():
    other = [node(f"m{i}", gemm(50.0, model="another")) for i in range(4)]
    longer = [node(f"k{i}", replace(gemm(20.0), key="gemm/bf16/1024/random")) for i in range(4)]
    nodes = [node(f"n{i}", gemm(100.0)) for i in range(4)]
    assert verdict_on(Report((*nodes, *other, *longer))).exit is Exit.READY


def test_devices_without_a_model_are_nobodys_peers():
    verdict = verdict_on(measured([100.0] * 4, model=""))
    assert set(severities(verdict).values()) == {"UNKNOWN"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_figure_is_unknown_and_harms_nobody_else(value):
    nodes = [node(f"n{i}", gemm(100.0)) for i in range(4)]
    verdict = verdict_on(Report((*nodes, node("odd", gemm(value)))))
    assert verdict.exclude == ("odd",)
    assert found(verdict, "odd").severity is Severity.UNKNOWN
    assert "is no figure" in found(verdict, "odd").reason


def test_a_zero_among_figures_is_bad():
    assert severities(verdict_on(measured([*EVEN, 0.0])))["n7"] == "CRITICAL"


def test_all_zero_is_unknown():
    assert set(severities(verdict_on(measured([0.0] * 5))).values()) == {"UNKNOWN"}


def test_a_counter_that_others_have_at_zero_warns():
    verdict = verdict_on(measured([0.0, 0.0, 0.0, 0.0, 7e-12], better="lower", unit="errors"))
    assert severities(verdict) == {"n0": "PASS", "n1": "PASS", "n2": "PASS", "n3": "PASS", "n4": "WARNING"}


def test_a_node_that_says_nothing_of_what_others_measured_is_unknown():
    nodes = [node(f"n{i}", gemm(100.0), models={UNNAMED: 1}) for i in range(4)]
    silent = node("silent", Finding("edac", Severity.PASS, "fine"), models={UNNAMED: 1})
    verdict = verdict_on(Report((*nodes, silent)))
    assert verdict.exclude == ("silent",)
    assert "was measured on 0 of 1 devices" in found(verdict, "silent").reason


def test_a_device_that_is_left_out_is_missed():
    both = [
        node(f"n{i}", gemm(100.0, device="a"), gemm(100.0, device="b"), models={UNNAMED: 2}) for i in range(4)
    ]
    one = node("one", gemm(100.0, device="a"), models={UNNAMED: 2})
    verdict = verdict_on(Report((*both, one)))
    assert verdict.exclude == ("one",)
    assert "was measured on 1 of 2 devices" in verdict.nodes[4].reason


def test_a_check_of_one_device_only_misses_none():
    nodes = [node(f"n{i}", gemm(100.0, device="a"), models={UNNAMED: 2}) for i in range(4)]
    assert verdict_on(Report(tuple(nodes))).exit is Exit.READY


def test_a_check_that_says_itself_that_it_failed_is_not_missed_as_well():
    nodes = [node(f"n{i}", gemm(100.0), models={UNNAMED: 1}) for i in range(4)]
    failed = node("failed", Finding("gemm", Severity.UNKNOWN, "no memory left"), models={UNNAMED: 1})
    verdict = verdict_on(Report((*nodes, failed)))
    assert found(verdict, "failed").reason == "no memory left"


def test_history_tightens_what_peers_let_pass():
    history = Settings(learned=(Learned(KEY, UNNAMED, 120e12, 1e12, 40),))
    verdict = verdict_on(measured([100.0] * 4), history)
    assert set(severities(verdict).values()) == {"CRITICAL"}
    assert (
        "16.7% worse than the median of 40 in this site's history, 120 TFLOP/s" in found(verdict, "n0").reason
    )
    assert needs_repeat(measured([100.0] * 4), POLICY, history) == (KEY,)


def test_history_excuses_nothing():
    history = Settings(learned=(Learned(KEY, UNNAMED, 80e12, 1e12, 40),))
    assert severities(verdict_on(measured([*EVEN, 85.0]), history))["n7"] == "CRITICAL"


def test_history_decides_where_there_are_no_peers():
    history = Settings(learned=(Learned(KEY, UNNAMED, 100e12, 1e12, 40),))
    verdict = verdict_on(measured([100.0, 96.0, 90.0]), history)
    assert severities(verdict) == {"n0": "PASS", "n1": "WARNING", "n2": "CRITICAL"}
    assert {found(verdict, host).rule for host in ("n0", "n1", "n2")} == {"history"}


def test_nineteen_figures_are_no_history():
    young = Settings(learned=(Learned(KEY, UNNAMED, 100e12, 1e12, 19),))
    assert severities(verdict_on(measured([100.0]), young)) == {"n0": "UNKNOWN"}


def test_a_site_changes_bounds():
    wide = POLICY.changed([replace(POLICY["peers.share"], warn=0.2, fail=0.3)])
    assert set(severities(verdict_on(measured([*EVEN, 85.0]), policy=wide)).values()) == {"PASS"}
    off = POLICY.changed([replace(POLICY["peers.share"], fail=None)])
    assert severities(verdict_on(measured([*EVEN, 85.0]), policy=off))["n7"] == "WARNING"


def test_storage_is_compared_more_mildly_than_devices():
    def report(slow):
        reading = Reading("storage", "storage read", "storage/read", "xfs", 1e9, "B/s")
        values = [1e9, 1.1e9, 0.9e9, 1e9, 1e9, 1.05e9, 0.95e9, slow]
        return Report(tuple(node(f"n{i}", replace(reading, value=value)) for i, value in enumerate(values)))

    assert severities(verdict_on(report(0.75e9)), "storage")["n7"] == "PASS"
    assert severities(verdict_on(report(0.3e9)), "storage")["n7"] == "WARNING"
    assert severities(verdict_on(report(0.08e9)), "storage")["n7"] == "CRITICAL"
