"""Results that are young enough are used again: of good nodes, for the same questions, and nothing that belongs to a job."""

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Exit,
    Fact,
    Finding,
    Fitness,
    NodeReport,
    NodeVerdict,
    PairResult,
    Reading,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.policy import Bound, ExpectedNode
from pytest_mlhpc.vetting.history import StoredVetting
from pytest_mlhpc.vetting.reuse import max_age, recall, remember

HOUR = 3600 * 10**9
NOW = 1_790_000_000 * 10**9
EDAC = CheckOutcome((Finding("edac", Severity.PASS, "no faults"),), seconds=0.1)
GEMM = CheckOutcome(
    readings=(Reading("gemm", "gemm", "k", "H100", 7e14, "FLOP/s"),), facts=(Fact("hash", "h", "x"),)
)
SPACE = CheckOutcome((Finding("job_space", Severity.WARNING, "little space"),))


def node(host, boot="boot1", outcomes=(EDAC, GEMM), **more):
    return NodeReport(host, boot, {"H100": 4}, outcomes, **more)


PAIRS = (PairResult(0, "node1", "node2", 1e9), PairResult(0, "node2", "node1", 2e9, stage="confirm"))


@pytest.fixture
def vetted(state_dir):
    count = iter(range(100))

    def vet(*nodes, ago=0.0, pairs=(), unfit=(), code=Exit.READY, level="quick"):
        fitness = {one.host: Fitness.UNFIT if one.host in unfit else Fitness.FIT for one in nodes}
        good = tuple(host for host in fitness if host not in unfit)
        verdict = VetVerdict(
            code, 1, tuple(NodeVerdict(*said) for said in fitness.items()), good, unfit, level=level
        )
        report, at_ns = Report(nodes, pairs, level), NOW - int(ago * HOUR)
        vetting = StoredVetting(f"v{next(count)}", verdict, report, VetSettings(level=level), at_ns=at_ns)
        remember(state_dir, vetting, ("job_space",))

    return vet


def recalled(state_dir, *hosts, age=3600.0, settings=None, now=NOW):
    return recall(state_dir, settings or VetSettings(), hosts, max_age_s=age, now_ns=now)


def test_young_results_of_a_good_node_come_back_as_they_were_with_its_boot_id(vetted, state_dir):
    vetted(node("node1"), node("node2", "boot2"), pairs=PAIRS, ago=0.5)
    found = recalled(state_dir, "node1", "node2")
    assert found.nodes == {"node1": node("node1"), "node2": node("node2", "boot2")}
    assert found.pairs == PAIRS


@pytest.mark.parametrize(("age", "comes"), [(3600.0, False), (7200.0, True), (0.0, False)])
def test_old_results_do_not(vetted, state_dir, age, comes):
    vetted(node("node1"), ago=1.5)
    assert bool(recalled(state_dir, "node1", age=age).nodes) is comes


def test_the_latest_of_several_counts(vetted, state_dir):
    vetted(node("node1", "new"), ago=0.1)
    vetted(node("node1", "old"), ago=0.2)
    assert recalled(state_dir, "node1").nodes["node1"].boot_id == "new"


@pytest.mark.parametrize("hosts", [("node1", "node3"), ("node1", "node4"), ("node1",)])
def test_exchanges_come_back_only_if_all_nodes_were_in_one_vetting(vetted, state_dir, hosts):
    vetted(node("node1"), node("node2"), pairs=PAIRS)
    vetted(node("node3"))
    assert recalled(state_dir, *hosts).pairs == ()


def test_nodes_that_were_not_good_or_said_too_little_are_vetted_again(vetted, state_dir):
    nodes = (node("unfit"), node("silent", missing="hung"), node("nameless", boot=""), node("good"))
    vetted(*nodes, unfit=("unfit",))
    assert list(recalled(state_dir, *(one.host for one in nodes)).nodes) == ["good"]


def test_what_belongs_to_a_job_is_not_kept(vetted, state_dir):
    mixed = CheckOutcome((*EDAC.findings, *SPACE.findings))
    vetted(node("node1", outcomes=(SPACE, mixed, GEMM)))
    assert recalled(state_dir, "node1").nodes["node1"].outcomes == (CheckOutcome(EDAC.findings), GEMM)


def test_a_vetting_that_broke_is_not_kept(vetted, state_dir):
    vetted(node("node1"), code=Exit.INTERNAL)
    assert recalled(state_dir, "node1").nodes == {}


@pytest.mark.parametrize(
    ("asked", "comes"),
    [
        (VetSettings(need=5, unknown="warn", out="x", python="python3.9", budget_s=30.0), True),
        (VetSettings(wanted=ExpectedNode(purpose="job", hours=3.0, ranks=4, paths={"data": "/d"}, checkpoint_bytes=1)), True),
        (VetSettings(wanted=ExpectedNode(devices=4)), False),
        (VetSettings(bounds=(Bound("a", "b", "c", warn=1.0),)), False),
        (VetSettings(no_load=True), False),
        (VetSettings(single=True), False),
        (VetSettings(level="deep"), False),
    ],
)  # fmt: skip
def test_only_the_same_questions_have_the_same_answers(vetted, state_dir, asked, comes):
    vetted(node("node1"))
    assert bool(recalled(state_dir, "node1", settings=asked).nodes) is comes


def test_a_deep_vetting_answers_a_quick_one(vetted, state_dir):
    vetted(node("node1"), level="deep")
    assert list(recalled(state_dir, "node1").nodes) == ["node1"]


def test_results_that_nobody_can_ask_for_any_more_are_taken_away(vetted, state_dir):
    vetted(node("node1"), ago=24 * 5)
    vetted(node("node1"), ago=24 * 2)
    assert len(list(state_dir.glob("vetting/reports/*/*.jsonl"))) == 2
    vetted(node("node1"))
    assert len(list(state_dir.glob("vetting/reports/*"))) == 2


@pytest.mark.parametrize(("text", "seconds"), [("", 0.0), ("30m", 1800.0), ("12h", 43200.0)])
def test_an_age_is_written_as_all_times_are(text, seconds):
    assert max_age(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"), [("soon", "is not a duration"), ("4d", "results are kept for 72 hours")]
)
def test_an_age_that_cannot_be_is_a_usage_error(text, said):
    with pytest.raises(UsageError, match=f"--max-age.*{said}"):
        max_age(text)
