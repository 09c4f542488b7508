"""Nodes that share a machine come round several times with each work, and each keeps its best."""

from types import SimpleNamespace

import pytest

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Reading, Severity, joined
from pytest_mlhpc.node.vet.leader import NodeState
from pytest_mlhpc.node.vet.vetting_run import FEW, PASSES, LoadRound, _keep
from pytest_mlhpc.node.vet.workers import WORKS

GEMM = next(work for work in WORKS if work.name == "gemm")
HASH = next(work for work in WORKS if work.name == "hash")


def reading(value: float, *, key: str = "gemm/fp32", better: str = "higher", round_: int = 0) -> Reading:
    return Reading("gemm", "gemm", key, "CPU", value, "FLOP/s", better=better, round=round_)


def order(nodes: int, level: str = "quick", machines: int = 1) -> list[str]:
    states = [NodeState(n, f"n{n}", boot_id=f"m{n % machines}") for n in range(nodes)]
    turns = LoadRound(SimpleNamespace(states=states), VetSettings(level=level), [GEMM, HASH], states, 0)
    return [f"{work.name} {state.host}" for left in turns._turns.values() for work, state in left]


def test_many_nodes_of_one_machine_come_round_with_a_work_before_the_next_begins():
    gemm, hashed = ([f"{work} n{n}" for n in range(FEW + 1)] for work in ("gemm", "hash"))
    assert order(FEW + 1) == gemm * PASSES + hashed


@pytest.mark.parametrize(("nodes", "level", "machines"), [(FEW, "quick", 1), (4, "deep", 1), (4, "quick", 4)])
def test_others_do_each_work_once(nodes, level, machines):
    assert sorted(order(nodes, level, machines)) == sorted(
        f"{name} n{n}" for name in ("gemm", "hash") for n in range(nodes)
    )


def test_of_several_turns_the_better_figure_counts():
    found = joined(
        CheckOutcome(readings=(reading(3.0), reading(0.2, key="latency", better="lower"))),
        CheckOutcome(readings=(reading(4.0), reading(0.3, key="latency", better="lower"))),
    )
    assert {one.key: one.value for one in found.readings} == {"gemm/fp32": 4.0, "latency": 0.2}


def test_what_is_reported_in_several_turns_is_listed_once():
    wrong = Finding("gemm", Severity.CRITICAL, "it computes wrong")
    fact = Fact("gemm", "torch", "2.13")
    found = joined(CheckOutcome(facts=(fact,)), CheckOutcome((wrong,), facts=(fact,)))
    assert (found.findings, found.facts) == ((wrong,), (fact,))


def test_turns_of_one_round_make_one_outcome_and_a_repetition_another():
    state = NodeState(0, "n0")
    for value, round_ in ((3.0, 0), (4.0, 0), (2.0, 1), (5.0, 1)):
        _keep(state, GEMM, CheckOutcome(readings=(reading(value, round_=round_),)), round_)
    assert [[one.value for one in outcome.readings] for outcome in state.outcomes] == [[4.0], [5.0]]
    assert state.works["gemm"] == state.outcomes


def test_who_had_a_turn_when_the_time_is_over_is_not_said_to_have_had_none():
    states = [NodeState(n, f"n{n}", boot_id="m") for n in range(FEW + 1)]
    leader = SimpleNamespace(states=states, until=lambda _what, _until: False)
    _keep(states[0], GEMM, CheckOutcome(readings=(reading(3.0),)), 0)
    LoadRound(leader, VetSettings(), [GEMM], states, 0).run(0.0)
    said = [[one.reason for outcome in state.outcomes for one in outcome.findings] for state in states]
    assert said == [[], *[["gemm was not begun: the time for vetting was over"]] * FEW]
