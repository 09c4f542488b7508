"""Exchanges between nodes: who meets whom, who is slow, who is dumb, and which connection is bad."""

from dataclasses import replace
from itertools import chain, pairwise, product

import pytest
from judge_worlds import GOOD, POLICY, drawn, exchanged, found, names, node, severities, verdict_on

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.finding import Exit, Fitness, NodeReport, PairResult, Report, Severity
from pytest_mlhpc.node.vet.pairs import confirm_schedule, pair_schedule

KEY = "gloo/32MiB"


def vetted(*arguments, settings=None, **how):
    return verdict_on(exchanged(*arguments, **how), settings)


def unfit(verdict):
    return [each.host for each in verdict.nodes if each.fitness is Fitness.UNFIT]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 16, 33, 64])
@pytest.mark.parametrize("level", ["quick", "deep"])
def test_nobody_is_twice_in_one_round(count, level):
    rounds = [list(chain(*pairs)) for pairs in pair_schedule(names(count), level)]
    assert all(len(met) == len(set(met)) for met in rounds)


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 31, 256])
def test_quick_has_three_rounds_with_other_partners_each(count):
    rounds = pair_schedule(names(count))
    assert len(rounds) == 3
    pairs = [frozenset(pair) for pair in chain(*rounds)]
    assert len(set(pairs)) == (len(pairs) if count > 2 else 1)
    assert set(chain(*pairs)) == set(names(count))


@pytest.mark.parametrize("count", [3, 4, 7, 8, 31, 32])
def test_deep_lets_each_meet_each_once(count):
    rounds = pair_schedule(names(count), "deep")
    assert len(rounds) == count - 1 + count % 2
    pairs = [frozenset(pair) for pair in chain(*rounds)]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2


def test_deep_takes_more_than_32_in_groups_of_neighbours():
    hosts = names(70)
    rounds = pair_schedule(hosts, "deep")
    groups = [set(hosts[a:b]) for a, b in pairwise([0, 23, 46, 70])]
    assert len(rounds) == 23
    assert all(any(set(pair) <= group for group in groups) for pair in chain(*rounds))


@pytest.mark.parametrize("hosts", [[], ["alone"]])
def test_one_node_meets_nobody(hosts):
    assert pair_schedule(hosts) == pair_schedule(hosts, "deep") == ()


@pytest.mark.parametrize("count", [3, 4, 5, 6, 16])
def test_equal_nodes_pass_without_a_confirmation(count):
    report = exchanged(names(count), {})
    assert confirm_schedule(report, POLICY) == ()
    assert set(severities(verdict_on(report), "pairs").values()) == {"PASS"}


@pytest.mark.parametrize("count", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_slow_node_is_named_alone_wherever_it_stands(count, bad):
    verdict = vetted(names(count), {f"n{bad}": 0.8})
    assert (unfit(verdict), len(verdict.good)) == ([f"n{bad}"], count - 1)
    words = "8 GB/s, 20.0% below the median of all nodes, 10 GB/s; leave the node out"
    assert words in verdict.nodes[bad].reason


@pytest.mark.parametrize("bad", [("n0", "n1"), ("n0", "n5"), ("n2", "n3")])
@pytest.mark.parametrize("count", [6, 8])
def test_two_slow_nodes_are_named_alone(count, bad):
    assert unfit(vetted(names(count), dict.fromkeys(bad, 0.8))) == list(bad)


def test_each_suspect_is_confirmed_by_two_good_partners():
    rounds = confirm_schedule(exchanged(names(8), {"n0": 0.8}, confirm=False), POLICY)
    assert [len(each) for each in rounds] == [1, 1]
    assert len(set(chain(*chain(*rounds))) - {"n0"}) == 2


def test_a_good_node_that_met_only_bad_ones_is_cleared():
    hosts = names(8)
    met = set(chain(*(pair for pair in chain(*pair_schedule(hosts)) if "n0" in pair))) - {"n0"}
    speed = dict.fromkeys(met, 0.8)
    before = verdict_on(exchanged(hosts, speed, confirm=False)).nodes[0]
    assert before.fitness is Fitness.UNKNOWN  # not accused, though as slow as they
    assert "has met too few good nodes" in before.reason
    after = vetted(hosts, speed)
    assert (unfit(after), after.nodes[0].fitness) == (sorted(met), Fitness.FIT)


def test_a_silent_node_is_named_and_its_partners_are_not():
    verdict = vetted(names(6), {}, trouble={"n3": ("no answer for 4 s", "n3")})
    assert (unfit(verdict), verdict.exclude, verdict.links) == (["n3"], ("n3",), ())
    assert "no answer for 4 s; leave the node out and have its network checked" in verdict.nodes[3].reason


def test_a_node_whose_port_is_dead_cannot_put_the_blame_on_others():
    hosts = names(6)
    trouble = {frozenset({"n0", other}): ("no answer for 4 s", other) for other in hosts[1:]}
    assert unfit(vetted(hosts, {}, trouble=trouble)) == ["n0"]


def test_a_missing_partner_is_nobodys_fault():
    report = exchanged(names(6), {}, trouble={"n3": ("lost", "")}, confirm=False)
    gone = NodeReport("n3", missing="it never came")
    verdict = verdict_on(replace(report, nodes=(*report.nodes[:3], gone, *report.nodes[4:])))
    assert unfit(verdict) == ["n3"]
    assert set(severities(verdict, "pairs").values()) == {"PASS"}


def test_a_node_that_fails_with_two_good_partners_is_unfit_though_one_exchange_was_done():
    met = [pair for pair in chain(*pair_schedule(names(6))) if "n2" in pair]
    trouble = {frozenset(pair): ("connection reset", "") for pair in met[:2]}
    verdict = vetted(names(6), {}, trouble=trouble)
    assert unfit(verdict) == ["n2"]
    assert "failed (connection reset), which had none fail with others" in verdict.nodes[2].reason


def test_one_failed_exchange_between_good_nodes_is_a_connections():
    pair = frozenset(pair_schedule(names(6))[0][0])
    verdict = vetted(names(6), {}, trouble={pair: ("connection reset", "")})
    (link,) = verdict.links
    assert (verdict.exit, {link.first, link.second}) == (Exit.READY, pair)
    assert "1 of 1 exchanges failed, though both nodes had others done: connection reset" in link.reason


def learned(rate):
    return VetSettings(learned=(Learned(KEY, "", rate, 1e8, 25),))


@pytest.mark.parametrize(
    ("speed", "how", "text"),
    [
        pytest.param({}, {}, "two nodes without a history cannot say whether that is good", id="no history"),
        pytest.param(
            {"n0": 0.8}, {"settings": learned(1e10)}, "one of them or their connection is slow", id="slow"
        ),
        pytest.param(
            {}, {"trouble": {"n1": ("broken pipe", "")}}, "it is not known who is to blame", id="failed"
        ),
    ],
)
def test_of_two_nodes_neither_is_accused(speed, how, text):
    verdict = vetted(names(2), speed, **how)
    assert (verdict.exit, text in verdict.text) == (Exit.UNKNOWN, True), verdict.text


def test_two_nodes_as_fast_as_history_says_are_fit():
    assert vetted(names(2), {}, settings=learned(1e10)).exit is Exit.READY


def test_of_two_the_one_that_did_not_answer_is_unfit_and_the_other_is_not():
    verdict = vetted(names(2), {}, trouble={"n1": ("no answer for 4 s", "n1")}, settings=VetSettings(need=1))
    assert (verdict.exit, verdict.good, verdict.exclude) == (Exit.READY, ("n0",), ("n1",))
    assert "that does not count against this node" in found(verdict, "n0", "pairs").reason


def test_a_fabric_slower_than_history_warns():
    verdict = vetted(names(6), {}, settings=learned(2e10))
    assert (verdict.exit, set(severities(verdict, "pairs").values())) == (Exit.READY, {"WARNING"})


def test_a_node_that_took_no_part_is_unknown():
    report = exchanged(names(5), {})
    verdict = verdict_on(replace(report, nodes=(*report.nodes, node("late", GOOD))))
    assert verdict.exclude == ("late",)
    assert "took no part in the exchanges" in verdict.nodes[5].reason


def test_without_exchanges_nothing_is_said_of_them():
    assert verdict_on(Report((node("n0", GOOD), node("n1", GOOD)))).exit is Exit.READY


def test_an_exchange_that_failed_before_its_back_end_was_known_counts():
    report = exchanged(names(5), {}, trouble={"n2": ("no such name", "")})
    pairs = [replace(result, key="") if result.trouble else result for result in report.pairs]
    pairs.append(PairResult(0, "n0", "n1", 5e9, key="nccl/32MiB"))
    assert unfit(verdict_on(replace(report, pairs=tuple(pairs)))) == ["n2"]


@pytest.mark.parametrize(("other", "value"), [("stranger", 1.0), ("n0", 1.0), ("n1", float("nan"))])
def test_results_of_strangers_and_of_nonsense_change_nothing(other, value):
    report = exchanged(names(5), {})
    odd = PairResult(0, "n0", other, value, key=KEY)
    assert verdict_on(replace(report, pairs=(*report.pairs, odd))).exit is Exit.READY


@pytest.mark.parametrize("count", [4, 8, 16, 32])
def test_deep_names_a_slow_connection_and_blames_no_node(count):
    verdict = vetted(names(count), {}, level="deep", links={frozenset({"n1", "n3"}): 0.8})
    (link,) = verdict.links
    assert (verdict.exit, link.first, link.second) == (Exit.READY, "n1", "n3")
    assert (link.value, link.peer_median) == (pytest.approx(8e9), pytest.approx(1e10))
    assert "20.0% below the median of all connections between good nodes" in link.reason


TWO_HALVES = {frozenset(pair): 0.7 for pair in product(names(8)[:4], names(8)[4:])}


@pytest.mark.parametrize(
    ("level", "speed", "links"),
    [
        pytest.param("quick", {}, {frozenset(pair_schedule(names(8))[0][0]): 0.8}, id="of a quick vetting"),
        pytest.param("deep", {"n2": 0.8}, {}, id="of a slow node"),
        pytest.param(
            "deep",
            {},
            TWO_HALVES,
            id="of a network that is built in two speeds",
        ),
    ],
)
def test_no_connection_is_named(level, speed, links):
    verdict = vetted(names(8), speed, level=level, links=links)
    assert (unfit(verdict), verdict.links) == (list(speed), ())


def test_a_slow_connection_is_measured_again_and_the_mean_counts():
    report = exchanged(names(6), {}, level="deep", links={frozenset({"n1", "n3"}): 0.94}, confirm=False)
    assert confirm_schedule(report, POLICY) == ((("n1", "n3"),),)
    assert len(verdict_on(report).links) == 1
    again = PairResult(0, "n1", "n3", 1e10, stage="confirm", key=KEY)
    assert verdict_on(replace(report, pairs=(*report.pairs, again))).links == ()


@pytest.mark.parametrize("bad", [["n1"], ["n0", "n4"], ["n1", "n2", "n6"]])
def test_no_good_node_is_lost_and_no_slow_one_missed_in_noise(bad):
    draw = drawn(5)
    for _ in range(20):
        verdict = vetted(names(8), dict.fromkeys(bad, 0.8), draw=draw, spread=0.015)
        assert unfit(verdict) == bad
        assert {each.severity for each in verdict.nodes[7].findings} <= {Severity.PASS, Severity.WARNING}
