"""Figures judged by peers: bounds, the second round, those that are low, and what no figure is."""

import math
from dataclasses import replace

import pytest
from judge_worlds import KEY, POLICY, UNNAMED, found, gemm, measured, node, severities, verdict_on

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.figures import keys_to_repeat
from pytest_mlhpc.node.vet.finding import Exit, Finding, Fitness, Reading, Report, Severity

EVEN = [99.0, 100.0, 100.0, 101.0, 100.0, 100.0, 99.5]

#: A hundred peers whose MAD is 1.35, times 1.4826: 2 %.
WIDE = [100 - 2 / 1.4826, 100 + 2 / 1.4826] * 40 + [100.0] * 21


def history(median, count=40):
    return VetSettings(learned=(Learned(KEY, UNNAMED, median * 1e12, 1e12, count),))


def last(report, settings=None, policy=POLICY):
    """Return what is said of the last node."""
    return [*severities(verdict_on(report, settings, policy)).values()][-1]


def test_equal_nodes_pass_and_repeat_nothing():
    report = measured(EVEN)
    verdict = verdict_on(report)
    assert keys_to_repeat(report, VetSettings(), POLICY) == verdict.exclude == ()
    assert (verdict.exit, set(severities(verdict).values())) == (Exit.READY, {"PASS"})


def test_a_slow_node_makes_all_repeat_and_is_named_with_its_figures():
    assert keys_to_repeat(measured([*EVEN, 85.0]), VetSettings(), POLICY) == (KEY,)
    again = measured([*EVEN, 85.0], [*EVEN, 85.0])
    assert keys_to_repeat(again, VetSettings(), POLICY) == ()
    verdict = verdict_on(again)
    assert (verdict.exit, verdict.exclude) == (Exit.TOO_FEW, ("n7",))
    finding = found(verdict, "n7")
    figures = (finding.severity, finding.rule, finding.value, finding.peer_median)
    assert figures == (Severity.CRITICAL, "peers", 85e12, 100e12)
    words = "85 TFLOP/s, mean of two rounds, 15.0% worse than the median of its peers, 100 TFLOP/s"
    assert all(text in finding.reason for text in (words, "leave the node out"))


def test_a_node_that_only_warns_is_fit():
    verdict = verdict_on(measured([*EVEN, 96.0]))
    assert (verdict.exit, verdict.nodes[7].fitness) == (Exit.READY, Fitness.FIT)
    assert verdict.nodes[7].reason.startswith("[node_problem] gemm_bf16 is 96 TFLOP/s")


SLOWER = {"better": "lower", "unit": "s"}


@pytest.mark.parametrize(
    ("report", "severity"),
    [
        pytest.param(measured([*EVEN, 92.0], [*EVEN, 99.0]), "WARNING", id="mean beyond 3 % and not 5 %"),
        pytest.param(measured([*EVEN, 96.0], [*EVEN, 100.0]), "PASS", id="mean within 3 %"),
        *[
            pytest.param(measured([100.0] * 7 + [value]), severity, id=f"{value} among equals")
            for value, severity in ((97.1, "PASS"), (96.9, "WARNING"), (95.1, "WARNING"), (94.9, "CRITICAL"))
        ],
        *[
            pytest.param(measured([*WIDE, value]), severity, id=f"{value} where peers differ")
            for value, severity in ((93.1, "PASS"), (92.9, "WARNING"), (90.1, "WARNING"), (89.8, "CRITICAL"))
        ],
        pytest.param(measured([*EVEN, 118.0], **SLOWER), "CRITICAL", id="higher where lower is better"),
        pytest.param(measured([*EVEN, 82.0], **SLOWER), "PASS", id="lower where lower is better"),
        pytest.param(measured([*EVEN, 0.0]), "CRITICAL", id="zero among figures"),
        pytest.param(
            measured([0.0] * 4 + [7e-12], better="lower", unit="errors"), "WARNING", id="zero with others"
        ),
    ],
)
def test_a_figure_is_judged_by_its_peers(report, severity):
    *others, own = severities(verdict_on(report)).values()
    assert (own, set(others)) == (severity, {"PASS"})


@pytest.mark.parametrize(
    ("report", "severity"),
    [
        pytest.param(measured([*EVEN, 160.0]), "PASS", id="one is fast"),
        pytest.param(measured([0.0] * 5), "UNKNOWN", id="all are zero"),
        pytest.param(measured([100.0] * 4, model=""), "UNKNOWN", id="devices without a model"),
        pytest.param(measured([80.0, 80.0, 100.0, 101.0, 99.0]), "UNKNOWN", id="more than a third is low"),
        pytest.param(measured([100.0, 80.0, 60.0, 50.0, 75.0, 90.0]), "UNKNOWN", id="peers differ wildly"),
    ],
)
def test_all_nodes_get_the_same_verdict(report, severity):
    assert set(severities(verdict_on(report)).values()) == {severity}


def test_a_third_of_slow_nodes_is_not_hidden_by_its_own_dispersion():
    good = [100 + offset / 2 for offset in range(-6, 7)] * 2
    verdict = verdict_on(measured([85.0] * 13 + good))
    assert verdict.exclude == tuple(f"n{i}" for i in range(13))


def test_where_nobody_can_tell_it_says_why():
    report = measured([80.0, 80.0, 100.0, 101.0, 99.0])
    assert keys_to_repeat(report, VetSettings(), POLICY) == (KEY,)
    verdict = verdict_on(report)
    assert verdict.exit is Exit.UNKNOWN
    assert "2 of 5 nodes are far below the others" in found(verdict, "n4").reason
    wild = verdict_on(measured([100.0, 80.0, 60.0, 50.0, 75.0, 90.0]))
    assert "differ too much" in found(wild, "n0").reason


def test_three_nodes_are_no_peers_and_a_lone_one_is_not_repeated_for_that():
    verdict = verdict_on(measured([100.0, 100.0, 85.0]))
    assert verdict.exit is Exit.UNKNOWN
    assert "it takes 4 nodes to be peers, and 3 measured it" in verdict.text
    assert "there is no floor for a device without floor, and no history" in verdict.text
    assert keys_to_repeat(measured([100.0]), VetSettings(), POLICY) == ()


@pytest.mark.parametrize(
    ("values", "settings", "code", "fitness"),
    [
        pytest.param([100.0], {}, Exit.NOT_COMPARED, Fitness.FIT, id="alone"),
        pytest.param([100.0], {"unknown": "warn"}, Exit.READY, Fitness.FIT, id="used whatever is unknown"),
        pytest.param([100.0], {"require_comparison": True}, Exit.UNKNOWN, Fitness.UNKNOWN, id="required"),
        pytest.param([100.0] * 4, {}, Exit.READY, Fitness.FIT, id="peers"),
        pytest.param([80.0, 80.0, 100.0, 101.0, 99.0], {}, Exit.UNKNOWN, Fitness.UNKNOWN, id="at odds"),
    ],
)
def test_healthy_figures_without_a_comparison_are_a_go_unless_one_is_required(
    values, settings, code, fitness
):
    verdict = verdict_on(measured(values), VetSettings(**{"require_comparison": False, **settings}))
    assert (verdict.exit, {node.fitness for node in verdict.nodes}) == (code, {fitness})
    assert ("gemm_bf16: no peers, no floor and no history" in verdict.text) is (code is Exit.NOT_COMPARED)


@pytest.mark.parametrize(
    ("value", "count", "severity", "said"),
    [
        (90.0, 1, Severity.PASS, "is 90 TFLOP/s; 1 earlier figure of this node is 100 TFLOP/s"),
        (
            50.0,
            3,
            Severity.WARNING,
            "50.0% worse than before: the median of 3 earlier figures of this node is 100 TFLOP/s; watch it",
        ),
        (
            94.0,
            7,
            Severity.PASS,
            "is 94 TFLOP/s; the median of 7 earlier figures of this node is 100 TFLOP/s",
        ),
        (94.0, 8, Severity.WARNING, "6.0% worse than before: the median of 8 earlier figures"),
    ],
)
def test_a_lone_node_is_compared_with_what_it_has_itself_reached(value, count, severity, said):
    own = Learned(KEY, UNNAMED, 100e12, 0.0, count, "n0")
    verdict = verdict_on(measured([value]), VetSettings(learned=(own, replace(own, host="n1", median=1e15))))
    finding = found(verdict, "n0")
    assert (verdict.exit, finding.severity, finding.rule) == (Exit.READY, severity, "own_history")
    assert said in finding.reason


def test_earlier_figures_that_differ_much_let_a_lone_node_differ_as_much():
    own = Learned(KEY, UNNAMED, 100e12, 10e12, 8, "n0")
    said = [
        found(verdict_on(measured([value]), VetSettings(learned=(own,))), "n0").severity
        for value in (71.0, 69.0)
    ]
    assert said == [Severity.PASS, Severity.WARNING]


def test_one_device_of_a_single_node_is_named_among_its_own():
    values = [100.0, 100.0, 85.0, 101.0, 99.0, 100.0]
    alone = node("n0", *(gemm(one, device=f"gpu{i}") for i, one in enumerate(values)))
    (verdict,) = verdict_on(Report((alone,))).nodes
    assert verdict.fitness is Fitness.UNFIT
    assert "gemm_bf16 of gpu2 is" in verdict.reason
    # the others may all be slow together: one node does not know
    severity = {finding.device: finding.severity.value for finding in verdict.findings}
    assert severity == {**dict.fromkeys((f"gpu{i}" for i in range(6)), "UNKNOWN"), "gpu2": "CRITICAL"}


def test_a_node_is_unfit_for_one_of_its_devices():
    nodes = [
        node(f"n{i}", gemm(100.0, device="gpu0"), gemm(100.0 if i else 80.0, device="gpu1")) for i in range(4)
    ]
    assert verdict_on(Report(tuple(nodes))).exclude == ("n0",)


def four(*readings, **more):
    """Return four nodes that measured the same."""
    return [node(f"n{i}", *(readings or [gemm(100.0)]), **more) for i in range(4)]


def test_models_and_keys_are_not_compared_with_each_other():
    other = [node(f"m{i}", gemm(50.0, model="another")) for i in range(4)]
    longer = [node(f"k{i}", replace(gemm(20.0), key="gemm/bf16/1024/random")) for i in range(4)]
    assert verdict_on(Report((*four(), *other, *longer))).exit is Exit.READY


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_what_is_no_figure_is_unknown_and_harms_nobody_else(value):
    verdict = verdict_on(Report((*four(), node("odd", gemm(value)))))
    finding = found(verdict, "odd")
    assert (verdict.exclude, finding.severity) == (("odd",), Severity.UNKNOWN)
    assert "is no figure" in finding.reason


ONE, TWO = {UNNAMED: 1}, {UNNAMED: 2}
A, B = gemm(100.0, device="a"), gemm(100.0, device="b")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        pytest.param(
            [*four(models=ONE), node("odd", Finding("edac", Severity.PASS, "fine"), models=ONE)],
            "was measured on 0 of 1 devices",
            id="silent",
        ),
        pytest.param(
            [*four(A, B, models=TWO), node("odd", A, models=TWO)],
            "was measured on 1 of 2 devices",
            id="a device left out",
        ),
        pytest.param(
            [*four(models=ONE), node("odd", Finding("gemm", Severity.UNKNOWN, "no memory left"), models=ONE)],
            "no memory left",
            id="failed by its own words",
        ),
    ],
)
def test_a_node_that_says_less_than_others_measured_is_unknown(nodes, reason):
    verdict = verdict_on(Report(tuple(nodes)))
    assert verdict.exclude == ("odd",)
    assert reason in verdict.nodes[4].reason
    assert len([one for one in verdict.nodes[4].findings if one.check == "gemm"]) == ("1 of 2" in reason) + 1


def test_a_check_of_one_device_only_misses_none():
    assert verdict_on(Report(tuple(four(A, models=TWO)))).exit is Exit.READY


def test_history_tightens_what_peers_let_pass():
    report, better = measured([100.0] * 4), history(120)
    assert keys_to_repeat(report, better, POLICY) == (KEY,)
    verdict = verdict_on(report, better)
    assert set(severities(verdict).values()) == {"CRITICAL"}
    words = "16.7% worse than the median of 40 in this site's history, 120 TFLOP/s"
    assert words in found(verdict, "n0").reason


def test_history_decides_where_there_are_no_peers():
    verdict = verdict_on(measured([100.0, 96.0, 90.0]), history(100))
    assert severities(verdict) == {"n0": "PASS", "n1": "WARNING", "n2": "CRITICAL"}
    assert {found(verdict, host).rule for host in ("n0", "n1", "n2")} == {"history"}


def test_history_excuses_nothing_and_nineteen_figures_are_none():
    assert last(measured([*EVEN, 85.0]), history(80)) == "CRITICAL"
    assert last(measured([100.0]), history(100, count=19)) == "UNKNOWN"


@pytest.mark.parametrize(
    ("bound", "severity"),
    [({"warn": 0.2, "fail": 0.3}, "PASS"), ({"fail": None}, "WARNING")],
    ids=["wider", "off"],
)
def test_a_site_changes_bounds(bound, severity):
    policy = POLICY.changed([replace(POLICY["peers.share"], **bound)])
    assert last(measured([*EVEN, 85.0]), policy=policy) == severity


@pytest.mark.parametrize(("slow", "severity"), [(0.75e9, "PASS"), (0.3e9, "WARNING"), (0.08e9, "CRITICAL")])
def test_storage_is_compared_more_mildly_than_devices(slow, severity):
    values = [1e9, 1.1e9, 0.9e9, 1e9, 1e9, 1.05e9, 0.95e9, slow]
    readings = [Reading("storage", "storage read", "storage/read", "xfs", value, "B/s") for value in values]
    report = Report(tuple(node(f"n{i}", reading) for i, reading in enumerate(readings)))
    assert severities(verdict_on(report), "storage")["n7"] == severity
