"""What people read of a verdict: what is wrong first, then GO or NO-GO."""

from __future__ import annotations

import io

import pytest

from pytest_mlhpc.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.vet.text import fold, last_line, safe, show, table
from pytest_mlhpc.vet.verdict import Exit, Fitness, LinkVerdict, NodeVerdict, Verdict


def finding(severity, reason="why", check="gemm", device="", origin=Origin.NODE):
    return Finding(check, severity, reason, device, origin=origin)


def node(host, *findings, fitness=Fitness.FIT, reason=""):
    return NodeVerdict(host, fitness, reason, findings)


def verdict(nodes, exclude=(), code=Exit.READY, need=0, *, seconds=41.0, text="", links=()):
    good = tuple(one.host for one in nodes if one.host not in exclude)
    return Verdict(code, need, tuple(nodes), good, tuple(exclude), links, "quick", seconds, text)


def hosts(count):
    return [node(f"node{index}") for index in range(1, count + 1)]


def test_enough_nodes_are_a_go_with_their_number_time_and_cost():
    assert last_line(verdict(hosts(66), ("node1", "node2"))) == "GO 64/66 nodes, 41 s, 0.8 node-hours"


def test_one_node_is_no_plural_and_costs_next_to_nothing():
    assert last_line(verdict(hosts(1), seconds=9.0)) == "GO 1/1 node, 9 s, 0.003 node-hours"


COST = "41 s, 0.1 node-hours"


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (Exit.TOO_FEW, "", "5/6 nodes fit, 6 needed"),
        (Exit.UNKNOWN, "", "cannot judge: 1 of 6 nodes unknown, 6 needed"),
        (Exit.UNKNOWN, "no floor for this model", "cannot judge: no floor for this model"),
        (Exit.INTERNAL, "the deadline passed\nin round 2", "the deadline passed in round 2"),
        (Exit.INTERNAL, "", "vetting itself failed"),
    ],
)
def test_anything_else_is_a_no_go_that_says_why(code, text, said):
    nodes = [*hosts(5), node("node6", fitness=Fitness.UNKNOWN)]
    assert last_line(verdict(nodes, ("node6",), code, 6, text=text)) == f"NO-GO: {said}, {COST}"


def test_the_last_line_is_one_that_can_be_read():
    line = last_line(verdict(hosts(1), code=Exit.UNKNOWN, text="word " * 1000))
    assert line.startswith("NO-GO: cannot judge: word word")
    assert line.endswith("..., 41 s, 0.01 node-hours")
    assert len(line) < 220


def test_nothing_is_told_of_what_is_well():
    nodes = [node("node1", finding(Severity.PASS), finding(Severity.INFO))]
    assert table(verdict(nodes)) == ""


def test_what_is_wrong_comes_first_with_whose_problem_it_is():
    nodes = [
        node("node1", finding(Severity.WARNING, "4 % slow")),
        node(
            "node2",
            finding(Severity.UNKNOWN, "dmesg is closed", "kernel_log", origin=Origin.USER),
            fitness=Fitness.UNKNOWN,
        ),
        node("node3", finding(Severity.CRITICAL, "remap failure", "memory", "gpu3"), fitness=Fitness.UNFIT),
        node("node4"),
    ]
    links = (LinkVerdict("node1", "node4", "half as fast"),)
    assert table(verdict(nodes, ("node2", "node3"), links=links)).splitlines() == [
        "CRITICAL  node3          gpu3  memory      [node_problem] remap failure",
        "UNKNOWN   node2                kernel_log  dmesg is closed",
        "LINK      node1 - node4        pairs       [node_problem] half as fast",
        "WARNING   node1                gemm        [node_problem] 4 % slow",
    ]


def test_a_reason_that_has_its_prefix_gets_no_second_one():
    nodes = [node("node1", finding(Severity.WARNING, "[user_problem] no space"))]
    assert table(verdict(nodes)).count("_problem]") == 1


def test_what_nodes_have_in_common_is_said_once():
    nodes = [
        node(f"node{index:03d}", finding(Severity.WARNING, "/dev/shm is small")) for index in range(1, 65)
    ]
    (line,) = table(verdict(nodes)).splitlines()
    assert line == "WARNING  node[001-064]    gemm  [node_problem] /dev/shm is small"


def test_a_node_that_never_came_is_told_with_the_verdicts_reason():
    nodes = [node("node1", fitness=Fitness.UNFIT, reason="[node_problem] never came")]
    assert table(verdict(nodes, ("node1",))) == "CRITICAL  node1      [node_problem] never came\n"


def test_a_table_is_no_longer_than_a_screen_and_says_what_it_leaves_out():
    nodes = [node(f"node{index}", finding(Severity.WARNING, f"reason {index}")) for index in range(100)]
    lines = table(verdict(nodes), most=10).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "... and 90 more: verdict.json has all of them"


def test_a_long_reason_is_cut():
    nodes = [node("node1", finding(Severity.WARNING, "x" * 10_000))]
    assert len(table(verdict(nodes))) < 500


@pytest.mark.parametrize("letter", ["\x1b", "\x00", "\x07", "\x9b", "\u202e", "\u200b", "\ud800", "\x7f"])
def test_nothing_that_a_terminal_would_obey_is_printed(letter):
    evil = f"a{letter}[2Jb"
    nodes = [
        node(evil, finding(Severity.CRITICAL, evil, evil, evil), fitness=Fitness.UNFIT, reason=evil),
        node(f"{evil}2", fitness=Fitness.UNKNOWN, reason=evil),
    ]
    links = (LinkVerdict(evil, evil, evil),)
    text = table(verdict(nodes, (evil,), links=links)) + last_line(
        verdict(nodes, code=Exit.INTERNAL, text=evil)
    )
    assert letter not in text
    assert "a?[2Jb" in text


def test_text_of_several_lines_is_one():
    assert safe(" a\r\nb\tc\x0bd ") == "a b c d"


def test_a_terminal_that_knows_ascii_alone_gets_marks_and_no_error():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(verdict([node("node1", finding(Severity.WARNING, "für alle"))]), stream)
    stream.seek(0)
    assert stream.read().splitlines() == [
        "WARNING  node1    gemm  [node_problem] f?r alle",
        "GO 1/1 node, 41 s, 0.01 node-hours",
    ]


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ("", ""),
        ("node1", "node1"),
        ("node3 node1 node2", "node[1-3]"),
        ("node1 node2 node4 login", "node[1-2,4],login"),
        ("n08 n09 n10 n11", "n[08-11]"),
        ("n8 n9 n10 n11", "n[8-11]"),
        ("n01 n1", "n01,n1"),
        ("n1 n1", "n1"),
        ("gpu-a-1 gpu-b-1", "gpu-a-1,gpu-b-1"),
        ("1 2", "[1-2]"),
        ("x" + "9" * 5000, "x" + "9" * 5000),
    ],
)
def test_names_are_folded_as_people_write_them(names, folded):
    assert fold(names.split()) == folded


def unjudged(metric, why="it takes 4 nodes to be peers; vet 4", device=""):
    reason = f"nobody can judge that {metric} of {device or 'it'} is 3 B/s: {why}"
    return Finding(metric, Severity.UNKNOWN, reason, device, rule="unjudged", metric=metric)


def test_figures_that_nobody_can_judge_for_one_reason_are_one_line():
    findings = [unjudged("gemm", device=f"gpu{n}") for n in range(4)] + [
        unjudged("memory"),
        finding(Severity.UNKNOWN),
    ]
    lines = table(verdict([node("node1", *findings, fitness=Fitness.UNKNOWN)], ("node1",))).splitlines()
    assert [line.split(maxsplit=3)[2:] for line in lines] == [
        ["gemm,memory", "nobody can judge gemm, memory: it takes 4 nodes to be peers; vet 4"],
        ["gemm", "why"],
    ]


def test_figures_that_nobody_can_judge_for_different_reasons_stay_apart():
    findings = [unjudged("gemm", "no floor"), unjudged("memory", "no peers")]
    lines = table(verdict([node("node1", *findings, fitness=Fitness.UNKNOWN)], ("node1",))).splitlines()
    assert [line.partition("that ")[2] for line in lines] == [
        "gemm of it is 3 B/s: no floor", "memory of it is 3 B/s: no peers",
    ]  # fmt: skip


def test_what_was_left_out_for_want_of_time_is_said_before_a_go():
    left = [
        Finding(check, Severity.INFO, "left out", rule="budget") for check in ("gemm", "hash\x1b", "gemm")
    ]
    stream = io.StringIO()
    show(verdict([node("node1", *left), node("node2", *left)]), stream)
    assert stream.getvalue() == (
        "not looked at for want of time: gemm, hash?; give a longer --budget\nGO 2/2 nodes, 41 s, 0.02 node-hours\n"
    )
