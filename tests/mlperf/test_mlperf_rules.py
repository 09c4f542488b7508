"""Each departure from a rule is found, named with its rule, and puts a run in the division where it belongs."""

import dataclasses

import pytest
from trained_runs import FACTS, events, record, with_value

from pytest_mlhpc.mlperf import rules
from pytest_mlhpc.mlperf.limits import QUALITY
from pytest_mlhpc.mlperf.trained import trained
from pytest_mlhpc.worker.quality.settings import TARGETS

HALF_AN_HOUR_NS = 1800 * 10**9


def judged(workload="cosmoflow", told=None, **changes):
    found = rules.departures(trained(record(1, workload, told=told, **changes)))
    return rules.division(found), [(one.rule.name, one.text) for one in found]


def earlier(event):
    return dataclasses.replace(event, time_ns=event.time_ns - HALF_AN_HOUR_NS)


def after_half_an_hour():
    return tuple(earlier(event) if event.key == "init_start" else event for event in events())


def without_the_first_evaluation():
    return tuple(one for one in events() if one.metadata.get("epoch_num") != 1 or "eval" not in one.key)


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam"])
def test_a_faultless_run_belongs_in_the_closed_division(workload):
    assert judged(workload) == ("closed", [])


#: What differs -> its division, its rule, and its text.
CASES = {
    "another kernel": ({"parameters": {"kernel_size": 2}}, "open", "model", "kernel_size=2, not 3"),
    "another optimizer": ({"parameters": {"optimizer": "lamb"}}, "open", "optimizer", "optimizer lamb, not sgd"),
    "compressed gradients": (
        {"parameters": {"gradient_compression": "powersgd"}}, "open", "method",
        "gradients are exchanged with loss (gradient_compression=powersgd)",
    ),
    "bagging": ({"parameters": {"bagging": [2, 1]}}, "open", "method", "an ensemble of base models (bagging)"),
    "another momentum": (
        {"told": events(facts={**FACTS["cosmoflow"], "opt_momentum": 0.5})}, "open", "optimizer", "opt_momentum=0.5, not 0.9",
    ),
    "made data": ({"data_kind": "synthetic"}, "neither", "data_set", "synthetic data"),
    "a warm cache": ({"cache": "warm"}, "neither", "caches", "the cache was warm, not cold"),
    "fewer samples": (
        {"told": events(counts=(64, 65_536))}, "neither", "data_set", "64 training samples, not 524,288",
    ),
    "no convergence": (
        {"told": events(reached=False)}, "neither", "convergence", "it ended before mean absolute error <= 0.124",
    ),
    "an easier target": (
        {"told": with_value("quality_target", 0.5)}, "neither", "quality_target",
        "the target was 0.5 of mean absolute error, not 0.124",
    ),
    "half an hour of initialisation": (
        {"told": after_half_an_hour()}, "neither", "initialisation", "initialisation took 30 min, 30 are too many",
    ),
    "a training epoch without evaluation": (
        {"told": without_the_first_evaluation()}, "neither", "evaluation", "2 evaluations in 3 training epochs",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "division", "rule", "text"), CASES.values(), ids=CASES)
def test_a_departure_has_its_rule_and_its_division(changes, division, rule, text):
    assert judged(**changes) == (division, [(rule, text)])


def test_a_harder_target_is_allowed():
    assert judged(told=with_value("quality_target", 0.121)) == ("closed", [])


def test_deepcam_wants_a_seed_and_a_group_of_batchnorm():
    facts = {**FACTS["deepcam"], "batchnorm_group_size": 0}
    division, found = judged("deepcam", told=events("deepcam", facts=facts), parameters={"seed": 0})
    assert division == "open"
    assert found == [("optimizer", f"{name}=0, not more than 0") for name in ("seed", "batchnorm_group_size")]


def test_targets_are_those_that_runs_are_made_with():
    found = {name: (one.key, "lower" if one.lower else "higher", one.target) for name, one in QUALITY.items()}
    assert found == dict(TARGETS)


def test_every_rule_says_where_it_stands():
    assert all(rule.document and rule.section for rule in rules.RULES)
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)


def test_too_few_runs_and_too_many_lost_ones_break_the_rule_of_runs():
    found = rules.of_group("cosmoflow", 9, 2)
    assert [one.text for one in found] == ["9 of 10 runs", "2 runs did not converge, one may"]
    assert rules.of_group("deepcam", 5, 1) == ()


def test_a_run_that_was_cut_off_did_not_reach_its_target():
    assert not trained(record(told=events()[:-1])).reached
