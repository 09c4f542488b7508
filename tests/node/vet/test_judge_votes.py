"""Votes: a minority is named, two that differ accuse each other, and who stands alone is told so."""

import pytest
from judge_worlds import node, verdict_on

from pytest_mlhpc.node.vet.finding import Exit, Fact, Origin, Report, Severity


def result(value, device="", scope="a device"):
    return Fact("hash", "result", value, scope, device, Severity.CRITICAL)


def version(value):
    return Fact("software", "torch", value)


def image(value):
    return Fact("software", "image", value, severity=Severity.CRITICAL, origin=Origin.USER)


def voted(*facts):
    """Return the verdict on nodes of which each said a list of facts, or one."""
    each = [fact if isinstance(fact, list) else [fact] for fact in facts]
    return verdict_on(Report(tuple(node(f"n{i}", *one) for i, one in enumerate(each))))


AB, CD = result("ab"), result("cd")
OLD, NEW = version("2.4"), version("2.5")
#: Longer than a reason can show.
LONG = " ".join(f"NCCL_VARIABLE_{i}=a_long_value_of_it" for i in range(8))


@pytest.mark.parametrize(
    ("facts", "exits", "severities"),
    [
        pytest.param([AB, AB], Exit.READY, ["PASS"] * 2, id="all equal"),
        pytest.param([AB, AB, CD], Exit.TOO_FEW, ["PASS", "PASS", "CRITICAL"], id="one computes otherwise"),
        pytest.param([AB, CD], Exit.UNKNOWN, ["UNKNOWN"] * 2, id="two differ"),
        pytest.param([AB, AB, CD, result("ef")], Exit.UNKNOWN, ["UNKNOWN"] * 4, id="half is no majority"),
        pytest.param(
            [AB] * 3 + [result("cd", scope="another")] * 2, Exit.READY, ["PASS"] * 5, id="other models"
        ),
        pytest.param([AB], Exit.READY, ["INFO"], id="a lone device"),
        pytest.param([[AB, AB], CD], Exit.UNKNOWN, ["UNKNOWN"] * 2, id="given twice is one voice"),
        pytest.param([NEW, NEW, OLD], Exit.READY, ["PASS", "PASS", "WARNING"], id="an odd version"),
        pytest.param([NEW, OLD], Exit.READY, ["INFO"] * 2, id="versions without a majority"),
        pytest.param(
            [*[version(f"{LONG} NCCL_X=0")] * 3, version(f"{LONG} NCCL_X=1")],
            Exit.READY,
            ["PASS", "PASS", "PASS", "WARNING"],
            id="long values that differ far back",
        ),
    ],
)
def test_a_majority_decides(facts, exits, severities):
    verdict = voted(*facts)
    assert verdict.exit is exits
    assert [[one.severity.value for one in each.findings] for each in verdict.nodes] == [
        [one] for one in severities
    ]
    out = tuple(f"n{i}" for i, one in enumerate(severities) if one in ("CRITICAL", "UNKNOWN"))
    assert verdict.exclude == out


def test_devices_of_one_node_vote_as_well():
    (verdict,) = voted([result("xx" if i == 2 else "ab", f"gpu{i}") for i in range(4)]).nodes
    assert [one.device for one in verdict.findings if one.severity is Severity.CRITICAL] == ["gpu2"]


def test_a_device_that_disagrees_with_itself_is_unfit_and_has_no_voice():
    assert voted([AB, CD], CD, CD).exclude == ("n0",)


@pytest.mark.parametrize(
    ("facts", "number", "words"),
    [
        ([AB, AB, CD], 2, "is 'cd', while 2 of 3 among devices of model a device have 'ab'; leave the node out"),
        ([AB, CD], 0, "no value among devices of model a device has the majority of 2"),
        ([AB], 0, "nothing among devices of model a device to be compared with"),
        ([[AB, CD], CD, CD], 0, "was once 'ab' and 'cd': it does not agree with itself"),
        ([NEW, NEW, OLD], 2, "make it equal, or leave the node out"),
        ([image("sha256:1"), image("sha256:1"), image("sha256:2")], 2, "image of this node is 'sha256:2'"),
        ([version("a" * 500), version("a" * 500), version("b" * 500)], 2, "'bbb"),
        ([*[version(f"{LONG} NCCL_X=0")] * 3, version(f"{LONG} NCCL_X=1")], 3,
         "is '...NCCL_X=1', while 3 of 4 have '...NCCL_X=0'"),
        ([version(f"{LONG} NCCL_X={i} {LONG}") for i in (0, 1)], 0, "is '...NCCL_X=0 NCCL_VARIABLE_0=a_long"),
        ([version(f"{LONG} NCCL_X={i} {LONG}") for i in (0, 1)], 1, "is '...NCCL_X=1 NCCL_VARIABLE_0=a_long"),
        ([*[version(LONG)] * 3, version(f"{LONG} NCCL_X=1")], 3,
         "is '...NCCL_VARIABLE_7=a_long_value_of_it NCCL_X=1', while"),
        ([[result(f"{'a' * 99}b"), result(f"{'a' * 99}c")]], 0, f"was once '...{'a' * 40}b' and '...{'a' * 40}c'"),
    ],
)  # fmt: skip
def test_a_reason_shows_where_values_differ(facts, number, words):
    (finding,) = voted(*facts).nodes[number].findings
    assert words in finding.reason
    assert len(finding.reason) < 300


def test_who_has_to_act_is_handed_on():
    verdict = voted(image("sha256:1"), image("sha256:1"), image("sha256:2"))
    assert verdict.nodes[2].reason.startswith("[user_problem] ")
