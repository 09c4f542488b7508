from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.jobs.contradictions import duplicates, lacking

RATE = {"rate": {"pattern": r"rate: (\S+)", "unit": "items/s", "better": "higher"}}


def problems_of(call) -> list[str]:
    with pytest.raises(SpecError) as caught:
        call()
    return [str(problem) for problem in caught.value.problems]


def test_parametrize_wins_over_marker_over_preset_over_default(declare):
    spec = declare(params={"steps": 7}, steps=5, warmup=2, input_size=64)
    assert (spec.steps, spec.warmup_steps) == (7, 2)
    assert spec.parameters["input_size"] == 64  # marker
    assert spec.parameters["base_channels"] == 8  # preset smoke
    assert spec.parameters["kernel_size"] == 3  # default
    assert spec.asked == {"steps": 7, "warmup": 2, "input_size": 64}


def test_the_option_preset_replaces_the_partitions(declare):
    assert declare().preset == "smoke"
    assert declare(preset="reference").parameters["input_size"] == 128


def test_devices_are_ranks_and_choose_the_launcher(declare):
    assert (declare().ranks, declare().launcher) == (1, "plain")
    assert (declare(devices=4).ranks, declare(devices=4).launcher) == (4, "torchrun")
    assert declare(devices=4, launcher="plain").launcher == "plain"


def test_a_misspelt_field_is_named_with_the_nearest_one(declare):
    assert problems_of(lambda: declare(kernal_size=2)) == [
        "t.py::test_it: kernal_size: cosmoflow has no such field (did you mean 'kernel_size'?)"
    ]


def test_an_unknown_workload_is_named_with_the_nearest_one(declare):
    (problem,) = problems_of(lambda: declare("cosmflow"))
    assert "unknown workload 'cosmflow'" in problem
    assert "did you mean 'cosmoflow'" in problem


def test_all_problems_are_listed_at_once(declare):
    found = problems_of(lambda: declare(devices=0, precision="fp8", steps="many", preset="smal"))
    assert len(found) == 4
    assert any("0 is less than 1" in text for text in found)
    assert any("'fp8' is not one of" in text for text in found)
    assert any("expected int, found 'many'" in text for text in found)
    assert any("no preset 'smal'" in text and "did you mean 'small'" in text for text in found)


def test_numbers_that_no_machine_takes_are_refused(declare):
    found = problems_of(lambda: declare(loader_workers=1025, steps=10**400, learning_rate=float("inf")))
    assert sorted(text.split(": ", 1)[1] for text in found) == [
        "learning_rate: inf is not finite",
        "loader_workers: 1025 is more than 1024",
        "steps: does not fit into 64 bits",
    ]


@pytest.mark.parametrize("value", [True, 1.5, "1", [1], float("nan")])
def test_a_number_of_devices_is_a_whole_number(declare, value):
    assert len(problems_of(lambda: declare(devices=value))) == 1


def test_devices_divide_over_nodes(declare):
    assert "3 devices do not divide over 2 nodes" in problems_of(lambda: declare(nodes=2, devices=3))[0]


def test_a_data_set_of_the_system_is_found_and_another_name_is_not(declare):
    assert declare(data="cosmo").data == "cosmo"
    assert declare(data="/some/where").data == "/some/where"
    (problem,) = problems_of(lambda: declare(data="cosmos"))
    assert "neither a data set of sys nor a path (did you mean 'cosmo'?)" in problem


def test_judge_false_judges_nothing_and_a_list_judges_what_it_names(declare):
    assert declare(judge=False).judged == ()
    spec = declare(judge=["mfu"])
    assert spec.judged == ("mfu",)
    assert "mfu" in spec.expected_metrics  # a run that does not report it has failed
    assert problems_of(lambda: declare("command", argv=["x"], metrics=RATE, judge=["speed"])) == [
        "t.py::test_it: judge: not among the metrics: speed"
    ]


def test_a_command_runs_beside_others_and_judges_metrics_with_a_direction(declare):
    metrics = {**RATE, "size": {"unit": "B", "better": "none"}}
    spec = declare("command", argv=("./bench", "-n", 4), metrics=metrics)
    assert spec.argv == ("./bench", "-n", "4")
    assert not spec.exclusive
    assert spec.judged == ("rate",)
    assert spec.expected_metrics == ("rate", "size")
    assert declare().exclusive


@pytest.mark.parametrize(
    ("marked", "text"),
    [
        ({"metrics": RATE}, "argv: names no program"),
        ({"argv": [], "metrics": RATE}, "argv: names no program"),
        ({"argv": "./bench -n 4", "metrics": RATE}, "expected list, found './bench -n 4'"),
        ({"argv": ["a\0b"], "metrics": RATE}, "holds a NUL character"),
        ({"argv": ["x"]}, "metrics: names no metric, so nothing would be measured"),
        ({"argv": ["x"], "metrics": {"Rate": RATE["rate"]}}, "snake_case"),
        ({"argv": ["x"], "metrics": {"rate": 3}}, "expected a mapping"),
        ({"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "patern": "x"}}}, "did you mean 'pattern'"),
        (
            {"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "unit": "parsecs"}}},
            "unit 'parsecs' is not one of",
        ),
        ({"argv": ["x"], "metrics": {"rate": {"unit": "s"}}}, "better None is not one of"),
        ({"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "pattern": "("}}}, "no regular expression"),
        (
            {"argv": ["x"], "metrics": {"rate": {**RATE["rate"], "pattern": "x"}}},
            "0 groups; exactly one must catch the figure",
        ),
        ({"argv": ["x"], "metrics": RATE, "name": "a\nb"}, "control characters"),
    ],
)
def test_a_command_that_cannot_be_is_refused(declare, marked, text):
    assert text in "\n".join(problems_of(lambda: declare("command", **marked)))


def test_what_a_partition_lacks_is_said(declare, target):
    assert lacking(declare(devices=8)) == ""
    assert "has 8 cores, 9 ranks asked" in lacking(declare(devices=9))
    assert "at most 4 nodes, 5 asked" in lacking(declare(nodes=5, devices=5))
    gpus = replace(target, partition=replace(target.partition, accelerator="cuda"))
    assert "has 0 devices, 1 asked" in lacking(declare(on=gpus))


def test_two_tests_with_one_key_are_named_both(declare):
    first, second = declare(node_id="a.py::test_it"), declare(node_id="b.py::test_it")
    (problem,) = duplicates([first, second])
    assert "b.py::test_it" in str(problem)
    assert "the same key as a.py::test_it" in str(problem)
    assert duplicates([first, declare(node_id="b.py::test_it", name="other")]) == []


def test_the_effective_global_batch_is_the_workloads_per_device_batch_times_the_devices(declare):
    assert declare(devices=4).parameters["global_batch"] == 32


def test_values_that_are_fine_alone_but_not_together_are_refused_before_anything_starts(declare):
    with pytest.raises(SpecError, match="global_batch=10 does not divide over 4 devices"):
        declare(devices=4, global_batch=10)


def test_a_launcher_of_a_third_party_is_known_by_its_payload_module(declare):
    assert declare(launcher="ours").launcher == "site_tools.launch"
    assert declare(launcher="torchrun").launcher == "torchrun"


def test_an_unknown_launcher_is_refused_with_the_nearest(declare):
    with pytest.raises(SpecError, match=r"unknown launcher 'torchrum'.*did you mean 'torchrun'"):
        declare(launcher="torchrum")


def test_paths_and_numbers_in_argv_reach_the_program_and_the_record_as_text(command):
    spec = command(argv=[Path("/opt/bench"), "-n", 4, 0.5])
    assert spec.argv == ("/opt/bench", "-n", "4", "0.5")
    assert json.loads(json.dumps(spec.asked))["argv"] == ["/opt/bench", "-n", "4", "0.5"]


@pytest.mark.parametrize("value", [None, True, b"x", ["-n"], {"n": 4}, object()])
def test_anything_else_in_argv_is_refused_with_its_place(command, value):
    (problem,) = problems_of(lambda: command(argv=["./bench", value]))
    assert "argv: element 1 is" in problem
    assert "expected text, a number or a path" in problem


@pytest.mark.parametrize(("given", "seconds"), [("30m", 1800.0), ("1h30m", 5400.0), (90, 90.0), (0.5, 0.5)])
def test_a_time_limit_is_written_as_in_the_systems_file(declare, given, seconds):
    assert declare(time_limit=given).time_limit_s == seconds


@pytest.mark.parametrize("given", ["soon", True, -1, float("nan"), "0s"])
def test_a_time_limit_that_is_none_is_refused(declare, given):
    with pytest.raises(SpecError, match="time_limit"):
        declare(time_limit=given)


def test_a_partition_without_a_feature_that_a_test_wants_does_not_run_it(declare, target):
    fast = replace(target, partition=replace(target.partition, features=frozenset({"ib"})))
    assert lacking(declare(features=["ib"], on=fast)) == ""
    assert lacking(declare(features=["ib", "nvme"], on=fast)) == "sys:part has no feature 'nvme'"
    assert declare(features=["ib"]).benchmark == declare().benchmark
