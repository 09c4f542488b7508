"""From findings to fitness, and from nodes to an exit code."""

import pytest
from judge_worlds import GOOD, found, node, verdict_on

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Exit,
    Finding,
    Fitness,
    NodeReport,
    Origin,
    Report,
    Severity,
)

BAD = Finding("edac", Severity.CRITICAL, "3 uncorrected errors; replace the module")
WARNED = Finding("edac", Severity.WARNING, "many corrected errors; watch it")
UNREADABLE = Finding("edac", Severity.UNKNOWN, "cannot be read; ask for rights")


def allocation(*findings):
    return Report(tuple(node(f"n{i}", each) for i, each in enumerate(findings)), level="deep", seconds=12.5)


@pytest.mark.parametrize(
    ("findings", "need", "code"),
    [
        ([GOOD, GOOD], 0, Exit.READY),
        ([GOOD, WARNED], 0, Exit.READY),
        ([GOOD, BAD], 0, Exit.TOO_FEW),
        ([GOOD, BAD], 1, Exit.READY),
        ([GOOD, UNREADABLE], 0, Exit.UNKNOWN),
        ([GOOD, UNREADABLE], 1, Exit.READY),
        ([GOOD, UNREADABLE, BAD], 2, Exit.UNKNOWN),
        ([GOOD, UNREADABLE, BAD], 3, Exit.TOO_FEW),
        ([GOOD, GOOD], 3, Exit.TOO_FEW),
    ],
)
def test_exit_codes(findings, need, code):
    verdict = verdict_on(allocation(*findings), VetSettings(need=need))
    assert verdict.exit is code
    assert bool(verdict.text) is (code is Exit.UNKNOWN)
    assert verdict.need == (need or len(findings))


def test_unknown_nodes_are_left_out_and_named():
    verdict = verdict_on(allocation(GOOD, UNREADABLE))
    assert (verdict.good, verdict.exclude) == (("n0",), ("n1",))
    text = "1 of 2 needed nodes are fit, and 1 could not be judged; n1: cannot be read; ask for rights"
    assert verdict.text == text


def test_unknown_nodes_are_used_where_the_user_says_so_and_stay_unknown():
    verdict = verdict_on(allocation(GOOD, UNREADABLE, BAD), VetSettings(need=2, unknown="warn"))
    assert (verdict.exit, verdict.good, verdict.exclude) == (Exit.READY, ("n0", "n1"), ("n2",))
    assert verdict.nodes[1].fitness is Fitness.UNKNOWN


def test_the_worst_comes_first_and_gives_the_reason():
    user = Finding("space", Severity.CRITICAL, "no space left; delete something", origin=Origin.USER)
    (verdict,) = verdict_on(Report((node("n0", GOOD, WARNED, UNREADABLE, user),))).nodes
    words = [finding.severity.value for finding in verdict.findings]
    assert words == ["CRITICAL", "UNKNOWN", "WARNING", "PASS"]
    assert verdict.reason == "[user_problem] no space left; delete something"


def test_a_missing_node_is_unfit_and_says_what_it_did():
    gone = NodeReport("n1", missing="no answer for 30 s", unfinished="gemm")
    verdict = verdict_on(Report((node("n0", GOOD), gone)), VetSettings(need=1))
    assert (verdict.exit, verdict.exclude) == (Exit.READY, ("n1",))
    said = "no answer for 30 s while it did gemm; leave it out and have it checked"
    assert verdict.nodes[1].reason == f"[node_problem] the node's answers are incomplete: {said}"


@pytest.mark.parametrize("outcomes", [(), (CheckOutcome(),)])
def test_a_node_that_nobody_examined_is_unknown(outcomes):
    verdict = verdict_on(Report((NodeReport("n0", outcomes=outcomes),)))
    assert (verdict.exit, found(verdict, "n0", "presence").severity) == (Exit.UNKNOWN, Severity.UNKNOWN)


def test_no_nodes_are_no_verdict():
    verdict = verdict_on(Report(()))
    assert (verdict.exit, verdict.text) == (Exit.UNKNOWN, "no node has reported")


def test_level_and_time_are_handed_on_and_a_node_without_trouble_has_no_reason():
    verdict = verdict_on(allocation(GOOD))
    assert (verdict.level, verdict.seconds, verdict.nodes[0].reason) == ("deep", 12.5, "")
