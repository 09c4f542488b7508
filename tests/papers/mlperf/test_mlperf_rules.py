"""Each departure from a rule is found, named with its rule, and puts a run in the division where it belongs."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from trained_runs import FACTS, events, record, with_value

from pytest_mlhpc.node.worker.quality.rules import TARGETS
from pytest_mlhpc.papers.mlperf import results
from pytest_mlhpc.papers.mlperf.trained import QUALITY, trained


def judged(workload="cosmoflow", told=None, **changes):
    found = results.departures(trained(record(1, workload, told=told, **changes)))
    return results.division(found), [(one.rule.name, one.text) for one in found]


@pytest.mark.parametrize("workload", ["cosmoflow", "deepcam"])
def test_a_faultless_run_belongs_in_the_closed_division(workload):
    assert judged(workload) == ("closed", [])


CASES = yaml.safe_load(Path(__file__).with_name("departures.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("changes", "division", "rule", "text"), CASES.values(), ids=CASES)
def test_a_departure_has_its_rule_and_its_division(changes, division, rule, text):
    fields = {name: one for name, one in changes.items() if name not in ("events", "value")}
    told = with_value(*changes["value"]) if "value" in changes else events(**changes.get("events", {}))
    assert judged(told=told, **fields) == (division, [(rule, text)])


def test_a_schedule_that_the_reference_cannot_have_is_for_the_open_division():
    told = events(facts={**FACTS["cosmoflow"], "schedule_departure": "a poly schedule"})
    assert judged(told=told) == ("open", [("optimizer", "a poly schedule")])


def test_half_an_hour_of_initialisation_is_too_much():
    start, *rest = events()
    told = (dataclasses.replace(start, time_ns=start.time_ns - 1800 * 10**9), *rest)
    why = "initialisation took 30 min, 30 are too many"
    assert judged(told=told) == ("neither", [("initialisation", why)])


def test_a_training_epoch_without_evaluation_breaks_the_rule_of_evaluations():
    told = tuple(one for one in events() if one.metadata.get("epoch_num") != 1 or "eval" not in one.key)
    assert judged(told=told) == ("neither", [("evaluation", "2 evaluations in 3 training epochs")])


def test_a_harder_target_is_allowed():
    assert judged(told=with_value("quality_target", 0.121)) == ("closed", [])


def test_deepcam_wants_a_seed_and_a_group_of_batchnorm():
    told = events("deepcam", facts={**FACTS["deepcam"], "batchnorm_group_size": 0})
    found = [("optimizer", f"{name}=0, not more than 0") for name in ("seed", "batchnorm_group_size")]
    assert judged("deepcam", told=told, parameters={"seed": 0}) == ("open", found)


def test_targets_are_those_that_runs_are_made_with():
    found = {name: (one.key, "lower" if one.lower else "higher", one.target) for name, one in QUALITY.items()}
    assert found == dict(TARGETS)


def test_every_rule_says_where_it_stands():
    assert all(rule.document and rule.section for rule in results.RULES)
    assert len({rule.name for rule in results.RULES}) == len(results.RULES)


def test_too_few_runs_and_too_many_lost_ones_break_the_rule_of_runs():
    found = results.of_group("cosmoflow", 9, 2)
    assert [one.text for one in found] == ["9 of 10 runs", "2 runs did not converge, one may"]
    assert results.of_group("deepcam", 5, 1) == ()


def test_a_run_that_was_cut_off_did_not_reach_its_target():
    assert not trained(record(told=events()[:-1])).reached
