"""Votes: a minority is named, two that differ accuse each other, and who stands alone is told so."""

from __future__ import annotations

from judge_worlds import found, node, verdict_on

from pytest_mlhpc.vet.finding import Fact, Origin, Severity
from pytest_mlhpc.vet.report import Report
from pytest_mlhpc.vet.verdict import Exit


def result(value, device="", scope="a device"):
    return Fact("hash", "result", value, scope, device, Severity.CRITICAL)


def version(value):
    return Fact("software", "torch", value)


def voted(*facts):
    return verdict_on(Report(tuple(node(f"n{i}", *each) for i, each in enumerate(facts))))


def test_all_equal_pass():
    verdict = voted([result("ab")], [result("ab")])
    assert verdict.exit is Exit.READY
    assert found(verdict, "n0", "hash").severity is Severity.PASS


def test_the_one_that_computes_otherwise_is_unfit():
    verdict = voted([result("ab")], [result("ab")], [result("cd")])
    assert (verdict.exit, verdict.exclude) == (Exit.TOO_FEW, ("n2",))
    reason = verdict.nodes[2].reason
    assert "is 'cd', while 2 of 3 among devices of model a device have 'ab'; leave the node out" in reason


def test_devices_of_one_node_vote_as_well():
    verdict = voted([result("ab", "gpu0"), result("ab", "gpu1"), result("xx", "gpu2"), result("ab", "gpu3")])
    bad = [finding.device for finding in verdict.nodes[0].findings if finding.severity is Severity.CRITICAL]
    assert bad == ["gpu2"]


def test_two_that_differ_are_both_unknown():
    verdict = voted([result("ab")], [result("cd")])
    assert verdict.exit is Exit.UNKNOWN
    assert verdict.exclude == ("n0", "n1")
    assert "no value among devices of model a device has the majority of 2" in verdict.text


def test_half_is_no_majority():
    verdict = voted([result("ab")], [result("ab")], [result("cd")], [result("ef")])
    assert {found(verdict, f"n{i}", "hash").severity for i in range(4)} == {Severity.UNKNOWN}


def test_other_models_have_their_own_vote():
    verdict = voted(*[[result("ab")]] * 3, *[[result("cd", scope="another")]] * 2)
    assert verdict.exit is Exit.READY


def test_a_lone_device_is_told_that_it_is_alone():
    verdict = voted([result("ab")])
    assert verdict.exit is Exit.READY
    assert found(verdict, "n0", "hash").severity is Severity.INFO
    assert (
        "nothing among devices of model a device to be compared with" in found(verdict, "n0", "hash").reason
    )


def test_a_device_that_disagrees_with_itself_is_unfit_and_has_no_voice():
    verdict = voted([result("ab"), result("cd")], [result("cd")], [result("cd")])
    assert verdict.exclude == ("n0",)
    assert "was once 'ab' and 'cd': it does not agree with itself" in verdict.nodes[0].reason


def test_an_equal_answer_given_twice_is_one_voice():
    verdict = voted([result("ab"), result("ab")], [result("cd")])
    assert found(verdict, "n0", "hash").severity is Severity.UNKNOWN


def test_an_odd_version_warns_and_keeps_its_node():
    verdict = voted([version("2.5")], [version("2.5")], [version("2.4")])
    assert verdict.exit is Exit.READY
    assert found(verdict, "n2", "software").severity is Severity.WARNING
    assert "make it equal, or leave the node out" in found(verdict, "n2", "software").reason


def test_versions_without_a_majority_are_only_told():
    verdict = voted([version("2.5")], [version("2.4")])
    assert {found(verdict, f"n{i}", "software").severity for i in range(2)} == {Severity.INFO}


def test_who_has_to_act_is_handed_on():
    fact = Fact("software", "image", "sha256:1", severity=Severity.CRITICAL, origin=Origin.USER)
    other = Fact("software", "image", "sha256:2", severity=Severity.CRITICAL, origin=Origin.USER)
    verdict = voted([fact], [fact], [other])
    assert verdict.nodes[2].reason.startswith("[user_problem] image of this node is 'sha256:2'")


def test_long_values_are_cut():
    verdict = voted([version("a" * 500)], [version("a" * 500)], [version("b" * 500)])
    assert len(found(verdict, "n2", "software").reason) < 300


LONG = " ".join(f"NCCL_VARIABLE_{i}=a_long_value_of_it" for i in range(8))


def test_long_values_that_differ_far_back_differ_and_the_difference_is_shown():
    verdict = voted(*[[version(f"{LONG} NCCL_X=0")]] * 3, [version(f"{LONG} NCCL_X=1")])
    assert [found(verdict, f"n{i}", "software").severity.value for i in range(4)] == ["PASS"] * 3 + [
        "WARNING"
    ]
    reason = found(verdict, "n3", "software").reason
    assert "is '...NCCL_X=1', while 3 of 4 have '...NCCL_X=0'" in reason


def test_of_two_long_values_each_is_told_where_they_differ():
    verdict = voted([version(f"{LONG} NCCL_X=0 {LONG}")], [version(f"{LONG} NCCL_X=1 {LONG}")])
    assert "is '...NCCL_X=0 NCCL_VARIABLE_0=a_long" in found(verdict, "n0", "software").reason
    assert "is '...NCCL_X=1 NCCL_VARIABLE_0=a_long" in found(verdict, "n1", "software").reason


def test_a_value_that_is_the_beginning_of_a_longer_one_is_shown_by_its_end():
    verdict = voted(*[[version(LONG)]] * 3, [version(f"{LONG} NCCL_X=1")])
    assert (
        "is '...NCCL_VARIABLE_7=a_long_value_of_it NCCL_X=1', while"
        in found(verdict, "n3", "software").reason
    )


def test_a_device_that_disagrees_with_itself_far_back_shows_both():
    verdict = voted([result(f"{'a' * 99}b"), result(f"{'a' * 99}c")])
    assert f"was once '...{'a' * 40}b' and '...{'a' * 40}c'" in verdict.nodes[0].reason
