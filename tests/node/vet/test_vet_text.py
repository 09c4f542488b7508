"""What people read of a verdict: what is wrong first, then GO or NO-GO."""

import io
import json
import re
from dataclasses import replace

import pytest

from pytest_mlhpc.node.vet.finding import (
    Exit,
    Finding,
    Fitness,
    LinkVerdict,
    NodeVerdict,
    Origin,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.output import checked, fold, last_line, safe, show, show_json, table
from pytest_mlhpc.node.vet.verdict_files import WrittenVerdict, verdict_to_json


def finding(severity, reason="why", check="gemm", device="", origin=Origin.NODE):
    return Finding(check, severity, reason, device, origin=origin)


def node(host, *findings, fitness=Fitness.FIT, reason=""):
    return NodeVerdict(host, fitness, reason, findings)


def verdict(nodes, exclude=(), code=Exit.READY, need=0, *, seconds=41.0, text="", links=(), level="quick"):
    good = tuple(one.host for one in nodes if one.host not in exclude)
    return VetVerdict(code, need, tuple(nodes), good, tuple(exclude), links, level, seconds, text)


def hosts(count):
    return [node(f"node{index}") for index in range(1, count + 1)]


def test_enough_nodes_are_a_go_with_their_number_time_and_cost():
    assert last_line(verdict(hosts(66), ("node1", "node2"))) == "GO 64/66 nodes, 41 s, 0.8 node-hours"
    assert last_line(verdict(hosts(1), seconds=9.0)) == "GO 1/1 node, 9 s, 0.003 node-hours"


def test_healthy_nodes_without_a_comparison_are_a_go_after_what_would_help():
    stream = io.StringIO()
    show(verdict(hosts(1), code=Exit.NOT_COMPARED, text="gemm: no peers; vet more"), stream)
    last = "GO, not compared: 1/1 node healthy, 41 s, 0.01 node-hours"
    assert stream.getvalue().splitlines() == ["gemm: no peers; vet more", last]


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
    assert re.fullmatch(r"NO-GO: cannot judge: word word.{,180}\.\.\., 41 s, 0.01 node-hours", line)


def warned(*reasons):
    """Return nodes of which each has a warning."""
    return [
        node(f"node{number:03d}", finding(Severity.WARNING, why)) for number, why in enumerate(reasons, 1)
    ]


def test_what_passed_is_not_listed():
    assert table(verdict([node("node1", finding(Severity.PASS), finding(Severity.INFO))])) == ""


def test_what_is_wrong_comes_first_with_whose_problem_it_is():
    closed = finding(Severity.UNKNOWN, "dmesg is closed", "kernel_log", origin=Origin.USER)
    nodes = [
        node("node1", finding(Severity.WARNING, "4 % slow")),
        node("node2", closed, fitness=Fitness.UNKNOWN),
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
    assert table(verdict(warned("[user_problem] no space"))).count("_problem]") == 1


def test_what_nodes_have_in_common_is_said_once():
    text = table(verdict(warned(*["/dev/shm is small"] * 64)))
    assert text == "WARNING  node[001-064]    gemm  [node_problem] /dev/shm is small\n"


def test_a_node_that_never_came_is_reported_with_the_verdicts_reason():
    nodes = [node("node1", fitness=Fitness.UNFIT, reason="[node_problem] never came")]
    assert table(verdict(nodes, ("node1",))) == "CRITICAL  node1      [node_problem] never came\n"


def test_a_table_is_no_longer_than_a_screen_and_says_what_it_leaves_out():
    *lines, last = table(verdict(warned(*map(str, range(100)))), most=10).splitlines()
    assert (len(lines), last) == (10, "... and 90 more: verdict.json has all of them")


def test_a_long_reason_is_cut():
    assert len(table(verdict(warned("x" * 10_000)))) < 500


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a\r\nb\tc\x0bd ", "a b c d"),
        *((f"a{letter}[2Jb", "a?[2Jb") for letter in "\x1b\x00\x07\x9b\u202e\u200b\ud800\x7f"),
    ],
)
def test_text_is_one_line_that_no_terminal_obeys(text, shown):
    assert safe(text) == shown


def test_a_terminal_that_knows_ascii_alone_gets_marks_and_no_error():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(verdict(warned("für alle")), stream)
    stream.seek(0)
    line = "WARNING  node001    gemm  [node_problem] f?r alle"
    assert stream.read().splitlines() == [line, "GO 1/1 node, 41 s, 0.01 node-hours"]


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
    reason = f"{metric} of {device or 'it'} is 3 B/s, not compared: {why}"
    return Finding(metric, Severity.UNKNOWN, reason, device, rule="uncompared", metric=metric)


def lines_of(*findings):
    """Return the table of one node of which nobody can tell."""
    return table(verdict([node("node1", *findings, fitness=Fitness.UNKNOWN)], ("node1",))).splitlines()


def test_figures_that_are_not_compared_for_one_reason_are_one_line():
    several = [unjudged("gemm", device=f"gpu{n}") for n in range(4)]
    lines = lines_of(*several, unjudged("memory"), finding(Severity.UNKNOWN))
    assert [line.split(maxsplit=3)[2:] for line in lines] == [
        ["gemm,memory", "gemm, memory not compared: it takes 4 nodes to be peers; vet 4"],
        ["gemm", "why"],
    ]


def test_figures_that_are_not_compared_for_different_reasons_stay_apart():
    lines = lines_of(unjudged("gemm", "no floor"), unjudged("memory", "no peers"))
    shown = [line.split(maxsplit=3)[3] for line in lines]
    said = [("gemm", "no floor"), ("memory", "no peers")]
    assert shown == [f"{metric} of it is 3 B/s, not compared: {why}" for metric, why in said]


def test_what_was_left_out_for_want_of_time_is_said_before_a_go():
    checks = ("gemm", "hash\x1b", "gemm")
    left = [Finding(check, Severity.INFO, "left out", rule="budget") for check in checks]
    stream = io.StringIO()
    show(verdict([node("node1", *left), node("node2", *left)]), stream)
    said = "not checked for lack of time: gemm, hash?; give a longer --budget"
    assert stream.getvalue().splitlines() == [said, "GO 2/2 nodes, 41 s, 0.02 node-hours"]


def figure(value, rule="peers", severity=Severity.PASS, device=""):
    return Finding("gemm", severity, "why", device, rule=rule, metric="gemm_fp32", value=value, unit="FLOP/s")


SEEN = [
    Finding("edac", Severity.PASS, "no memory faults", rule="edac.ue"),
    Finding("kernel", Severity.INFO, "has nothing to be compared with", rule="vote"),
    Finding("hash", Severity.INFO, "left out", rule="budget"),
]


@pytest.mark.parametrize(
    ("nodes", "rows"),
    [
        pytest.param([[]], [], id="nothing was seen"),
        pytest.param(
            [[figure(2e12, "uncompared", Severity.INFO), *SEEN]],
            ["gemm gemm_fp32 2 TFLOP/s not compared", "edac no memory faults pass"],
            id="one node has all that was seen",
        ),
        pytest.param(
            [[replace(figure(2e12), reason="gemm is 2; the median of 3 earlier figures is 1")]],
            ["gemm gemm_fp32 2 TFLOP/s pass: the median of 3 earlier figures is 1"],
            id="what one figure is compared with",
        ),
        pytest.param(
            [[figure(2e12), *SEEN], [figure(3e12), *SEEN], [figure(1e12, severity=Severity.CRITICAL)]],
            ["gemm gemm_fp32 1 TFLOP/s to 3 TFLOP/s, median 2 TFLOP/s 2 pass by peers, 1 critical by peers"],
            id="several have the range of figures",
        ),
    ],
)
def test_checks_are_a_table_with_values_and_verdicts(nodes, rows):
    text = checked(verdict([node(f"node{number}", *said) for number, said in enumerate(nodes)]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines == (["check metric value verdict", *rows] if rows else [])


def test_for_programs_the_verdict_is_one_object_with_the_schema_of_the_command():
    kept, stream = WrittenVerdict("1", 2, verdict(hosts(2), level="deep")), io.StringIO()
    show_json(kept, stream)
    assert json.loads(stream.getvalue()) == {**verdict_to_json(kept), "schema": "mlhpc/vet-deep/1"}
